"""Modules that are copied as they are into every build: they import nothing of mla_codegen."""
