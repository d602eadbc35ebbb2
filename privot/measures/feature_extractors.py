"""Rulers: maps from images to features. A ruler's name is part of the name of every number taken with it, so that none is mixed up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, refusing
from privot.io import find, home
from privot.measures.networks.inception import Inception
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.training import Recipe, train
from privot.runtime import Progress, silent

STANDARD = "fid-inception-2015-12-05-pool.fp16.safetensors"
WITH_LOGITS = "fid-inception-2015-12-05.safetensors"  # looked for first: it also serves the ImageNet inception score
KNOWN = {
    "2bce507c1f1efe7f7cc972cba17194b1fdacb631116bce7749c948c99bf28ac1": "half-precision convolutions"
}
SMALL = Recipe(epochs=8, rate=1e-3, batch=128, adam=True)
RECORDS = 10_000  # for the small network of `domain`


@dataclass(frozen=True)
class Ruler:
    """``features``: images [count, channels, height, width] in [0, 1] to [count, numbers]; ``probabilities`` likewise, where it has them.

    Both tell how many are done to a ``Progress``, so that of images whose number is secret they get a silent one.
    ``prefix`` goes before the names of its readings, ``text`` says what it is, ``public`` whether no sensitive record made it.
    """

    prefix: str
    text: str
    public: bool
    features: Callable[[Tensor, Progress], Tensor]
    probabilities: Callable[[Tensor, Progress], Tensor] | None = None


def inception(device: torch.device, path: Path | None = None) -> Ruler:
    """The standard network of FID. Its weights come from ``path``, or from the folder ``weights`` of PRIVOT_DATA or the cache."""
    path = path or find("weights", WITH_LOGITS) or find("weights", STANDARD)
    if path is None:
        raise DataError(
            f"no Inception weights: put {STANDARD} (or {WITH_LOGITS}, with logits) into {home('weights')}, or name a file with --weights "
            "(docs/measures.md says how to make one)"
        )
    with refusing(DataError, f"{path}: not the weights of the 2015 Inception network"):
        raw = path.read_bytes()
        net = Inception.from_weights(load(raw)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    digest = hashlib.sha256(raw).hexdigest()
    text = f"Inception 2015-12-05, 2048 features, weights {digest[:8]} ({KNOWN.get(digest, 'not among the known files')})"
    portion = 500 if device.type == "cuda" else 20

    def portions(
        images: Tensor, progress: Progress, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        parts = []
        with torch.no_grad():
            for start in range(0, len(images), portion):
                parts.append(function(images[start : start + portion].to(device)))
                progress("Inception features", min(start + portion, len(images)), len(images))
        return torch.cat(parts)

    logits = hasattr(net, "fc")
    return Ruler(
        "",
        text,
        True,
        lambda images, progress: portions(images, progress, net.features),
        # Without its bias, as the score was defined.
        (
            lambda images, progress: portions(
                images, progress, lambda part: (net.features(part) @ net.fc.weight.T).softmax(1)
            ).cpu()
        )
        if logits
        else None,
    )


def domain(
    real: Sensitive | Public, device: torch.device, seed: int = 0, progress: Progress = silent
) -> Ruler:
    """A small network trained on the real data itself: the fallback that needs no weights. Its numbers are called ``domain_``.

    It is trained on at most 10,000 records, so what it says is comparable only between outputs measured against the same data.
    """
    order = torch.randperm(
        real._count(), generator=torch.Generator().manual_seed(seed)
    )  # files are often sorted by class
    records = real._take(order[:RECORDS])
    judge = train(
        _small,
        *records,
        real.spec.classes,
        SMALL,
        device,
        seed=seed,
        progress=progress,
        stage="training the domain net",
    )
    text = f"ConvNet of width 32 trained on {len(records.labels)} of these records ({SMALL}), seed {seed}"
    return Ruler(
        "domain_",
        text,
        isinstance(real, Public),
        lambda images, _: judge.features(images),
        lambda images, _: judge.probabilities(images),
    )


class _small(ConvNet):  # noqa: N801 (a network by another size)
    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__(shape, classes, width=32)
