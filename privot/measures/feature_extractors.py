"""Feature extractors: maps from images to features.

The name of a metric says which extractor it used, so that values of two extractors are never
compared by mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, reraise_as
from privot.io import default_data_folder, find_data_file
from privot.measures.networks.inception import Inception
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.recipe import Recipe
from privot.nets.training import train_classifier
from privot.progress import Progress, ignore_progress

INCEPTION_WEIGHTS = "fid-inception-2015-12-05-pool.fp16.safetensors"
# Preferred, since it also serves the ImageNet inception score.
INCEPTION_WEIGHTS_WITH_LOGITS = "fid-inception-2015-12-05.safetensors"
INCEPTION_DIGESTS = {
    "2bce507c1f1efe7f7cc972cba17194b1fdacb631116bce7749c948c99bf28ac1": (
        "half-precision convolutions"
    )
}
DOMAIN_RECIPE = Recipe(epochs=8, learning_rate=1e-3, batch_size=128, use_adam=True)
DOMAIN_CHANNELS = 32
MAX_DOMAIN_RECORDS = 10_000
INCEPTION_BATCH_SIZE_GPU = 500
INCEPTION_BATCH_SIZE_CPU = 20

ImageFunction = Callable[[Tensor, Progress], Tensor]


@dataclass(frozen=True)
class FeatureExtractor:
    """A map from images to features, and to class probabilities if it has any.

    Both functions take images [count, channels, height, width] in [0, 1] and a progress function.
    They report the number of images to it, so images whose number is secret need
    ``ignore_progress``.

    Attributes:
        metric_prefix: Precedes the names of the metrics that use the extractor.
        description: Network, weights and training, for the protocol of a result.
        is_public: Whether no sensitive record had a part in it.
        extract_features: Gives features [count, num_features].
        predict_probabilities: Gives probabilities [count, classes]; None if it has no classes.
    """

    metric_prefix: str
    description: str
    is_public: bool
    extract_features: ImageFunction
    predict_probabilities: ImageFunction | None = None


def load_inception_extractor(
    device: torch.device, weights_path: Path | None = None
) -> FeatureExtractor:
    """Load the Inception network of FID.

    Args:
        device: Where the network runs.
        weights_path: File of the weights; None to look in the folder ``weights`` of the data
            folders (PRIVOT_DATA or the cache).

    Returns:
        The extractor, which has class probabilities if the file has logits.

    Raises:
        DataError: The file is missing or has other content.
    """
    weights_path = (
        weights_path
        or find_data_file("weights", INCEPTION_WEIGHTS_WITH_LOGITS)
        or find_data_file("weights", INCEPTION_WEIGHTS)
    )
    if weights_path is None:
        raise DataError(
            f"The Inception weights are missing. Put {INCEPTION_WEIGHTS} (or "
            f"{INCEPTION_WEIGHTS_WITH_LOGITS}, with logits) into "
            f"{default_data_folder('weights')}, or name a file with --weights. docs/measures.md "
            "says how to make one."
        )
    with reraise_as(DataError, f"{weights_path}: not the weights of the 2015 Inception network"):
        content = weights_path.read_bytes()
        net = Inception.from_weights(load(content))
        net = net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    digest = hashlib.sha256(content).hexdigest()
    origin = INCEPTION_DIGESTS.get(digest, "not among the known files")
    description = f"Inception 2015-12-05, 2048 features, weights {digest[:8]} ({origin})"

    def extract_features(images: Tensor, progress: Progress) -> Tensor:
        return _map_batches(net.features, images, device, progress)

    def predict_batch(images: Tensor) -> Tensor:
        # The inception score is defined without the bias of the last layer.
        return (net.features(images) @ net.fc.weight.T).softmax(1)

    def predict_probabilities(images: Tensor, progress: Progress) -> Tensor:
        return _map_batches(predict_batch, images, device, progress).cpu()

    has_logits = hasattr(net, "fc")
    return FeatureExtractor(
        "", description, True, extract_features, predict_probabilities if has_logits else None
    )


def _map_batches(
    function: Callable[[Tensor], Tensor], images: Tensor, device: torch.device, progress: Progress
) -> Tensor:
    """Apply a function of a batch to all images.

    Args:
        function: The function.
        images: Images [count, channels, height, width].
        device: Where the function runs.
        progress: Called after each batch.

    Returns:
        The concatenated outputs [count, ...].
    """
    batch_size = INCEPTION_BATCH_SIZE_GPU if device.type == "cuda" else INCEPTION_BATCH_SIZE_CPU
    outputs = []
    with torch.no_grad():
        for start in range(0, len(images), batch_size):
            outputs.append(function(images[start : start + batch_size].to(device)))
            progress("Inception features", min(start + batch_size, len(images)), len(images))
    return torch.cat(outputs)


def train_domain_extractor(
    real_data: Sensitive | Public,
    device: torch.device,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> FeatureExtractor:
    """Train a small classifier on the real data, whose features need no downloaded weights.

    Its metrics are named ``domain_``. They are comparable only between outputs that are measured
    against the same data.

    Args:
        real_data: The real data, of which at most 10,000 random records are used.
        device: Where the network is trained.
        seed: Seed of the subset and of the training.
        progress: Called after each epoch.

    Returns:
        The extractor, public if the data is.
    """
    # A random order, since files are often sorted by class.
    order = torch.randperm(
        real_data._count_records(), generator=torch.Generator().manual_seed(seed)
    )
    records = real_data._read_records(order[:MAX_DOMAIN_RECORDS])
    classifier = train_classifier(
        _SmallConvNet,
        *records,
        real_data.spec.num_classes,
        DOMAIN_RECIPE,
        device,
        seed=seed,
        progress=progress,
        stage="training the domain network",
    )
    description = (
        f"ConvNet of width {DOMAIN_CHANNELS} trained on {len(records.labels)} of these records "
        f"({DOMAIN_RECIPE}), seed {seed}"
    )
    return FeatureExtractor(
        "domain_",
        description,
        isinstance(real_data, Public),
        lambda images, _: classifier.features(images),
        lambda images, _: classifier.predict_proba(images),
    )


class _SmallConvNet(ConvNet):
    """A ConvNet of 32 channels."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int):
        super().__init__(shape, num_classes, width=DOMAIN_CHANNELS)
