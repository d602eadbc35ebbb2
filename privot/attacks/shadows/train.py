"""A batch of shadows: from halves to releases, from releases to classifiers, from both to observations on disk."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from privot.attacks.shadows.config import BESIDE, Shadows
from privot.attacks.shadows.observe import Victims, classifier_width, observe
from privot.attacks.shadows.store import Prepared, write
from privot.baselines.condensation import Pool, counted, reason, standardised, start
from privot.baselines.parallel_matching import SideBySide, usual_rate
from privot.data.dataset import Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.downstream import NETWORKS, shortened
from privot.methods import make
from privot.nets.augment import operations
from privot.nets.ensemble import Ensemble
from privot.nets.training import Recipe, train_ensemble
from privot.progress import jsonable
from privot.release import NoGuarantee, Release
from privot.release.artifact import Product
from privot.runtime import Progress, Runtime, Streams, threads
from privot.synthesis import synthesize

GROUP = 8  # classifiers trained and observed together: few enough that a crash loses little, enough to embed candidates seldom
CHEAP = 0.2  # seconds to keep a state that are not worth saving


def prepare_batch(shadows: Shadows, batch: list[int], runtime: Runtime, progress: Progress) -> None:
    """Everything that is still missing of these shadows; each is on disk as soon as its group is observed."""
    prepared = Prepared(shadows.folder)
    if missing := [each for each in batch if not prepared.path(each).exists()]:
        members = prepared.members()
        small = classifier_width(shadows.box.spec) < 128
        with threads(1) if small else nullcontext():  # nets so small are slower on several
            if not all(prepared.made(each).exists() for each in missing):
                make_releases = _side_by_side if shadows.method in BESIDE else _by_the_method
                make_releases(shadows, batch, members, runtime, progress)
            for begin in range(0, len(missing), GROUP):
                _observe(shadows, missing[begin : begin + GROUP], members, runtime, progress)


def half_spec(spec: Spec, labels: NDArray[np.int64]) -> Spec:
    """What is declared of a half: the same facts as of the candidates, with counts of its own."""
    sizes = (
        None
        if spec.class_sizes is None
        else tuple(np.bincount(labels, minlength=spec.classes).tolist())
    )
    return replace(spec, size=None if spec.size is None else len(labels), class_sizes=sizes)


def _by_the_method(
    shadows: Shadows,
    batch: list[int],
    members: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    """One after the other, as their owner would; each has a ledger of its own, thrown away, and is marked as no release."""
    prepared = Prepared(shadows.folder)
    box = shadows.box
    maker = make(shadows.method, shadows.settings)  # as in the plan of the shadows, on any device
    for shadow in batch:
        if prepared.made(shadow).exists():
            continue
        images = box._images[members[shadow]]
        labels = box._labels[members[shadow]]
        half = Sensitive(images, labels, half_spec(box.spec, labels), name="the half of a shadow")
        with tempfile.TemporaryDirectory(dir=shadows.folder) as folder:
            release = synthesize(
                half,
                maker,
                shadows.epsilon,
                ledger=f"{folder}/ledger.jsonl",
                seed=shadows.seed + 1 + shadow,
                runtime=runtime,
                progress=progress,
                purpose="shadow",
                notice=lambda text: None,
            )
        release.save(prepared.made(shadow))


def _side_by_side(
    shadows: Shadows,
    batch: list[int],
    members: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    """A whole batch at once, with the state of a long run kept beside the releases-to-be."""
    prepared = Prepared(shadows.folder)
    spec = shadows.box.spec
    device = runtime.target
    maker: Any = make(shadows.method, shadows.settings)
    per_class = _per_class(shadows, maker)
    records = shadows.box._take(slice(None), device)
    state = shadows.folder / f"state-{batch[0]:05d}.safetensors"
    begun = torch.stack(
        [
            _begun(records, members[each], spec, per_class, maker.init, shadows.seed + 1 + each)
            for each in batch
        ]
    )
    if shadows.method == "distribution-matching":
        own = torch.from_numpy(members[batch]).to(device)
        beside = SideBySide(
            Pool(records, spec.classes),
            own,
            begun,
            spec,
            Streams(shadows.seed, runtime),
            batch=maker.batch,
            augment=maker.augment,
            rate=maker.rate or usual_rate(maker.init, per_class, maker.iterations),
            width=maker.width,
            depth=maker.depth,
        )

        last = time.monotonic()
        cost = 0.0

        def keep(now: dict[str, Tensor]) -> None:
            nonlocal last, cost
            if (
                cost < CHEAP or time.monotonic() - last > 20 * cost
            ):  # large states on a slow disk: a twentieth of the time at most
                begin = time.monotonic()
                write(state, save({key: value.cpu().contiguous() for key, value in now.items()}))
                last = time.monotonic()
                cost = time.monotonic() - begin

        begun = beside.run(
            maker.iterations, progress, load_file(state) if state.exists() else None, keep
        )
    labels = torch.arange(spec.classes).repeat_interleave(per_class)
    plan = maker.plan(spec)
    why = NoGuarantee(
        reason(maker.init)
        if shadows.method == "distribution-matching"
        else "these are real records"
    )
    facts = {
        "method": maker.name,
        "settings": dataclasses.asdict(maker),
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "data": "",
    }
    facts["purpose"] = "shadow"
    for shadow, images in zip(batch, begun.cpu(), strict=True):
        if not prepared.made(shadow).exists():
            own_spec = half_spec(spec, shadows.box._labels[members[shadow]])
            seeds = {
                "seed": shadows.seed + 1 + shadow,
                "side_by_side": {"sets": len(batch), "seed": shadows.seed},
            }
            Release(Product.set(images, labels), why, own_spec, jsonable(facts | seeds)).save(
                prepared.made(shadow)
            )
    state.unlink(missing_ok=True)


def begun_from(shadows: Shadows, shadow: int) -> NDArray[np.int64]:
    """Which candidates a set side by side with others began from, classes in order: those that Dong et al. (2022) attack in Table 1.

    Only where it began from real images, ``init="real"`` or a real subset.
    """
    maker: Any = make(shadows.method, shadows.settings)
    if shadows.method not in BESIDE or maker.init != "real":
        raise SettingError(f"{shadows.method}: its sets began from no candidates")
    labels = torch.from_numpy(shadows.box._labels)
    own = Prepared(shadows.folder).members()[shadow]
    found: NDArray[np.int64] = _first(
        labels, own, shadows.box.spec, _per_class(shadows, maker), shadows.seed + 1 + shadow
    ).numpy()
    return found


def _per_class(shadows: Shadows, maker: Any) -> int:
    """A ratio is of half the candidates: halves differ by a few, but sets side by side have one size."""
    return counted(
        maker.per_class, maker.ratio, shadows.box._count() // 2, shadows.box.spec.classes
    )


def _begun(
    records: Records, members: NDArray[np.bool_], spec: Spec, per_class: int, init: str, seed: int
) -> Tensor:
    """The images that the method would start from with this seed and this half: [classes * per_class, ...]."""
    if init == "real":
        return records.images[_first(records.labels, members, spec, per_class, seed)]
    return start(records, spec, per_class, init, Streams(seed).generator("start"))[
        0
    ]  # noise, which looks at no record


def _first(
    labels: Tensor, members: NDArray[np.bool_], spec: Spec, per_class: int, seed: int
) -> Tensor:
    """Which records the method would start from; their numbers stand for them, so that no half is copied."""
    where = torch.from_numpy(np.flatnonzero(members)).to(labels.device)
    numbers = Records(where.view(-1, 1, 1, 1), labels[where])
    return start(numbers, spec, per_class, "real", Streams(seed).generator("start"))[0].flatten()


def recipe(epochs: int, size: int, mirrored: bool) -> Recipe:
    """How a classifier learns from so many released images: as the condensation papers do, for so many epochs."""
    usual = replace(NETWORKS["convnet"][1], repeats=1, epochs=epochs, drops=(epochs // 2,))
    return shortened(replace(usual, augment=operations(mirrored)), size)


def victims(
    releases: list[Release],
    seeds: list[int],
    spec: Spec,
    epochs: int,
    samples: int,
    runtime: Runtime,
    progress: Progress,
) -> Victims:
    """A classifier trained on each release, side by side, each by its own seed; a generator is asked for ``samples`` images."""
    shown = [
        _shown(release, samples, seed, runtime.target)
        for release, seed in zip(releases, seeds, strict=True)
    ]
    images, labels, wanted = (
        torch.stack(each).to(runtime.target) for each in zip(*shown, strict=True)
    )
    nets = _fresh(spec, seeds).to(runtime.target)
    orders = [Streams(seed).generator("order") for seed in seeds]
    pixels = standardised(images.flatten(0, 1)).view_as(images)
    plan = recipe(epochs, labels.shape[1], spec.mirrored)
    train_ensemble(
        nets,
        pixels,
        wanted,
        plan,
        orders,
        signed=False,
        progress=progress,
        stage="training classifiers",
    )
    return Victims(nets.requires_grad_(False), images, labels)


def _observe(
    shadows: Shadows,
    group: list[int],
    members: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    prepared = Prepared(shadows.folder)
    seeds = [shadows.seed + 1 + each for each in group]
    releases = [prepared.release(each) for each in group]
    trained = victims(
        releases, seeds, shadows.box.spec, shadows.epochs, shadows.samples, runtime, progress
    )
    found = observe(trained, shadows.box, shadows.observations, runtime)
    right = found.pop("right")
    for place, shadow in enumerate(group):
        own = members[shadow]
        facts = {
            "records": own.sum(),
            "accuracy_in": right[place, own].mean(),
            "accuracy_out": right[place, ~own].mean(),
        }
        arrays = {name: each[place] for name, each in found.items()} | {
            name: np.asarray(value, np.float64) for name, value in facts.items()
        }
        write(prepared.path(shadow), arrays)
        progress("shadows", prepared.done(), shadows.count)


def _shown(
    release: Release, samples: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels, and what a classifier is to learn of them: the soft labels of a set that has them."""
    if release.product.kind == "set":
        images = release.product.tensors["images"]
        labels = release.product.tensors["labels"]
        return images, labels, release.product.tensors.get("soft", labels)
    images, labels = release.sample(samples, seed=seed, device=device)
    return images, labels, labels


def _fresh(spec: Spec, seeds: list[int]) -> Ensemble:
    """Untrained classifiers, each by its own seed, whatever others are beside it."""
    size = (spec.shape, spec.classes, classifier_width(spec))
    alone = [Ensemble(1, *size, generator=Streams(seed).generator("weights")) for seed in seeds]
    nets = Ensemble(len(seeds), *size, generator=torch.Generator())
    with torch.no_grad():
        for name, value in nets.named_parameters():
            value.copy_(torch.cat([each.get_parameter(name) for each in alone]))
    return nets
