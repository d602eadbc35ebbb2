"""Proof that an attack works: it must find the members of what is made to leak, and nobody in what cannot.

An AUC of 0.52 may mean a private release or a broken attack. So every attack first runs on a *leaky* control, where it must reach its
stated power, and on a *null* control, where it must not beat chance at 99 % confidence (one seed in a hundred does so by chance). A control
is a release: of the members, or of nobody who is asked about; it is attacked by the same way as any other (`Target`). Both are made of the
embedded digits, a public data set, in seconds and deterministically by a seed.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import hypergeom
from torch import Tensor, nn

from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.target import Scores, Target, together
from privot.attacks.shadows.config import Shadows
from privot.attacks.shadows.store import Prepared
from privot.audit.roc import roc
from privot.data.dataset import Public, Records
from privot.data.loading import load
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.release import NoGuarantee, Release
from privot.release.artifact import Product
from privot.runtime import Runtime, Streams, threads

CONFIDENCE = 0.99
COUNT = 200  # candidates, half of them members
FEW = 48  # those that classifiers learn by heart, two thirds of them under a wrong label
# of classifiers that do so in seconds
SHADOWS = 8
EPOCHS = 150
CPU = Runtime("cpu")
SPEC = Spec((1, 8, 8), 10)


@dataclass(frozen=True)
class Power:
    """AUC on the ``leaky`` and the ``null`` control, and ``chance``: how probable so good a null score is if there is nothing to find.

    ``passed`` says that leaky reached ``stated`` and null did not beat chance; ``sentence`` says it in words.
    """

    name: str
    leaky: float
    null: float
    chance: float
    stated: float
    passed: bool
    sentence: str
    publishable: bool = True


@cache
def power(name: str, seed: int = 0) -> Power:
    """Run both controls of an attack, see `CONTROLS`; once in a process.

    >>> power("nearest-pixels").passed
    True
    """
    if name not in CONTROLS:
        raise SettingError(f"no attack {name!r}: there are {', '.join(CONTROLS)}")
    control, stated = CONTROLS[name]
    with threads(1):  # nets so small are slower on several
        leaky, null = (control.told(name, leaks, seed) for leaks in (True, False))
    found = roc(*leaky).auc
    nothing = roc(*null).auc
    by_chance = chance(*null)
    passed = found >= stated and by_chance > 1 - CONFIDENCE
    sentence = f"{name}: AUC {found:.3f} where all leaks (at least {stated:g} is its stated power), {nothing:.3f} where nothing can"
    verdict = f"chance gives that with probability {by_chance:.2g}: {'it works' if passed else 'DO NOT TRUST ITS FIGURES'}"
    return Power(name, found, nothing, by_chance, stated, passed, f"{sentence}; {verdict}")


def chance(members: np.ndarray, others: np.ndarray, seed: int = 0) -> float:
    """Exact p-value of "members score higher": the upper half is guessed to be members, and so many right guesses are hypergeometric.

    Ties are broken at random. No threshold is tuned, and nothing is asymptotic.

    >>> chance(np.arange(10.0) + 10, np.arange(10.0)) < 1e-5
    True
    """
    scores = np.concatenate([members, others])
    total = len(members) + len(others)
    order = np.lexsort((np.random.default_rng(seed).random(total), -scores))[: total // 2]
    return float(hypergeom.sf((order < len(members)).sum() - 1, total, len(members), total // 2))


@cache
def digits(seed: int) -> tuple[Records, Records, Records]:
    """Three parts of the digits at random: 200 candidates, the first half of whom are members; 100 and 400 others."""
    box = load("digits", public=True)
    assert isinstance(box, Public)
    images, labels = box.records()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[
        : COUNT + 500
    ].split((COUNT, 100, 400))
    parts = [Records(images[each], labels[each]) for each in order]
    return parts[0], parts[1], parts[2]


class Sides(NamedTuple):
    """Whom a control asks about, ``members`` and ``others``; ``nobody``, of whom its null release is made; and a ``population``."""

    members: Records
    others: Records
    nobody: Records
    population: Records


def many(seed: int) -> Sides:
    """Digits as they are."""
    candidates, nobody, population = digits(seed)
    (inside, outside), (own, theirs) = (each.split(COUNT // 2) for each in candidates)
    return Sides(Records(inside, own), Records(outside, theirs), nobody, population)


def mislabelled(seed: int) -> Sides:
    """A few digits, two thirds of them under a wrong label: what a classifier says of one tells whether it has learned it."""
    (images, labels) = digits(seed)[2]
    generator = Streams(seed).generator("labels")
    wrong = torch.rand(len(labels), generator=generator) < 2 / 3
    labels = (
        torch.where(
            wrong,
            labels + torch.randint(1, SPEC.classes, labels.shape, generator=generator),
            labels,
        )
        % SPEC.classes
    )
    sizes = (*[FEW // 2] * 3, len(labels) - 3 * (FEW // 2))
    return Sides(
        *(Records(*each) for each in zip(images.split(sizes), labels.split(sizes), strict=True))
    )


@dataclass(frozen=True)
class Control:
    """A release that ``shows`` all of some records (and a seed), of ``sides`` by a seed. ``epochs`` are those of classifiers."""

    shows: Callable[[Records, int], Product]
    sides: Callable[[int], Sides] = many
    epochs: int = 1

    def told(self, name: str, leaks: bool, seed: int) -> Scores:
        """What an attack says of members and others: of a release of the members, or of one of nobody."""
        sides = self.sides(seed)
        needs = ATTACKS[name].needs
        members, others, population = (
            _box(each) for each in (sides.members, sides.others, sides.population)
        )
        prepared = _prepared(self, seed) if "shadows" in needs else None
        given = population if "population" in needs and prepared is None else None
        return _target(self, leaks, seed).told(
            name, members, others, population=given, prepared=prepared
        )


@cache
def _target(control: Control, leaks: bool, seed: int) -> Target:
    """One for all attacks of a control, which trains its classifier once."""
    sides = control.sides(seed)
    release = _released(control.shows(sides.members if leaks else sides.nobody, seed))
    return Target(
        release, CPU, seed=seed, epochs=control.epochs, perceptual=0
    )  # 0: without the weights of LPIPS


@cache
def _prepared(control: Control, seed: int) -> Prepared:
    """Shadows of a control: each shows its half of the candidates. They lie in a folder as any others do, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="privot-controls-"))
    sides = control.sides(seed)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    box = together(_box(sides.members), _box(sides.others))
    shadows = Shadows(
        folder=folder,
        box=box,
        method="real-subset",
        count=SHADOWS,
        seed=seed + 1,
        epochs=control.epochs,
    )
    (images, labels) = box._take(slice(None))
    draws = np.random.default_rng(seed)
    with shadows.begun() as prepared:
        members = prepared.members()
        for shadow, own in enumerate(members):
            # Sets side by side have one size, so some records come twice: by chance, or who comes first would be learned better.
            half = np.resize(draws.permutation(np.flatnonzero(own)), members.sum(1).max())
            _released(control.shows(Records(images[half], labels[half]), seed + 1 + shadow)).save(
                prepared.made(shadow)
            )
    return shadows.prepare(CPU)


