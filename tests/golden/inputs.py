"""What runs are given: random tensors, digits, and surroundings that make them quick."""

import os
from pathlib import Path
from unittest import mock

import torch

from privot import io
from privot.data import Public, Sensitive, Spec, load_dataset
from privot.privacy import accounting


def coarse_accounting():
    """Sampled plans are priced on the coarsest grid, which is 30 times as quick."""
    return mock.patch.object(accounting, "GRID_STEPS", accounting.GRID_STEPS[-1:])


def no_weights():
    """No folder of the system has weights of networks."""
    folders = [Path(os.environ["HOME"]) / "data"]
    return mock.patch.object(io, "list_data_folders", return_value=folders)


def rng(seed):
    return torch.Generator().manual_seed(seed)


def uniform(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=rng(seed), dtype=dtype)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)


def digits(count, start=0):
    """Images [count, 1, 8, 8] and labels [count] of the embedded digits."""
    images, labels = load_dataset("digits", public=True).records()
    return images[start : start + count], labels[start : start + count]


def public_digits(count, start=0):
    images, labels = digits(count, start)
    spec = Spec((1, 8, 8), 10)
    return Public(images.numpy(), labels.numpy(), spec, name=f"digits from {start}")


def sensitive_digits(count, size=None, **more):
    images, labels = digits(count)
    return Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10, size), **more)
