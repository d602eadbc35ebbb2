r"""Observations of models by an attacker: numbers that are higher for likelier members.

``confidence`` is the statistic of LiRA, :math:`\log p_y - \log \sum_{k \ne y} p_k`, of the
classifier trained on the release, for the image and, if images may be flipped, for its mirror
image. ``loss`` is minus the cross-entropy. ``pixels`` and ``features`` are minus the distance to
the nearest released image of the candidate's class, in pixels or in the features of a random
ConvNet with a public seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from privot.attacks.membership.loss import logit_scaled_confidence
from privot.baselines.condensation import standardize_images
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import autocast_half
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialize_weights
from privot.runtime import Runtime

OBSERVATIONS = ("confidence", "loss", "pixels", "features")
MAX_DISTANCES = 2**25  # distances computed together; 128 MiB
FEATURE_SEED = 20_220  # public seed of the random ConvNet of ``features``, the same in every run
WIDE_IMAGE_SIDE = 24  # pixels; smaller images need narrow classifiers only
WIDE_CHANNELS = 128
NARROW_CHANNELS = 16


@dataclass(frozen=True)
class TrainedModels:
    """Releases and the classifiers trained on them, on one device.

    Attributes:
        classifiers: One classifier for each release; their inputs are standardized images.
        images: Released images in [0, 1], [models, size, channels, height, width].
        labels: Their labels, [models, size].
    """

    classifiers: Ensemble
    images: Tensor
    labels: Tensor


def compute_nearest_distances(
    queries: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
) -> Tensor:
    """Compute the distance of each query to the nearest reference with the same label.

    The nearest reference is found by a matrix product. Its distance is computed from the
    difference, since the matrix product does not give 0 for equal images.

    Args:
        queries: Vectors, [count, features].
        labels: Their labels, [count].
        references: Vectors to compare with, [size, features].
        reference_labels: Their labels, [size]. A query whose label does not occur here is compared
            with all references.

    Returns:
        Distances, [count].

    >>> queries, references = torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [4.0], [9.0]])
    >>> labels, reference_labels = torch.tensor([0, 1]), torch.tensor([0, 0, 1])
    >>> compute_nearest_distances(queries, labels, references, reference_labels)
    tensor([1., 6.])
    """
    # The squared distance without |query|^2, which does not change the order.
    ranking = references.square().sum(1) - 2 * queries @ references.T
    is_other_class = labels[:, None] != reference_labels
    is_other_class &= ~is_other_class.all(1, keepdim=True)
    nearest = ranking.masked_fill_(is_other_class, torch.inf).argmin(1)
    return (queries - references[nearest]).norm(dim=1)


def validate_observations(observations: tuple[str, ...]) -> None:
    """Raise a SettingError if a name is not one of `OBSERVATIONS`."""
    for name in observations:
        if name not in OBSERVATIONS:
            raise SettingError(
                f"observations: {name!r} is unknown. Choose from {', '.join(OBSERVATIONS)}."
            )


def observe(
    models: TrainedModels,
    candidates: Sensitive | Public,
    observations: tuple[str, ...] = OBSERVATIONS,
    runtime: Runtime | None = None,
) -> dict[str, np.ndarray]:
    """Observe every candidate under every model.

    Candidates are processed in chunks and embedded once for all models. So memory holds one chunk
    and the results.

    Args:
        models: Releases and their classifiers.
        candidates: The candidates.
        observations: Names of what is observed.
        runtime: Device and chunk sizes.

    Returns:
        For each observation float64 [models, candidates], or [models, candidates, queries] if
        images are flipped too; and ``correct`` [models, candidates], whether the classifier
        predicts the candidate's class.

    Raises:
        SettingError: If an observation is unknown.
    """
    validate_observations(observations)
    runtime = runtime or Runtime()
    device = runtime.torch_device
    spec = candidates.spec
    chunk_size = max(1, min(runtime.chunk_size, MAX_DISTANCES // models.labels.shape[1]))
    released_embeddings = {"pixels": models.images.flatten(2)} if "pixels" in observations else {}
    extractor = None
    if "features" in observations:
        extractor = _RandomFeatureExtractor(spec, device, chunk_size)
        released_embeddings["features"] = torch.stack([extractor(each) for each in models.images])
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in (*observations, "correct")}
    with torch.no_grad():
        for start in range(0, candidates._count_records(), chunk_size):
            images, labels = candidates._read_records(slice(start, start + chunk_size), device)
            predictions = _query_classifiers(models, images, labels, spec.is_flip_invariant)
            for name, prediction in predictions.items():
                if name in chunks:
                    chunks[name].append(prediction.cpu().numpy())
            for name, embeddings in released_embeddings.items():
                rows = extractor(images) if name == "features" and extractor else images.flatten(1)
                distances = [
                    compute_nearest_distances(rows, labels, released, released_labels)
                    for released, released_labels in zip(embeddings, models.labels, strict=True)
                ]
                chunks[name].append(-torch.stack(distances).double().cpu().numpy())
    return {name: np.concatenate(arrays, 1) for name, arrays in chunks.items()}


def _query_classifiers(
    models: TrainedModels, images: Tensor, labels: Tensor, flip_invariant: bool
) -> dict[str, Tensor]:
    """Compute what the classifiers predict of a chunk of candidates.

    Args:
        models: Releases and their classifiers.
        images: Candidates in [0, 1], [count, channels, height, width].
        labels: Their classes, [count].
        flip_invariant: Whether to query the mirror image too.

    Returns:
        ``confidence`` [models, count] or [models, count, 2], ``loss`` and ``correct``
        [models, count].
    """
    views = (images, images.flip(-1)) if flip_invariant else (images,)
    logits = [_compute_logits(models.classifiers, standardize_images(view)) for view in views]
    confidences = [logit_scaled_confidence(view_logits, labels) for view_logits in logits]
    return {
        "confidence": torch.stack(confidences, -1) if flip_invariant else confidences[0],
        "loss": logsigmoid(confidences[0]),  # the confidence is a logit of p, so this is log p
        "correct": logits[0].argmax(-1) == labels,
    }


def _compute_logits(classifiers: Ensemble, images: Tensor) -> Tensor:
    """Compute logits [nets, count, classes].

    Convolutions run in half precision on a GPU. The last layer is in float32, since half precision
    would round logits to visible steps.
    """
    with autocast_half(images.device):
        features = classifiers.features(images)
    weight = classifiers.get_parameter("head_weight")
    return features.float() @ weight + classifiers.get_parameter("head_bias")


class _RandomFeatureExtractor:
    """Features of a ConvNet with public random weights, computed in batches."""

    def __init__(self, spec: Spec, device: torch.device, batch_size: int):
        """Initialize the net.

        Args:
            spec: Shape of the images and number of classes.
            device: Where the net runs.
            batch_size: Images in a batch.
        """
        net = ConvNet(spec.shape, spec.num_classes, choose_classifier_width(spec))
        initialize_weights(net, torch.Generator().manual_seed(FEATURE_SEED))
        self.net = net.to(device).requires_grad_(False)
        self.batch_size = batch_size

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features, float32 [count, features], of images in [0, 1]."""
        with autocast_half(images.device):
            batches = [
                self.net.features(standardize_images(batch)).float()
                for batch in images.split(self.batch_size)
            ]
            features: Tensor = torch.cat(batches)
        return features


def choose_classifier_width(spec: Spec) -> int:
    """Choose the channels of the classifiers: the papers' 128, or 16 below 24 pixels a side.

    >>> choose_classifier_width(Spec((1, 28, 28), 10)), choose_classifier_width(Spec((1, 8, 8), 10))
    (128, 16)
    """
    return WIDE_CHANNELS if spec.shape[1] >= WIDE_IMAGE_SIDE else NARROW_CHANNELS
