r"""What an attacker sees of victims: of each candidate a number that is higher, the more it looks like a member.

``confidence`` is LiRA's statistic :math:`\log p_y - \log \sum_{k \ne y} p_k` of the classifier trained on the release, for the image and,
where images may be mirrored, for its mirror image; ``loss`` is minus the cross-entropy; ``pixels`` and ``features`` are minus the distance
to the nearest released image of the candidate's class, in pixels or in the features of a random ConvNet that anyone can draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from privot.attacks.membership.loss import confidence
from privot.baselines.condensation import standardised
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import half
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialise
from privot.runtime import Runtime

OBSERVATIONS = ("confidence", "loss", "pixels", "features")
PAIRS = 2**25  # distances at a time; 128 MiB
RULER = (
    20_220  # seed of the random ConvNet of ``features``: public, the same for every victim and run
)


@dataclass(frozen=True)
class Victims:
    """Releases and the classifiers trained on them, side by side, on one device.

    ``images`` [victims, size, channels, height, width] in [0, 1], ``labels`` [victims, size]; the nets take standardised images.
    """

    nets: Ensemble
    images: Tensor
    labels: Tensor


def nearest(rows: Tensor, labels: Tensor, known: Tensor, marks: Tensor) -> Tensor:
    """Distance of rows [count, numbers] to the nearest of ``known`` [size, numbers] with the same label: [count].

    Which one is nearest is found by a product of matrices; how far it is, by a difference, since the product of two images that are
    equal leaves a rest. A class that is not among ``marks`` is held against all.

    >>> nearest(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 1]), torch.tensor([[1.0], [4.0], [9.0]]), torch.tensor([0, 0, 1]))
    tensor([1., 6.])
    """
    apart = (
        known.square().sum(1) - 2 * rows @ known.T
    )  # but for the square of the row: the order is the same
    other = labels[:, None] != marks
    other &= ~other.all(1, keepdim=True)
    return (rows - known[apart.masked_fill_(other, torch.inf).argmin(1)]).norm(dim=1)


def refuse_unknown(names: tuple[str, ...]) -> None:
    """Refuse what is no observation."""
    if wrong := [name for name in names if name not in OBSERVATIONS]:
        raise SettingError(f"no observation {wrong[0]!r}: {', '.join(OBSERVATIONS)}")


def observe(
    victims: Victims,
    candidates: Sensitive | Public,
    names: tuple[str, ...] = OBSERVATIONS,
    runtime: Runtime | None = None,
) -> dict[str, np.ndarray]:
    """Each observation of every candidate, float64 [victims, candidates], or [victims, candidates, queries] where there are two.

    Also ``right`` [victims, candidates]: whether the classifier's guess is right. Candidates come in portions, and are embedded once for
    all victims, so memory holds one portion and the answers.
    """
    refuse_unknown(names)
    runtime = runtime or Runtime()
    device = runtime.target
    count = candidates._count()
    spec = candidates.spec
    portion = max(1, min(runtime.portion, PAIRS // victims.labels.shape[1]))
    ruler = _Ruler(spec, device, portion) if "features" in names else None
    sets = victims.images.flatten(2)
    seen = torch.stack([ruler(each) for each in victims.images]) if ruler else None
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*names, "right")}
    with torch.no_grad():
        for begin in range(0, count, portion):
            images, labels = candidates._take(slice(begin, begin + portion), device)
            for name, part in _asked(victims, images, labels, spec.mirrored).items():
                if name in found:
                    found[name].append(part.cpu().numpy())
            spaces = {"pixels": (images.flatten(1), sets)} if "pixels" in names else {}
            if ruler is not None and seen is not None:
                spaces["features"] = (ruler(images), seen)
            for name, (rows, known) in spaces.items():
                apart = [
                    nearest(rows, labels, own, marks)
                    for own, marks in zip(known, victims.labels, strict=True)
                ]
                found[name].append(-torch.stack(apart).double().cpu().numpy())
    return {name: np.concatenate(parts, 1) for name, parts in found.items()}


def _asked(victims: Victims, images: Tensor, labels: Tensor, mirrored: bool) -> dict[str, Tensor]:
    """What the classifiers say of some candidates."""
    logits = [
        _logits(victims.nets, standardised(each))
        for each in ((images, images.flip(-1)) if mirrored else (images,))
    ]
    stated = [confidence(each, labels) for each in logits]
    return {
        "confidence": torch.stack(stated, -1) if mirrored else stated[0],
        "loss": logsigmoid(stated[0]),  # log p of a logit of p
        "right": logits[0].argmax(-1) == labels,
    }


def _logits(nets: Ensemble, images: Tensor) -> Tensor:
    """[nets, count, classes]; blocks in half precision on a GPU, but the last layer in float32, or steps of logits would be seen."""
    with half(images.device):
        features = nets.features(images)
    return features.float() @ nets.get_parameter("head") + nets.get_parameter("tail")


class _Ruler:
    """Features of a random ConvNet, in portions."""

    def __init__(self, spec: Spec, device: torch.device, portion: int):
        net = ConvNet(spec.shape, spec.classes, classifier_width(spec))
        self.net = (
            initialise(net, torch.Generator().manual_seed(RULER)).to(device).requires_grad_(False)
        )
        self.portion = portion

    def __call__(self, images: Tensor) -> Tensor:
        features: Tensor
        with half(images.device):
            features = torch.cat(
                [
                    self.net.features(standardised(part)).float()  # type: ignore[operator]
                    for part in images.split(self.portion)
                ]
            )
        return features


def classifier_width(spec: Spec) -> int:
    """Channels of the classifiers: the papers' 128, or 16 for images under 24 pixels a side, which need no more.

    >>> classifier_width(Spec((1, 28, 28), 10)), classifier_width(Spec((1, 8, 8), 10))
    (128, 16)
    """
    return 128 if spec.shape[1] >= 24 else 16
