"""Images whose class can be read off, extreme images, and a gate whose plan has no price."""

import numpy as np
import torch
from support.fakes import FreePlan, NullLedger

from privot.data.dataset import Sensitive
from privot.privacy.gate import Gate
from privot.runtime import Runtime


def make_rng(seed=0):
    return torch.Generator().manual_seed(seed)


def make_blobs(count=400, labels_from=None):
    """A bright square of 3 x 3 in the left half for label 0, in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 2 if labels_from is None else labels_from % 2
    images = np.zeros((count, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def measure_agreement(images, labels):
    """The fraction of images that are brighter in the half of their label, as blobs are."""
    right = images[..., 4:].sum((1, 2, 3)) > images[..., :4].sum((1, 2, 3))
    return float((right.long() == labels).float().mean())


def make_gate(plan, images, labels, spec, chunk=64, **more):
    """A gate that charges nothing for the stages of the plan."""
    return Gate(
        Sensitive(np.asarray(images), np.asarray(labels), spec),
        FreePlan(plan.stages, plan.neighbours),
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", microbatch_size=chunk),
        **more,
    )
