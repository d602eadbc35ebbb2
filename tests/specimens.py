"""Small releases, readings and attacks for the tests of the report."""

import torch

from privot.data.spec import Spec
from privot.measures.reading import Reading
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.product import Product
from privot.release import Guarantee, Release
from privot.report import Attack

GAUSSIAN = Plan((Stage("means", "sum", 8.0), Stage("gradients", "sum", 20.0, 40)), Neighbours.REPLACE)
NAMES = ("cat", "dog", "ship")


def hand(plan=GAUSSIAN, claim=None, shape=(1, 8, 8), classes=3, names=NAMES, each=4, **facts):
    """A set of noise images, ``each`` of a class, with a certificate that its plan proves."""
    images = torch.rand(each * classes, *shape, generator=torch.Generator().manual_seed(0))
    product = Product.set(images, torch.arange(each * classes) % classes)
    known = {"method": "handmade", "plan": plan.to_json(), "event": str(plan.event()), "seed": 0, "data": "mnist", **facts}
    return Release(product, claim or Guarantee.of(plan, 1e-5), Spec(shape, classes, class_names=names), known)


def reading(name="cnn_accuracy", value=0.9, publishable=True, **more):
    fields = {"error": 0.003, "samples": 6000, "reference": "mnist/test", "count": 10000, "ruler": "LeNet-5, 50 epochs"} | more
    return Reading(name=name, value=value, publishable=publishable, **fields)


def attack(name="nearest", fpr=(0.01, 0.1), tpr=(0.012, 0.12), lower=(0.001, 0.08), confidence=0.95, publishable=True):
    return Attack(name, fpr, tpr, lower, confidence, publishable)
