"""An interpreter of graphs in torch, with gradients, and functions shared with the GPU's fallback kernels."""
