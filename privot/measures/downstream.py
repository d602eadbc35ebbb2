"""Train on released data, test on real data: the papers' classifiers, by the papers' protocols.

Twelve are classical (see `classical`); networks are ``cnn`` (LeNet-5, of which GS-WGAN's and DP-MERF's tables are made), ``convnet``
(the condensation papers' ConvNet3, trained five times) and ``resnet`` (image benchmarks). Accuracy is that of the last epoch, never the
best one. Networks learn soft labels where a released set has them; the classical classifiers know hard ones alone.
``avg_accuracy`` is the mean over the thirteen of seed 001 (the classical ones and ``cnn``), ``calibrated_accuracy`` the mean of their
ratios to the same classifiers trained on real data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.classical import CLASSICAL, run_all
from privot.measures.result import Reading
from privot.nets.augment import OPERATIONS, operations
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.training import Classifier, Recipe, train
from privot.runtime import Progress, Runtime, silent

NETWORKS: dict[str, tuple[Callable[..., Any], Recipe]] = {
    "cnn": (LeNet, Recipe(epochs=50, rate=0.02, decay=1e-4, drops=(40,))),
    # The evaluation of DSA and DM: 1000 epochs since there is augmentation.
    "convnet": (
        ConvNet,
        Recipe(
            epochs=1000,
            rate=0.01,
            batch=256,
            decay=5e-4,
            drops=(500,),
            half=True,
            even=True,
            augment=OPERATIONS,
            repeats=5,
        ),
    ),
    "resnet": (
        ResNet18,
        Recipe(epochs=50, rate=0.01, batch=256, adam=True, average=0.9999, half=True),
    ),
}
THIRTEEN = (*CLASSICAL, "cnn")
CLASSIFIERS = (*CLASSICAL, *NETWORKS)
STEPS = (
    60_000 // 256 * 50
)  # a network whose epochs would take more steps than this on a large set gets fewer epochs


def downstream(
    images: Tensor,
    labels: Tensor,
    test: Sensitive | Public,
    only: Sequence[str] = ("logistic", "mlp", "cnn"),
    *,
    soft: Tensor | None = None,
    ceiling: Sequence[Reading] = (),
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Reading]:
    """Accuracy on ``test`` of classifiers trained on ``images`` [count, channels, height, width] in [0, 1] and ``labels`` [count].

    ``soft`` holds soft labels [count, classes], which networks learn in place of ``labels``. The error of a reading is that of so many
    test records; of a network trained several times it is the standard deviation over the trainings, and the value their mean.
    ``ceiling`` holds the readings of the same classifiers on real data, for the calibrated accuracy.

    >>> from privot.data import load
    >>> real = load("digits", public=True).records()
    >>> [reading] = downstream(*real, load("digits", "test", public=True), ["logistic"])
    >>> reading.name, reading.value > 0.9
    ('logistic_accuracy', True)
    """
    unknown = [name for name in only if name not in CLASSIFIERS]
    if unknown:
        raise SettingError(f"no classifier {unknown[0]!r}: {', '.join(CLASSIFIERS)}")
    if images.shape[1:] != test.spec.shape:
        raise SettingError(
            f"test images are {list(test.spec.shape)}, released ones {list(images.shape[1:])}"
        )
    if len(images) != len(labels) or len(labels.unique()) < 2:
        raise SettingError(
            f"{len(images)} released images with {len(labels.unique())} labels: a classifier needs at least two classes"
        )
    real = test._take(slice(None))
    classes = test.spec.classes
    device = (runtime or Runtime()).target
    if soft is not None and (len(soft) != len(labels) or soft.shape[1] > classes):
        raise SettingError(
            f"soft labels are {list(soft.shape)}: one row for each of {len(labels)} images, at most {classes} columns"
        )
    right: dict[str, tuple[Tensor, float, str]] = {}
    for name in (each for each in only if each in NETWORKS):
        start = time.perf_counter()
        repeats = NETWORKS[name][1].repeats
        net, ruler = trained(
            name, images, labels, test.spec, device, seed, progress, soft=soft, repeats=repeats
        )
        right[name] = (net.guesses(real.images) == real.labels, time.perf_counter() - start, ruler)
    classical = [each for each in only if each in CLASSICAL]
    for name, (guesses, seconds) in run_all(
        classical, Records(images, labels), real.images, classes, seed, progress=progress
    ).items():
        right[name] = (
            guesses == real.labels,
            seconds,
            "scikit-learn type on 8-bit pixels, settings of GS-WGAN's evaluation",
        )

    def reading(
        name: str, hits: Tensor, ruler: str, seconds: float, public: bool = True
    ) -> Reading:
        count = hits.shape[-1]
        public = public and isinstance(test, Public)
        error = (
            (hits.var(correction=0) / count).sqrt() if hits.ndim == 1 else hits.mean(1).std()
        )  # [trainings, count] if several
        return Reading(
            name,
            hits.mean().item(),
            error.item(),
            len(images),
            test.name,
            count,
            public,
            ruler,
            seconds=seconds,
        )

    found = [
        reading(f"{name}_accuracy", right[name][0].double(), right[name][2], right[name][1])
        for name in only
    ]
    if set(only) >= set(THIRTEEN):
        hits = torch.stack([right[name][0].double() for name in THIRTEEN])
        took = math.fsum(right[name][1] for name in THIRTEEN)
        found.append(
            reading("avg_accuracy", hits.mean(0), f"mean over {len(THIRTEEN)} classifiers", took)
        )
        known = {each.name.removesuffix("_accuracy"): each for each in ceiling}
        if ceiling:
            rulers = {reading.name: (reading.ruler, reading.reference) for reading in found}
            alike = all(
                name in known
                and (known[name].ruler, known[name].reference) == rulers[f"{name}_accuracy"]
                for name in THIRTEEN
            )
            if not alike or min(known[name].value for name in THIRTEEN) <= 0:
                raise SettingError(
                    "ceiling: readings of the same thirteen classifiers on the same test data are needed, all above 0"
                )
            scale = torch.tensor([known[name].value for name in THIRTEEN], dtype=torch.float64)
            ruler = "mean of ratios to real training data"
            public = all(known[name].publishable for name in THIRTEEN)
            found.append(
                reading("calibrated_accuracy", (hits / scale[:, None]).mean(0), ruler, took, public)
            )
    return found


def trained(
    name: str,
    images: Tensor,
    labels: Tensor,
    spec: Spec,
    device: torch.device,
    seed: int = 0,
    progress: Progress = silent,
    *,
    soft: Tensor | None = None,
    repeats: int = 1,
) -> tuple[Classifier, str]:
    """A network of the list, trained on released images by its protocol, and the words for it; several are trained side by side.

    ``spec`` is that of the data it is for: whether images are mirrored is declared there, not decided by a look at them.
    """
    build = NETWORKS[name][0]
    recipe = shortened(NETWORKS[name][1], len(labels))
    recipe = replace(
        recipe, augment=operations(spec.mirrored) if recipe.augment else (), repeats=repeats
    )
    wanted = (
        labels if soft is None else pad(soft, (0, spec.classes - soft.shape[1]))
    )  # the test data may have more classes
    net = train(
        build,
        images,
        wanted,
        spec.classes,
        recipe,
        device,
        seed=seed,
        progress=progress,
        stage=f"training {name}",
    )
    words = [f"{build.__name__}, {recipe}"] + [
        "mean over the trainings, the error is their standard deviation"
    ] * (repeats > 1)
    return net, "; ".join(words + ["soft labels"] * (soft is not None))


def shortened(recipe: Recipe, count: int) -> Recipe:
    """Protocols made for small sets would take days on large ones: past a number of steps, epochs and drops shrink together."""
    wanted = recipe.epochs * recipe.steps(count)
    if recipe.epochs <= 50 or wanted <= STEPS:
        return recipe
    part = STEPS / wanted
    epochs = max(1, round(recipe.epochs * part))
    return replace(recipe, epochs=epochs, drops=tuple(round(drop * part) for drop in recipe.drops))
