"""Training of every classifier, whether it measures a release or serves a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from privot.nets.classifiers.convnet import ConvNet
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialize_weights
from privot.nets.recipe import Recipe
from privot.nets.training_run import TrainingRun
from privot.progress import ignore_progress

__all__ = ["Classifier", "Recipe", "train_classifier", "train_ensemble"]

INFERENCE_BATCH_SIZE = 1000


class Classifier:
    """A trained network with the standardization of its training images.

    Images go in unchanged, in [0, 1]. Results of an `Ensemble` have a leading dimension of nets.

    Args:
        net: The network.
        mean: Mean of the training images.
        std: Standard deviation of the training images.
        device: Where the network lies. Results are on the CPU.
    """

    def __init__(self, net: nn.Module, mean: float, std: float, device: torch.device):
        self.net = net.eval()
        self.mean = mean
        self.std = std
        self.device = device

    def _map_batches(
        self, images: Tensor, function: Callable[[Tensor], Tensor], dim: int
    ) -> Tensor:
        """Apply a function to standardized images, batch by batch.

        Args:
            images: Images, [count, channels, height, width].
            function: Maps standardized images to results.
            dim: Dimension of the images in the results.

        Returns:
            The results of all images in float32, on the CPU.
        """
        results = []
        with torch.no_grad():
            for batch in images.split(INFERENCE_BATCH_SIZE):
                standardized = (batch.to(self.device) - self.mean) / self.std
                if isinstance(self.net, Ensemble):
                    # Images for each net: the nets run one after another and need less memory.
                    standardized = standardized.expand(self.net.num_nets, *standardized.shape)
                results.append(function(standardized).float().cpu())
        return torch.cat(results, dim)

    def predict(self, images: Tensor) -> Tensor:
        """Return the most likely class of each image, [count]."""
        return self._map_batches(images, lambda batch: self.net(batch).argmax(-1), -1).long()

    def predict_proba(self, images: Tensor) -> Tensor:
        """Return the probabilities of the classes, [count, classes]."""
        return self._map_batches(images, lambda batch: self.net(batch).softmax(-1), -2)

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the last layer, [count, num_features]."""
        return self._map_batches(images, self.net.features, -2)  # type: ignore[arg-type]


def train_classifier(
    build_net: Callable[..., nn.Module],
    images: Tensor,
    labels: Tensor,
    classes: int,
    recipe: Recipe,
    device: torch.device,
    *,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = ignore_progress,
    stage: str = "training a classifier",
) -> Classifier:
    """Train a classifier on standardized images.

    Augmentations act on standardized images, as in the condensation papers: pixels from outside an
    image have the mean value.

    Args:
        build_net: Builds the network from the shape of an image and the number of classes.
        images: Images in [0, 1], [count, channels, height, width].
        labels: Labels [count], or soft labels [count, classes].
        classes: Number of classes.
        recipe: How to train. Several repeats give an ensemble, which `ConvNet` alone supports.
        device: Where to train.
        seed: Seed of the weights, batches and augmentations.
        progress: Receives the stage, the number of finished epochs and that of all epochs.
        stage: Name of the stage for `progress`.

    Returns:
        The classifier.

    Raises:
        ValueError: The recipe has several repeats and the network is no `ConvNet`.

    >>> from privot.nets import LeNet
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    >>> device = torch.device("cpu")
    >>> classifier = train_classifier(LeNet, images, labels, 2, Recipe(1, 0.01), device)
    >>> classifier.predict(images).shape
    torch.Size([20])
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (images.shape[1], images.shape[2], images.shape[3])
    mean = images.mean().item()
    std = max(images.std().item(), 1e-3)
    net: nn.Module
    if recipe.num_repeats > 1:
        if build_net is not ConvNet:
            raise ValueError("Only ConvNets can be trained several times at once.")
        net = Ensemble(recipe.num_repeats, shape, classes, generator=generator).to(device)
    else:
        net = initialize_weights(build_net(shape, classes), generator).to(device)
        if recipe.half_precision:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    standardized = ((images - mean) / std).to(device)
    run = TrainingRun(net.train(), standardized, labels.to(device), recipe, pad_value=-mean / std)
    run.run(generator, progress, stage)
    return Classifier(net, mean, std, device)


def train_ensemble(
    nets: Ensemble,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    generator: torch.Generator | Sequence[torch.Generator],
    *,
    signed: bool = True,
    progress: Callable[[str, int, int], None] = ignore_progress,
    stage: str = "training the nets",
) -> None:
    """Train the nets of an ensemble in place, each on its own batches and augmentations.

    Images are augmented before they are scaled, so pixels from outside an image are black. All
    tensors lie on one device.

    Args:
        nets: The ensemble.
        images: Images in [0, 1], [count, channels, height, width], or [nets, count, ...] with
            images for each net.
        labels: Labels [count] or soft labels [count, classes], with a leading [nets] if images
            have it.
        recipe: How to train.
        generator: Source of the random numbers, on the CPU so that a seed gives the same numbers
            with every device. With one generator for each net, a net trains as it would alone.
        signed: Whether the nets get images as 2x - 1; otherwise unchanged.
        progress: Receives the stage, the number of finished epochs and that of all epochs.
        stage: Name of the stage for `progress`.

    >>> rng = torch.Generator().manual_seed(0)
    >>> nets = Ensemble(2, (1, 8, 8), 3, width=4, generator=rng)
    >>> images, labels = torch.rand(9, 1, 8, 8), torch.arange(9) % 3
    >>> before = nets.head_bias.clone()
    >>> train_ensemble(nets, images, labels, Recipe(2, 0.01, augmentations=("crop",)), rng)
    >>> torch.equal(nets.head_bias, before)
    False
    """
    TrainingRun(nets, images, labels, recipe, signed=signed).run(generator, progress, stage)
