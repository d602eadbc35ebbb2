"""The images that are measured, from a release or elsewhere, and checks against the test data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from privot.data import load_catalog, load_dataset
from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, SettingError
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.release import Release

# Share of the test records. Benchmark datasets contain a few duplicates across their splits.
MAX_TEST_OVERLAP = 0.01


@dataclass(frozen=True)
class Samples:
    """Labelled images whose quality is measured.

    Attributes:
        name: Name of the output, as shown in tables.
        images: Images [count, channels, height, width] in [0, 1].
        labels: Labels [count].
        num_classes: Number of classes.
        class_names: Names of the classes, if known.
        release: The release they come from; None for the output of other software.
        publishable: Whether results about the images may be published: a guarantee covers the
            images, or they were made from public data only.
        soft_labels: Soft labels [count, classes] of a released set that has them.
    """

    name: str
    images: Tensor
    labels: Tensor
    num_classes: int
    class_names: tuple[str, ...] | None = None
    release: Release | None = None
    publishable: bool = False
    soft_labels: Tensor | None = None

    @property
    def guarantee(self) -> Guarantee | NoGuarantee | None:
        """The guarantee of the release; None without a release."""
        return self.release.guarantee if self.release else None

    @property
    def flip_invariant(self) -> bool | None:
        """Whether a mirrored image has the same class, as declared; None without a release."""
        return self.release.spec.flip_invariant if self.release else None

    @classmethod
    def from_release(
        cls,
        release: Release,
        name: str,
        num_samples: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        latent_scale: float = 1.0,
    ) -> Samples:
        """Sample a release.

        Args:
            release: The release.
            name: Name of the output, as shown in tables.
            num_samples: Number of images. A released set of at most this many images is used as it
                is, each image once and in its own order.
            seed: Seed of the sampling.
            device: Device of the generator.
            latent_scale: Factor on the latent vectors of a generator.

        Returns:
            The samples, with the soft labels of a set that has them.
        """
        artifact = release.artifact
        spec = release.spec
        publishable = isinstance(release.guarantee, Guarantee) and not release.metadata.get(
            "purpose"
        )
        soft_labels = artifact.tensors.get("soft_labels") if artifact.kind == "set" else None
        is_small_set = artifact.kind == "set" and len(artifact.tensors["labels"]) <= num_samples
        if is_small_set and latent_scale == 1:
            images = artifact.tensors["images"]
            labels = artifact.tensors["labels"]
        else:
            images, labels = release.sample(
                num_samples, seed=seed, device=device, latent_scale=latent_scale
            )
            if soft_labels is not None:
                soft_labels = soft_labels[artifact.find_sample_indices(labels)]
        return cls(
            name,
            images,
            labels,
            spec.num_classes,
            spec.class_names,
            release,
            publishable,
            soft_labels,
        )

    @classmethod
    def from_source(
        cls,
        source: str,
        num_samples: int,
        seed: int = 0,
        num_classes: int | None = None,
        publishable: bool = False,
        class_names: tuple[str, ...] | None = None,
    ) -> Samples:
        """Load samples of a release folder, or the output of other software.

        Args:
            source: A release folder, a folder of class folders, an .npz file with x and y, a
                .parquet file, or the name of a built-in dataset (its training split).
            num_samples: Number of images. Of more, a random subset is taken.
            seed: Seed of the subset, or of the sampling of a release.
            num_classes: Number of classes; None to infer it.
            publishable: Whether results about output of other software may be published. Only the
                caller knows.
            class_names: The class of each class folder, in the order of the labels.

        Returns:
            The samples.
        """
        path = Path(source)
        is_builtin = source in load_catalog()
        if (path / "manifest.json").exists():
            return cls.from_release(Release.load(path), path.resolve().name, num_samples, seed)
        dataset = load_dataset(
            source,
            public=True,
            num_classes=None if is_builtin else num_classes,
            class_names=class_names,
        )
        assert isinstance(dataset, Public)
        records = dataset.records()
        if len(records.labels) > num_samples:
            generator = torch.Generator().manual_seed(seed)
            indices = torch.randperm(len(records.labels), generator=generator)[:num_samples]
            records = type(records)(records.images[indices], records.labels[indices])
        if is_builtin:
            name = source
        else:
            name = path.resolve().name if path.is_dir() else path.resolve().stem
        return cls(
            name,
            *records,
            dataset.spec.num_classes,
            dataset.spec.class_names,
            publishable=publishable or is_builtin,
        )


def refuse_overlap(
    test_data: Sensitive | Public, training_data: Sensitive | Public | Tensor, training_name: str
) -> None:
    """Check that the test records were not trained on, by the content of the images.

    Args:
        test_data: The test data.
        training_data: Data or images [count, channels, height, width] that were trained on.
        training_name: What the error message calls the training data.

    Raises:
        DataError: More than 1 % of the test records are among the training records.

    >>> digits = load_dataset("digits", public=True)
    >>> refuse_overlap(load_dataset("digits", "test", public=True), digits, "the training data")
    >>> refuse_overlap(digits, digits, "the training data")
    Traceback (most recent call last):
    privot.errors.DataError: The test data overlaps the training data. Test on records that ...
    """
    if isinstance(training_data, Tensor):
        training_images = training_data
    else:
        training_images = training_data._read_records(slice(None)).images
    training_hashes = _hash_images(training_images)
    test_hashes = _hash_images(test_data._read_records(slice(None)).images)
    num_overlaps = sum(digest in training_hashes for digest in test_hashes)
    if num_overlaps > MAX_TEST_OVERLAP * len(test_hashes):
        raise DataError(
            f"The test data overlaps {training_name}. Test on records that were not trained on."
        )


def _hash_images(images: Tensor) -> set[bytes]:
    """Hash the 8-bit pixels of each image."""
    pixels = (images.clamp(0, 1) * 255).round().byte().flatten(1).numpy()
    return {hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in pixels}


def check_matching_spec(samples: Samples, test_data: Sensitive | Public) -> None:
    """Check that the test data has the shape and the classes of the samples.

    Raises:
        SettingError: The shape, the number of classes or the class names differ.
    """
    if (
        tuple(samples.images.shape[1:]) != test_data.spec.shape
        or samples.num_classes > test_data.spec.num_classes
    ):
        sample_shape, test_shape = (
            "x".join(map(str, shape)) for shape in (samples.images.shape[1:], test_data.spec.shape)
        )
        raise SettingError(
            f"{samples.name} has images of {sample_shape} and {samples.num_classes} classes, but "
            f"the test data has images of {test_shape} and {test_data.spec.num_classes} classes."
        )
    check_class_names(
        samples.name, samples.class_names, "the test data", test_data.spec.class_names
    )


def check_class_names(
    source: str,
    class_names: tuple[str, ...] | None,
    other_source: str,
    other_class_names: tuple[str, ...] | None,
) -> None:
    """Check that two sources number the same classes in the same way, where both have names.

    Args:
        source: What the error message calls the first source.
        class_names: Its class names; None if unknown.
        other_source: What the error message calls the second source.
        other_class_names: Its class names; None if unknown.

    Raises:
        SettingError: A label stands for two different names.
    """
    pairs = zip(class_names or (), other_class_names or (), strict=False)
    for label, (name, other_name) in enumerate(pairs):
        if name != other_name:
            raise SettingError(
                f"Class {label} is {name!r} in {source}, but {other_name!r} in {other_source}. "
                "Both need the same classes in the same order."
            )


def load_training_data(samples: Samples) -> Sensitive | Public | None:
    """Load the data that a release was trained on, if it is a built-in dataset and available."""
    name = samples.release.metadata.get("data") if samples.release else None
    if not isinstance(name, str) or name not in load_catalog():
        return None
    try:
        return load_dataset(name)
    except DataError:
        return None
