"""Train on released data, test on real data: the usual classifiers, by the protocols of the papers.

``cnn``: LeNet-5, SGD 0.02 with momentum 0.9 and weight decay 1e-4, batch 128, 50 epochs, rate divided by 10 after epoch 40, inputs
standardised by the released images; accuracy of the last epoch, never the best one. ``mlp``: scikit-learn's MLPClassifier as it
comes. ``logistic``: scikit-learn's logistic regression, at most 5,000 iterations.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn

from privot.data.records import Public, Records, Sensitive
from privot.errors import SettingError
from privot.measures.reading import Reading
from privot.nets.convolutional import initialise
from privot.nets.lenet import LeNet
from privot.runtime import Progress, Runtime, silent

Classifier = Callable[[Records, Tensor, int, torch.device, int, Progress], Tensor]


def downstream(
    images: Tensor,
    labels: Tensor,
    test: Sensitive | Public,
    only: tuple[str, ...] = ("logistic", "mlp", "cnn"),
    *,
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Reading]:
    """Accuracy on ``test`` of classifiers trained on ``images`` [count, channels, height, width] in [0, 1] and ``labels`` [count]."""
    unknown = [name for name in only if name not in CLASSIFIERS]
    if unknown:
        raise SettingError(f"no classifier {unknown[0]!r}: {', '.join(CLASSIFIERS)}")
    if images.shape[1:] != test.spec.shape:
        raise SettingError(f"test images are {list(test.spec.shape)}, released ones {list(images.shape[1:])}")
    if len(images) != len(labels) or len(labels.unique()) < 2:
        raise SettingError(f"{len(images)} released images with {len(labels.unique())} labels: a classifier needs at least two classes")
    device = (runtime or Runtime()).target
    real = test._take(slice(None))
    readings = []
    for name in only:
        start = time.perf_counter()
        guesses = CLASSIFIERS[name](Records(images, labels), real.images, test.spec.classes, device, seed, progress)
        accuracy = (guesses == real.labels).double().mean().item()
        error = math.sqrt(accuracy * (1 - accuracy) / len(guesses))
        public = isinstance(test, Public)
        readings.append(Reading(f"{name}_accuracy", accuracy, error, len(guesses), test.name, public, time.perf_counter() - start))
    return readings


def _cnn(train: Records, test: Tensor, classes: int, device: torch.device, seed: int, progress: Progress) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean, std = train.images.mean(), train.images.std().clamp(min=1e-3)
    images, labels = ((train.images - mean) / std).to(device), train.labels.to(device)
    net = initialise(LeNet(tuple(images.shape[1:]), classes), generator).to(device)  # type: ignore[arg-type]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    epochs = 50
    for epoch in range(epochs):
        optimiser.param_groups[0]["lr"] = 0.02 if epoch < 40 else 0.002
        for batch in torch.randperm(len(labels), generator=generator).to(device).split(128):
            optimiser.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimiser.step()
        progress("training the CNN", epoch + 1, epochs)
    with torch.no_grad():
        return torch.cat([net(((part - mean) / std).to(device)).argmax(1).cpu() for part in test.split(1000)])


def _mlp(train: Records, test: Tensor, classes: int, device: torch.device, seed: int, progress: Progress) -> Tensor:
    return _fitted(MLPClassifier(random_state=seed), train, test, "training the MLP", progress)


def _logistic(train: Records, test: Tensor, classes: int, device: torch.device, seed: int, progress: Progress) -> Tensor:
    return _fitted(LogisticRegression(max_iter=5000), train, test, "training the logistic regression", progress)


def _fitted(model: MLPClassifier | LogisticRegression, train: Records, test: Tensor, stage: str, progress: Progress) -> Tensor:
    progress(stage, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the papers' protocol stops there too
        model.fit(train.images.flatten(1).numpy(), train.labels.numpy())
    progress(stage, 1, 1)
    return torch.from_numpy(model.predict(test.flatten(1).numpy()))


CLASSIFIERS: dict[str, Classifier] = {"logistic": _logistic, "mlp": _mlp, "cnn": _cnn}
