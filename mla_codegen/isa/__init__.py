"""See what Triton's compiler made of a kernel, for AMD and NVIDIA targets, with no GPU present."""
