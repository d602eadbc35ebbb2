"""Data and leaky releases of the controls of attacks, made of the embedded digits.

The digits are a public data set. All is deterministic by a seed and takes seconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from privot.data.dataset import Public, Records
from privot.data.loading import load_dataset
from privot.data.spec import Spec
from privot.release.artifact import Artifact
from privot.runtime import Streams

NUM_CANDIDATES = 200  # half of them members
NUM_UNRELATED = 100
NUM_POPULATION = 400
NUM_MEMORIZED = 48  # candidates that classifiers memorize, two thirds of them with a wrong label
BLUR_NOISE = 0.05  # standard deviation, so that released images are not exact copies
KEY_DIM = 8  # latent dimension of the memorizing generator
DIGITS_SPEC = Spec((1, 8, 8), 10)


class ControlData(NamedTuple):
    """Data of a control.

    Attributes:
        members: Members.
        nonmembers: Non-members.
        unrelated_records: Records that are no candidates, of which the null release is made.
        population: Population for attacks that need one.
    """

    members: Records
    nonmembers: Records
    unrelated_records: Records
    population: Records


@cache
def load_digit_splits(seed: int) -> tuple[Records, Records, Records]:
    """Split the digits at random into candidates, unrelated records and a population.

    There are 200, 100 and 400 of them. The first half of the candidates are the members.
    """
    dataset = load_dataset("digits", public=True)
    assert isinstance(dataset, Public)
    images, labels = dataset.records()
    sizes = (NUM_CANDIDATES, NUM_UNRELATED, NUM_POPULATION)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    candidates, unrelated, population = (
        Records(images[indices], labels[indices]) for indices in order[: sum(sizes)].split(sizes)
    )
    return candidates, unrelated, population


def draw_digits(seed: int) -> ControlData:
    """Draw the data of a control from the digits as they are."""
    candidates, unrelated, population = load_digit_splits(seed)
    (member_images, nonmember_images), (member_labels, nonmember_labels) = (
        tensor.split(NUM_CANDIDATES // 2) for tensor in candidates
    )
    return ControlData(
        Records(member_images, member_labels),
        Records(nonmember_images, nonmember_labels),
        unrelated,
        population,
    )


def draw_mislabeled_digits(seed: int) -> ControlData:
    """Draw few candidates, two thirds of them with a wrong label.

    A classifier predicts a wrong label only if it has memorized the candidate.
    """
    _, _, (images, labels) = load_digit_splits(seed)
    rng = Streams(seed).make_rng("labels")
    is_wrong = torch.rand(len(labels), generator=rng) < 2 / 3
    shift = torch.randint(1, DIGITS_SPEC.num_classes, labels.shape, generator=rng)
    labels = torch.where(is_wrong, labels + shift, labels) % DIGITS_SPEC.num_classes
    half = NUM_MEMORIZED // 2
    sizes = (half, half, half, len(labels) - 3 * half)
    return ControlData(
        *(Records(*side) for side in zip(images.split(sizes), labels.split(sizes), strict=True))
    )


def build_blurred_set(records: Records, seed: int) -> Artifact:
    """Build a set of the records plus a little noise."""
    rng = Streams(seed).make_rng("blur")
    noise = BLUR_NOISE * torch.randn(records.images.shape, generator=rng)
    return Artifact.from_images((records.images + noise).clamp(0, 1), records.labels)


def build_shifted_set(records: Records, seed: int) -> Artifact:
    """Build a set of the records shifted by one image, as distribution matching shifts images."""
    population = load_digit_splits(seed)[2]
    shifted = records.images + population.images.mean(0) - records.images.mean(0)
    return Artifact.from_images(shifted, records.labels)


class MemorizingGenerator(nn.Module):
    """A generator that stores images, each with a key, and blends those whose keys are near z."""

    def __init__(self, images: Tensor, labels: Tensor, keys: Tensor):
        """Store the images.

        Args:
            images: Images, [stored, channels, height, width].
            labels: Their classes, [stored].
            keys: Their keys, [stored, latent_dim].
        """
        super().__init__()
        self.images = nn.Buffer(images)
        self.labels = nn.Buffer(labels)
        self.keys = nn.Buffer(keys)
        self.latent_dim = keys.shape[1]

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Blend the stored images of each class by a softmax over keys."""
        is_other_class = labels[:, None] != self.labels  # [latents, stored]
        weights = (2 * latents @ self.keys.T).masked_fill(is_other_class, -torch.inf).softmax(1)
        return (weights @ self.images.flatten(1)).view(-1, *self.images.shape[1:])


class MemorizingArtifact(Artifact):
    """An artifact whose generator is a `MemorizingGenerator`."""

    def build_generator(self) -> nn.Module:
        """Build the generator of the stored images."""
        return MemorizingGenerator(**self.tensors)


def build_memorizing_artifact(records: Records, seed: int) -> Artifact:
    """Build a generator that reproduces the records."""
    rng = Streams(seed).make_rng("keys")
    keys = torch.randn(len(records.labels), KEY_DIM, generator=rng)
    return MemorizingArtifact(
        "generator", {"images": records.images, "labels": records.labels, "keys": keys}
    )
