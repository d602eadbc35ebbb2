"""Data sets of noise, and draws of a seed."""

import numpy as np
import torch

from privot.data import Public, Spec


def make_noise_data(kind=Public, count=60, seed=0, classes=3, size=None, name="noise", sort=False):
    """Random images of 1x8x8, their labels in turn, or sorted."""
    images = np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)
    labels = np.arange(count) % classes
    spec = Spec((1, 8, 8), classes, size)
    return kind(images, np.sort(labels) if sort else labels, spec, name=name)


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_normal(count, dimension, seed, scale=1.0, shift=0.0):
    points = torch.randn(count, dimension, generator=make_generator(seed), dtype=torch.float64)
    return points * scale + shift
