"""A tiny data set, and settings with which every method is quick on it. A new method needs no edit here unless the rule misses it."""

import dataclasses
import tempfile

import numpy as np

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.local.privatize import build_image_channel, privatize
from privot.methods import list_methods
from privot.privacy.accounting import Neighbours

TINY_SETTINGS = {
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
# Settings of single methods, where SMALL and `quick` are not enough. At small sample rates few of so
# few records are sampled, and the cost takes long to compute.
EXTRA_SETTINGS: dict[str, dict] = {
    "distribution-matching": {"steps": 8},
    "dp-gan": {"sample_rate": 0.5, "generator_channels": 48},
    "dp-sinkhorn": {"sample_rate": 0.5},
    "merf-ae": {"sample_rate": 0.5},
    "gs-wgan": {"num_critics": 4, "warmup_rounds": 1, "critic_batch_size": 2},
    "g-pate": {"num_critics": 4, "warmup_rounds": 1, "critic_batch_size": 2},
    "federated-average-gan": {
        "rounds": 3,
        "generator_steps": 1,
        "records_per_client": 4,
        "critic_batch_size": 2,
    },
    "federated-gs-wgan": {
        "rounds": 3,
        "batch_per_class": 2,
        "records_per_critic": 12,
        "warmup_rounds": 1,
        "critic_batch_size": 2,
    },
    "gradient-matching": {"num_networks": 8, "outer_steps": 2, "inner_steps": 2},
    "sliced-flow": {"num_frequencies": 3, "num_bases": 2, "patch_size": 2, "num_blocks": 4},
    "sliced-generator": {"num_frequencies": 3, "num_bases": 2, "patch_size": 2, "num_blocks": 4},
}

# 47: no whole number of portions of 16, nor of what owners hold
SHAPE = (1, 8, 8)
NUM_CLASSES = 3
NUM_RECORDS = 47
NUM_CLIENTS = 5


def choose_tiny_settings(name):
    """The settings by name: those in SMALL, and 8 for any other whole number that is large by default."""
    fields = dataclasses.fields(list_methods()[name])
    whole = {each.name: 8 for each in fields if type(each.default) is int and each.default > 64}
    return {
        **whole,
        **{each.name: TINY_SETTINGS[each.name] for each in fields if each.name in TINY_SETTINGS},
        **EXTRA_SETTINGS.get(name, {}),
    }


def make_records():
    """Digits-like: a bright patch whose place tells the class, and speckle."""
    rng = np.random.default_rng(7)
    labels = np.arange(NUM_RECORDS) % NUM_CLASSES
    images = rng.random((NUM_RECORDS, *SHAPE), np.float32) * 0.3
    for label in range(NUM_CLASSES):
        images[labels == label, :, 2 * label : 2 * label + 4, 1:5] += 0.6
    return images, labels


def choose_spec(method):
    """What must be declared for this method, and no more: nothing, the size, or the size of each class; or how many owners there are."""
    sizes = tuple(int(each) for each in np.bincount(np.arange(NUM_RECORDS) % NUM_CLASSES))
    needs = {"rows": 1, "sorted_blocks": 2}
    error = None
    plain = (
        Spec(SHAPE, NUM_CLASSES),
        Spec(SHAPE, NUM_CLASSES, NUM_RECORDS),
        Spec(SHAPE, NUM_CLASSES, NUM_RECORDS, sizes),
    )
    for level, spec in enumerate((*plain, Spec(SHAPE, NUM_CLASSES, num_clients=NUM_CLIENTS))):
        try:
            if all(needs.get(stage.operation, 0) <= level for stage in method.plan(spec).stages):
                return spec
        except PrivotError as refused:
            error = refused
    raise AssertionError(f"no way to declare the tiny data set suits this method: {error}")


def seal_records(images, labels, spec, owners=None):
    return Sensitive(images, labels, spec, repair=True, name="tiny", client_ids=owners)


def is_local(method):
    """Whether it learns from what clients privatized, and asks no record."""
    plan = method.plan(choose_spec(method))
    return not plan.stages and plan.neighbours is Neighbours.LOCAL


def has_no_mechanism(method):
    """Whether it adds no noise, but opens the gate."""
    return not method.plan(choose_spec(method)).stages and not is_local(method)


def choose_epsilon(method):
    """A budget for a method that wants one; a fixed noise has its own price, as privatized records have, and no noise keeps to none."""
    return (
        None
        if method.noise_multiplier is not None or not method.plan(choose_spec(method)).stages
        else 5.0
    )


def make_method_input(method, images, labels, spec):
    """What a method is given: a sealed box or, if it is local, what its clients made of one, labels included."""
    if not is_local(method):
        return seal_records(images, labels, spec)
    counted = Spec(SHAPE, NUM_CLASSES, len(labels))
    with tempfile.TemporaryDirectory() as folder:
        return privatize(
            seal_records(images, labels, counted),
            build_image_channel(counted, "laplace", 40.0, labels_epsilon=5.0),
            ledger=f"{folder}/book.jsonl",
        )
