"""Candidates of an attack: members, non-members and a population."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.samples import check_class_names

AnyDataset = Sensitive | Public
POPULATION_FRACTION = 0.2  # of the non-members, if an attack needs a population and none is given


def concatenate(
    members: AnyDataset,
    nonmembers: AnyDataset,
    declare_class_sizes: bool = False,
    num_clients: int | None = None,
) -> AnyDataset:
    """Join members and, after them, non-members into one data set of candidates.

    Args:
        members: Members.
        nonmembers: Non-members.
        declare_class_sizes: Whether the sizes of its classes are declared.
        num_clients: Number of clients that the gate deals the records to.

    Returns:
        The candidates, public if both sides are.

    Raises:
        SettingError: If shapes or classes differ.
    """
    spec = members.spec
    if spec.shape != nonmembers.spec.shape or spec.num_classes != nonmembers.spec.num_classes:
        raise SettingError(
            "members and non-members must be images of one shape with the same classes"
        )
    check_class_names(
        "the members", spec.class_names, "the non-members", nonmembers.spec.class_names
    )
    sides = (members, nonmembers)
    if members._images.dtype == nonmembers._images.dtype:
        images = np.concatenate([side._images for side in sides])
    else:  # one side has bytes up to 255, the other floats up to 1
        images = np.concatenate([side._read_records(slice(None)).images.numpy() for side in sides])
    labels = np.concatenate([side._labels for side in sides])
    class_sizes = None
    if declare_class_sizes:
        class_sizes = tuple(np.bincount(labels, minlength=spec.num_classes).tolist())
    candidate_spec = Spec(
        spec.shape,
        spec.num_classes,
        len(labels),
        class_sizes,
        class_names=spec.class_names,
        flip_invariant=spec.flip_invariant,
        num_clients=num_clients,
    )
    dataset_class = Public if all(isinstance(side, Public) for side in sides) else Sensitive
    return dataset_class(images, labels, candidate_spec, name="candidates")


def subsample_indices(dataset: AnyDataset, count: int | None, seed: int) -> slice | Tensor:
    """Choose records at random by the seed.

    Args:
        dataset: The data set.
        count: Number of records; None, or more than there are: all.
        seed: Seed of the choice.

    Returns:
        Indices of the records, or a slice of all.

    Raises:
        SettingError: If the count is below 1.
    """
    num_records = dataset._count_records()
    if count is None or count >= num_records:
        return slice(None)
    if count < 1:
        raise SettingError(f"candidates={count}: give at least 1 of each side")
    return torch.randperm(num_records, generator=torch.Generator().manual_seed(seed))[:count]


def compute_within_class_variance(images: Tensor, labels: Tensor) -> float:
    """Compute the variance within classes, summed over pixels.

    It is half the mean squared distance of two images of a class. Classes of one image are left
    out.
    """
    by_class = [images[labels == label].flatten(1).double() for label in labels.unique()]
    several = [pixels for pixels in by_class if len(pixels) > 1]
    total = sum(len(pixels) * pixels.var(0).sum().item() for pixels in several)
    return total / max(1, sum(map(len, several)))


def split_population(
    population: AnyDataset | None, nonmembers: Records, seed: int
) -> tuple[Records, Records]:
    """Give the population, and the non-members that are left as candidates.

    Args:
        population: Given records; None: a fifth of the non-members is set aside.
        nonmembers: Non-members.
        seed: Seed of the choice.

    Returns:
        Population and non-members.
    """
    if population is not None:
        return population._read_records(slice(None)), nonmembers
    count = len(nonmembers.labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    population_size = round(POPULATION_FRACTION * count)
    chosen = order[:population_size]
    remaining = order[population_size:]
    return Records(nonmembers.images[chosen], nonmembers.labels[chosen]), Records(
        nonmembers.images[remaining], nonmembers.labels[remaining]
    )
