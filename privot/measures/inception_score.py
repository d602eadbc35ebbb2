r"""Inception score: :math:`\exp E_x KL(p(y|x)\,\|\,p(y))`, by a classifier trained on the real data (as GS-WGAN does) or by ImageNet's.

The two are never mixed up: the first is called ``is`` and goes up to the number of classes, the second ``imagenet_is``.
"""

from __future__ import annotations

import contextlib
import hashlib

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, refusing
from privot.io import home
from privot.nets.classifiers.vgg import VGG11
from privot.nets.training import Classifier, Recipe, train
from privot.runtime import Progress, silent

RECIPE = Recipe(
    epochs=50, rate=0.1, batch=128, decay=1e-4, drops=(40,), shift=4, flip=True, half=True
)
SPLITS = 10


def inception_score(
    probabilities: Tensor, generator: torch.Generator, splits: int = SPLITS
) -> tuple[float, float]:
    """Mean of the score over ``splits`` random parts of probabilities [count, classes], and its standard error.

    >>> round(inception_score(torch.eye(10).repeat(20, 1), torch.Generator(), splits=1)[0], 6)
    10.0
    """
    order = torch.randperm(len(probabilities), generator=generator)
    scores = []
    for part in probabilities.double()[order].chunk(splits):
        log = torch.where(part > 0, part, 1.0).log()
        scores.append((part * (log - part.mean(0).clamp(min=1e-300).log())).sum(1).mean().exp())
    values = torch.stack(scores)
    return values.mean().item(), (values.std() / len(values) ** 0.5).item() if len(
        values
    ) > 1 else float("nan")


def judge(
    real: Sensitive | Public, device: torch.device, seed: int = 0, progress: Progress = silent
) -> tuple[Classifier, str]:
    """The classifier of the score, trained on the real training set, and its description.

    One trained on public data is kept in the cache; one trained on sensitive data never touches the disk.
    """
    text = f"VGG11-BN trained on these records ({RECIPE}), seed {seed}"
    records = real._take(slice(None))
    place = None
    if isinstance(real, Public):
        digest = hashlib.sha256(
            records.images.numpy().tobytes() + records.labels.numpy().tobytes() + text.encode()
        ).hexdigest()
        place = home("judges") / f"{digest[:32]}.safetensors"
        if place.exists():
            with refusing(DataError, f"{place}: this kept judge is damaged; remove it"):
                weights = load_file(place)
                mean = weights.pop("mean").item()
                std = weights.pop("std").item()
                net = VGG11(real.spec.shape, real.spec.classes)
                net.load_state_dict(weights)
                return Classifier(net.to(device), mean, std, device), text
    made = train(
        VGG11,
        *records,
        real.spec.classes,
        RECIPE,
        device,
        seed=seed,
        progress=progress,
        stage="training the judge",
    )
    if place:
        weights = {
            key: value.detach().cpu().contiguous() for key, value in made.net.state_dict().items()
        }
        facts = {
            "mean": torch.tensor(made.mean, dtype=torch.float64),
            "std": torch.tensor(made.std, dtype=torch.float64),
        }
        with contextlib.suppress(
            OSError, SafetensorError
        ):  # a folder that cannot be written costs time, not the number
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file(weights | facts, part := place.with_suffix(f".{seed}.part"))
            part.replace(place)
    return made, text
