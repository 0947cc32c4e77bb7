# Copied by mla-codegen from mla_codegen/runtime/__init__.py. Do not edit: `mla-codegen build` writes it anew.
"""Modules that are copied as they are into every build: they import nothing of mla_codegen."""
