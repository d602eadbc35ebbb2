"""Triton kernels of networks, for a GPU. Import them only where Triton is installed."""
