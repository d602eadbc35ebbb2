"""Triton kernels of the gate, for a GPU. Import them only where Triton is installed."""
