"""A tiny dataset, and settings with which any method runs on it in a moment."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import numpy as np

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.local.dataset import PrivatizedDataset
from privot.local.privatize import build_image_channel, privatize
from privot.methods import Method
from privot.privacy.plan import Neighbours

# 47 is no multiple of the chunk size 16, nor of the number of clients.
NUM_RECORDS = 47
NUM_CLASSES = 3
NUM_CLIENTS = 5
SHAPE = (1, 8, 8)

TINY_SETTINGS: dict[str, Any] = {
    "autoencoder_steps": 1,
    "base_channels": 4,
    "batch_per_class": 4,
    "batch_size": 4,
    "critic_channels": 4,
    "critic_steps": 1,
    "epochs": 1,
    "feature_batch_size": 16,
    "generator_channels": 4,
    "hidden_dim": 8,
    "images_per_class": 4,
    "latent_dim": 4,
    "net_train_epochs": 1,
    "net_width": 4,
    "nets_per_round": 2,
    "noise_multiplier": 2.0,
    "num_features": 32,
    "num_networks": 4,
    "num_pretrained_nets": 2,
    "num_random_nets": 4,
    "steps": 4,
}


def choose_tiny_settings(method_class: type[Method]) -> dict[str, Any]:
    """Choose settings with which a method is quick on the tiny dataset.

    Settings with a common name get the value of `TINY_SETTINGS`. Every other integer setting
    whose default is above 64 becomes 8.
    """
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(method_class):  # type: ignore[arg-type]
        if field.name in TINY_SETTINGS:
            settings[field.name] = TINY_SETTINGS[field.name]
        elif type(field.default) is int and field.default > 64:
            settings[field.name] = 8
    return settings


def make_records() -> tuple[np.ndarray, np.ndarray]:
    """Make images with a bright patch whose position tells the class, and their labels.

    Returns:
        Images, float32 [records, channels, height, width] in [0, 1], and labels [records].
    """
    rng = np.random.default_rng(7)
    labels = np.arange(NUM_RECORDS) % NUM_CLASSES
    images = rng.random((NUM_RECORDS, *SHAPE), np.float32) * 0.3
    for label in range(NUM_CLASSES):
        images[labels == label, :, 2 * label : 2 * label + 4, 1:5] += 0.6
    return images, labels


def choose_spec(method: Method) -> Spec:
    """Declare what this method needs, and no more: nothing, the size, class sizes, or clients.

    Raises:
        AssertionError: If the method accepts none of these declarations.
    """
    class_sizes = tuple(np.bincount(np.arange(NUM_RECORDS) % NUM_CLASSES).tolist())
    specs = (
        Spec(SHAPE, NUM_CLASSES),
        Spec(SHAPE, NUM_CLASSES, NUM_RECORDS),
        Spec(SHAPE, NUM_CLASSES, NUM_RECORDS, class_sizes),
        Spec(SHAPE, NUM_CLASSES, num_clients=NUM_CLIENTS),
    )
    least_declaration = {"rows": 1, "sorted_blocks": 2}
    error = None
    for level, spec in enumerate(specs):
        try:
            stages = method.plan(spec).stages
        except PrivotError as refusal:
            error = refusal
            continue
        if all(least_declaration.get(stage.operation, 0) <= level for stage in stages):
            return spec
    raise AssertionError(f"the method accepts no declaration of the tiny dataset: {error}")


def seal_records(
    images: np.ndarray, labels: np.ndarray, spec: Spec, client_ids: np.ndarray | None = None
) -> Sensitive:
    """Put records behind the gate.

    Args:
        images: Images [records, channels, height, width]; values out of range are repaired.
        labels: Labels [records].
        spec: What the data owner declares.
        client_ids: The client of each record [records].

    Returns:
        The sensitive dataset.
    """
    return Sensitive(images, labels, spec, repair=True, name="tiny", client_ids=client_ids)


def is_local(method: Method) -> bool:
    """Tell whether the method learns from privatized records and queries no sensitive ones."""
    plan = method.plan(choose_spec(method))
    return not plan.stages and plan.neighbours is Neighbours.LOCAL


def has_no_mechanism(method: Method) -> bool:
    """Tell whether the method reads the records without noise."""
    return not method.plan(choose_spec(method)).stages and not is_local(method)


def choose_epsilon(method: Method) -> float | None:
    """Choose a budget for a method that needs one; None where the settings fix the noise."""
    if method.noise_multiplier is not None or not method.plan(choose_spec(method)).stages:
        return None
    return 5.0


def make_method_input(
    method: Method, images: np.ndarray, labels: np.ndarray, spec: Spec
) -> Sensitive | PrivatizedDataset:
    """Make the dataset that a method is given: sensitive records, or privatized ones.

    Args:
        method: The method.
        images: Images [records, channels, height, width].
        labels: Labels [records].
        spec: What the data owner declares.

    Returns:
        The dataset.
    """
    if not is_local(method):
        return seal_records(images, labels, spec)
    spec = Spec(SHAPE, NUM_CLASSES, len(labels))
    with tempfile.TemporaryDirectory() as folder:
        return privatize(
            seal_records(images, labels, spec),
            build_image_channel(spec, "laplace", 40.0, labels_epsilon=5.0),
            ledger=f"{folder}/ledger.jsonl",
        )
