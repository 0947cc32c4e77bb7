"""mla-codegen: turns a YAML spec into specialised split-KV kernels for MLA decode."""

__version__ = "0.1.0"
