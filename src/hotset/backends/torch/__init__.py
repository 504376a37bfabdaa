"""A graph executed by torch, with gradients, and functions that the GPU's fallback kernels share."""
