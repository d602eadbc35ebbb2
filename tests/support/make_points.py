"""Gaussian points for the tests of transport."""

import torch


def make_points(*shape, seed=0, scale=1.0, shift=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (scale * points + shift).to(dtype)
