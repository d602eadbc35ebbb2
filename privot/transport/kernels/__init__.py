"""Triton kernels of optimal transport, for a GPU. Import them only where Triton is installed."""