def _box(records: Records) -> Public:
    return Public(records.images.numpy(), records.labels.numpy(), SPEC)


def _released(product: Product) -> Release:
    return Release(product, NoGuarantee("it is made to leak"), SPEC, {})


def blurred(held: Records, seed: int) -> Product:
    """The records, but no copies."""
    noise = 0.05 * torch.randn(held.images.shape, generator=Streams(seed).generator("blur"))
    return Product.set((held.images + noise).clamp(0, 1), held.labels)


def moved(held: Records, seed: int) -> Product:
    """The records, all moved alike: what distribution matching makes of its start."""
    return Product.set(
        held.images + digits(seed)[2].images.mean(0) - held.images.mean(0), held.labels
    )


class Memory(nn.Module):
    """A generator that stores images and gives the one whose key the code points at, or a blend of near ones: it leaks all."""

    def __init__(self, images: Tensor, labels: Tensor, keys: Tensor):
        super().__init__()
        self.images = nn.Buffer(images)
        self.labels = nn.Buffer(labels)
        self.keys = nn.Buffer(keys)
        self.code = keys.shape[1]

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        wrong = labels[:, None] != self.labels  # [codes, stored]
        shares = (2 * codes @ self.keys.T).masked_fill(wrong, -torch.inf).softmax(1)
        return (shares @ self.images.flatten(1)).view(-1, *self.images.shape[1:])


class Remembered(Product):
    """A generator that is a `Memory`."""

    def build(self) -> nn.Module:
        return Memory(**self.tensors)


def remembered(held: Records, seed: int) -> Product:
    """A generator that gives the records."""
    keys = torch.randn(len(held.labels), 8, generator=Streams(seed).generator("keys"))
    return Remembered("generator", {"images": held.images, "labels": held.labels, "keys": keys})


LEARNED = Control(blurred, mislabelled, EPOCHS)
SHOWN = Control(blurred)
GIVEN = Control(remembered)

# By attack: its control and its stated power, an AUC that it reached for each of the seeds 0 to 7 with something to spare.
CONTROLS: dict[str, tuple[Control, float]] = {
    "loss": (LEARNED, 0.8),
    "lira": (LEARNED, 0.9),
    "lira-offline": (LEARNED, 0.9),
    "lira-pixels": (SHOWN, 0.99),
    "lira-features": (SHOWN, 0.99),
    "rmia": (LEARNED, 0.8),
    "nearest-pixels": (SHOWN, 0.99),
    "nearest-features": (SHOWN, 0.99),
    "nearest-lpips": (SHOWN, 0.99),
    "real-start": (Control(moved), 0.99),
    "tracing": (SHOWN, 0.75),
    "gan-leaks-full": (GIVEN, 0.95),
    "gan-leaks-partial": (GIVEN, 0.98),
    "gan-leaks-white": (GIVEN, 0.98),
}
