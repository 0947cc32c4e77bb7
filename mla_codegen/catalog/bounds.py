"""Errors that `verify`, the benchmarks and the tests allow, against float64 on the KV as stored."""

BOUND_16_BIT = 3e-3  # relative L2 of the output, 16-bit products
BOUND_FP8 = 4e-2  # the same with q and the weights rounded to fp8
LSE_BOUND_16_BIT = 1e-3
LSE_BOUND_FP8 = 0.2
