"""CUDA without a GPU: scheduled kernels → CUDA source and launches → cubin → facts of its machine code."""
