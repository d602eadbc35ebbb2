"""Random numbers that follow from a seed."""

import torch


def seed_generator(seed=0):
    return torch.Generator().manual_seed(seed)
