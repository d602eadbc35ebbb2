r"""Inception score, :math:`\exp E_x KL(p(y|x)\,\|\,p(y))`.

There are two scores. ``is`` uses a classifier trained on the real data, as GS-WGAN does, and is at
most the number of classes. ``imagenet_is`` uses the classes of ImageNet.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, reraise_as
from privot.io import default_data_folder, replace_atomically
from privot.nets.classifiers.vgg import VGG11
from privot.nets.recipe import Recipe
from privot.nets.training import Classifier, train_classifier
from privot.progress import Progress, ignore_progress

SCORE_CLASSIFIER_RECIPE = Recipe(
    epochs=50,
    learning_rate=0.1,
    batch_size=128,
    weight_decay=1e-4,
    lr_milestones=(40,),
    max_shift=4,
    horizontal_flip=True,
    half_precision=True,
)
INCEPTION_SCORE_SPLITS = 10


def inception_score(
    probabilities: Tensor, generator: torch.Generator, num_splits: int = INCEPTION_SCORE_SPLITS
) -> tuple[float, float]:
    """Compute the inception score as the mean over random splits.

    Args:
        probabilities: Class probabilities of the images [count, classes].
        generator: Draws the splits.
        num_splits: Number of splits.

    Returns:
        The score and its standard error, which is NaN for one split.

    >>> probabilities = torch.eye(10).repeat(20, 1)
    >>> round(inception_score(probabilities, torch.Generator(), num_splits=1)[0], 6)
    10.0
    """
    order = torch.randperm(len(probabilities), generator=generator)
    scores = []
    for split in probabilities.double()[order].chunk(num_splits):
        log = torch.where(split > 0, split, 1.0).log()
        log_mean = split.mean(0).clamp(min=1e-300).log()
        scores.append((split * (log - log_mean)).sum(1).mean().exp())
    values = torch.stack(scores)
    error = float("nan")
    if len(values) > 1:
        error = (values.std() / len(values) ** 0.5).item()
    return values.mean().item(), error


def load_or_train_score_classifier(
    real_data: Sensitive | Public,
    device: torch.device,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> tuple[Classifier, str]:
    """Train the classifier of the inception score on real training data, or load it from the cache.

    Only a classifier trained on public data is cached. One trained on sensitive data is never
    written to disk.

    Args:
        real_data: The real training data.
        device: Where the classifier runs.
        seed: Seed of the training.
        progress: Called after each epoch.

    Returns:
        The classifier and its description.
    """
    description = f"VGG11-BN trained on these records ({SCORE_CLASSIFIER_RECIPE}), seed {seed}"
    records = real_data._read_records(slice(None))
    cache_path = None
    if isinstance(real_data, Public):
        cache_path = _build_cache_path(records, description)
        if cache_path.exists():
            return _load_score_classifier(cache_path, real_data.spec, device), description
    classifier = train_classifier(
        VGG11,
        *records,
        real_data.spec.num_classes,
        SCORE_CLASSIFIER_RECIPE,
        device,
        seed=seed,
        progress=progress,
        stage="training the score classifier",
    )
    if cache_path:
        # Without write access, the next run trains again, and the score is the same.
        with contextlib.suppress(OSError, SafetensorError):
            _save_score_classifier(classifier, cache_path)
    return classifier, description


def _build_cache_path(records: Records, description: str) -> Path:
    content = records.images.numpy().tobytes() + records.labels.numpy().tobytes()
    digest = hashlib.sha256(content + description.encode()).hexdigest()
    return default_data_folder("score_classifiers") / f"{digest[:32]}.safetensors"


def _load_score_classifier(path: Path, spec: Spec, device: torch.device) -> Classifier:
    """Load a cached classifier with the normalisation of its inputs."""
    with reraise_as(DataError, f"{path}: the cached score classifier is damaged. Remove the file"):
        weights = load_file(path)
        mean = weights.pop("mean").item()
        std = weights.pop("std").item()
        net = VGG11(spec.shape, spec.num_classes)
        net.load_state_dict(weights)
        return Classifier(net.to(device), mean, std, device)


def _save_score_classifier(classifier: Classifier, path: Path) -> None:
    """Save a classifier with the normalisation of its inputs, atomically."""
    tensors = {
        key: value.detach().cpu().contiguous() for key, value in classifier.net.state_dict().items()
    }
    tensors["mean"] = torch.tensor(classifier.mean, dtype=torch.float64)
    tensors["std"] = torch.tensor(classifier.std, dtype=torch.float64)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as partial_path:
        save_file(tensors, partial_path)
