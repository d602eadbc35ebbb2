"""A tiny data set, and settings with which every method is quick on it. A new method needs no edit here unless the rule misses it."""

import dataclasses
import tempfile

import numpy as np

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.local.privatize import channel_for, privatize
from privot.methods import methods
from privot.privacy.accounting import Neighbours

SMALL = {
    "batch": 4,
    "channels": 4,
    "code": 4,
    "epochs": 1,
    "features": 32,
    "hidden": 8,
    "lessons": 1,
    "nets": 4,
    "noise": 2.0,
    "per_class": 4,
    "portion": 16,
    "seeing": 2,
    "steps": 4,
    "trained": 2,
    "width": 4,
}
# method: settings, where SMALL and the rule below are not enough
ALSO: dict[str, dict] = {
    # draws of some size: at small rates few of so few records are drawn, and a price takes long to compute
    "dp-gan": {"drawn": 0.5},
    "dp-sinkhorn": {"rate": 0.5},
    "merf-ae": {"drawn": 0.5},
    "gs-wgan": {"critics": 4, "warm": 1, "critic_batch": 2},
    "g-pate": {"critics": 4, "warm": 1, "critic_batch": 2},
    "federated-average-gan": {"rounds": 3, "turns": 1, "records": 4, "critic_batch": 2},
    "federated-gs-wgan": {"rounds": 3, "rows": 2, "records": 12, "warm": 1, "critic_batch": 2},
    "gradient-matching": {"outer": 2, "inner": 2},
    "sliced-flow": {"waves": 3, "bases": 2, "patch": 2, "blocks": 4},
    "sliced-generator": {"waves": 3, "bases": 2, "patch": 2, "blocks": 4},
}

# 47: no whole number of portions of 16, nor of what owners hold
SHAPE = (1, 8, 8)
CLASSES = 3
COUNT = 47
OWNERS = 5


def quick(name):
    """The settings by name: those in SMALL, and 8 for any other whole number that is large by default."""
    fields = dataclasses.fields(methods()[name])
    whole = {each.name: 8 for each in fields if type(each.default) is int and each.default > 64}
    return {
        **whole,
        **{each.name: SMALL[each.name] for each in fields if each.name in SMALL},
        **ALSO.get(name, {}),
    }


def records():
    """Digits-like: a bright patch whose place tells the class, and speckle."""
    rng = np.random.default_rng(7)
    labels = np.arange(COUNT) % CLASSES
    images = rng.random((COUNT, *SHAPE), np.float32) * 0.3
    for label in range(CLASSES):
        images[labels == label, :, 2 * label : 2 * label + 4, 1:5] += 0.6
    return images, labels


def spec_for(method):
    """What must be declared for this method, and no more: nothing, the size, or the size of each class; or how many owners there are."""
    sizes = tuple(int(each) for each in np.bincount(np.arange(COUNT) % CLASSES))
    needs = {"rows": 1, "sorted_blocks": 2}
    error = None
    plain = (Spec(SHAPE, CLASSES), Spec(SHAPE, CLASSES, COUNT), Spec(SHAPE, CLASSES, COUNT, sizes))
    for level, spec in enumerate((*plain, Spec(SHAPE, CLASSES, owners=OWNERS))):
        try:
            if all(needs.get(stage.verb, 0) <= level for stage in method.plan(spec).stages):
                return spec
        except PrivotError as refused:
            error = refused
    raise AssertionError(f"no way to declare the tiny data set suits this method: {error}")


def sealed(images, labels, spec, owners=None):
    return Sensitive(images, labels, spec, repair=True, name="tiny", owners=owners)


def is_local(method):
    """Whether it learns from what clients privatized, and asks no record."""
    plan = method.plan(spec_for(method))
    return not plan.stages and plan.neighbours is Neighbours.LOCAL


def is_open(method):
    """Whether it adds no noise, but opens the gate."""
    return not method.plan(spec_for(method)).stages and not is_local(method)


def asked(method):
    """A budget for a method that wants one; a fixed noise has its own price, as privatized records have, and no noise keeps to none."""
    return (
        None
        if getattr(method, "noise", None) is not None or not method.plan(spec_for(method)).stages
        else 5.0
    )


def given(method, images, labels, spec):
    """What a method is given: a sealed box or, if it is local, what its clients made of one, labels included."""
    if not is_local(method):
        return sealed(images, labels, spec)
    counted = Spec(SHAPE, CLASSES, len(labels))
    with tempfile.TemporaryDirectory() as folder:
        return privatize(
            sealed(images, labels, counted),
            channel_for(counted, "laplace", 40.0, labels_epsilon=5.0),
            ledger=f"{folder}/book.jsonl",
        )
