"""Kernels written by mla-codegen; `dispatch` is the way in."""
