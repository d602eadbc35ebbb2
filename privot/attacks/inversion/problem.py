"""An inversion problem: a model, its weights, and the updates of N victims.

A victim is one client that sent one update, the gradient dL/dW (x, y) of the loss on its batch of
images. Tensors of all victims are stacked along a first axis N, and every function computes for all
victims at once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privot.attacks.inversion.conv_as_matmul import ConvAsMatmul
from privot.attacks.inversion.problem_checks import (
    LossFunction,
    TensorDict,
    build_gradient_function,
    check_deterministic,
    check_update,
    get_trainable_parameters,
)
from privot.errors import DataError


class GradientTransform(Protocol):
    """What a client does to the gradients of its images before it sends their mean."""

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None
    ) -> TensorDict:
        """Turn gradients of single images {name: [N, batch, ...]} into updates {name: [N, ...]}."""


@dataclass(frozen=True)
class Problem:
    """N updates to invert.

    Attributes:
        model: The model that the victims share.
        loss_fn: The loss whose gradient they send.
        weights: {name: [N, ...]} with one set of weights for each victim, or {name: [...]} for all.
        update: {name: [N, ...]}, what each victim sent.
        shape: (channels, height, width) of one image.
        classes: Number of classes.
        batch_size: Images behind each update.
        bounds: Smallest and largest value of a pixel.
        compare_mask: {name: bool [N, ...]}, the entries that an attacker who knows the defense
            compares. Pruned entries, for example, carry little information.
        slack: {name: [N, ...]}, the distance up to which such an attacker counts entries as equal,
            such as half a cell of a quantizer.
    """

    model: nn.Module
    loss_fn: LossFunction
    weights: TensorDict
    update: TensorDict
    shape: tuple[int, int, int]
    classes: int
    batch_size: int = 1
    bounds: tuple[float, float] = (0.0, 1.0)
    compare_mask: TensorDict | None = None
    slack: TensorDict | None = None

    def __post_init__(self) -> None:
        check_update(self.model, self.update)
        parameters = dict(self.model.named_parameters())
        extra_axes = {weight.ndim - parameters[name].ndim for name, weight in self.weights.items()}
        if len(extra_axes) != 1:
            raise DataError(
                "weights: give either one set of weights for all victims, or every tensor with a "
                "first axis of victims."
            )

    @classmethod
    def from_images(
        cls,
        model: nn.Module,
        loss_fn: LossFunction,
        images: Tensor,
        labels: Tensor,
        weights: TensorDict | None = None,
        defense: GradientTransform | None = None,
        *,
        classes: int | None = None,
        generator: torch.Generator | None = None,
        **fields: Any,
    ) -> Problem:
        """Compute the updates that clients with these images would send, for experiments.

        Args:
            model: The model that the clients share.
            loss_fn: Loss of the model.
            images: [N, batch, c, h, w].
            labels: [N, batch], or any labels that ``loss_fn`` takes, with the same first two axes.
            weights: {name: [N, ...]} or {name: [...]}. None: the weights of ``model``.
            defense: What clients do to the gradient of each image before they send the mean.
            classes: Number of classes. None: the width of the logits, at least 2.
            generator: The random numbers of the defense.
            fields: Further fields of the problem, such as ``bounds``.

        Returns:
            The problem with these updates.

        Raises:
            DataError: Images and labels do not fit each other, or labels do not fit the model.

        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> images, labels = torch.rand(5, 2, 1, 2, 2), torch.zeros(5, 2, dtype=torch.long)
        >>> problem = Problem.from_images(net, nn.functional.cross_entropy, images, labels)
        >>> problem.num_victims, problem.classes, list(problem.update["1.weight"].shape)
        (5, 3, [5, 3, 4])
        """
        if images.ndim != 5 or labels.shape[:2] != images.shape[:2]:
            raise DataError(
                f"images {list(images.shape)}, labels {list(labels.shape)}: shapes "
                "[N, batch, c, h, w] and [N, batch] are needed."
            )
        check_deterministic(model)
        weights = weights if weights is not None else get_trainable_parameters(model)
        is_shared = _has_shared_weights(model, weights)
        first_weights = {
            name: weight if is_shared else weight[0] for name, weight in weights.items()
        }
        num_logits = functional_call(model, first_weights, (images[0],)).shape[-1]
        classes = classes or max(2, num_logits)
        _check_label_range(labels, classes)
        compute_gradient = build_gradient_function(model, loss_fn)
        weight_axis = None if is_shared else 0
        with torch.no_grad(), ConvAsMatmul():
            if defense is None:
                update = vmap(compute_gradient, in_dims=(weight_axis, 0, 0))(
                    weights, images, labels
                )
            else:
                compute_image_gradients = vmap(compute_gradient, in_dims=(None, 0, 0))
                image_gradients = vmap(compute_image_gradients, in_dims=(weight_axis, 0, 0))(
                    weights, images.unsqueeze(2), labels.unsqueeze(2)
                )
                update = defense(image_gradients, generator)
        channels, height, width = images.shape[2:]
        return cls(
            model,
            loss_fn,
            weights,
            update,
            (channels, height, width),
            classes,
            images.shape[1],
            **fields,
        )

    @property
    def num_victims(self) -> int:
        """N."""
        return len(next(iter(self.update.values())))

    @property
    def has_shared_weights(self) -> bool:
        """Whether all victims share one set of weights."""
        return _has_shared_weights(self.model, self.weights)

    @property
    def reference_tensor(self) -> Tensor:
        """A tensor whose device and dtype all other tensors share."""
        return next(iter(self.update.values()))

    def select(self, indices: Tensor) -> Problem:
        """Select the victims with these indices, in this order; an index may repeat (restarts)."""

        def select_tensors(tensors: TensorDict | None) -> TensorDict | None:
            if tensors is None:
                return None
            return {name: tensor[indices] for name, tensor in tensors.items()}

        weights = self.weights if self.has_shared_weights else select_tensors(self.weights)
        selection = object.__new__(Problem)  # its checks ran when the whole problem was built
        changed_fields = {
            "weights": weights,
            "update": select_tensors(self.update),
            "compare_mask": select_tensors(self.compare_mask),
            "slack": select_tensors(self.slack),
        }
        for name, value in (vars(self) | changed_fields).items():
            object.__setattr__(selection, name, value)
        return selection

    def to_float64(self) -> Problem:
        """Return the same problem in float64."""
        return replace(
            self,
            model=copy.deepcopy(self.model).double(),  # its buffers, too
            weights={name: weight.double() for name, weight in self.weights.items()},
            update={name: gradient.double() for name, gradient in self.update.items()},
        )

    def compute_gradient(self, weights: TensorDict, images: Tensor, labels: Tensor) -> TensorDict:
        """Compute the update of one victim; differentiable, for use under a vmap.

        Args:
            weights: {name: [...]}, the weights of this victim.
            images: [batch, c, h, w].
            labels: [batch], or label probabilities [batch, classes].

        Returns:
            {name: [...]}, the gradient of the loss with respect to the weights.
        """
        return build_gradient_function(self.model, self.loss_fn)(weights, images, labels)


@dataclass(frozen=True)
class Reconstruction:
    """The images and labels that an attack found.

    Attributes:
        images: [N, batch, c, h, w].
        labels: [N, batch].
        steps: [N], gradient evaluations that were used.
        residual: [N], the part of the update that the images do not explain, in the attack's unit.
        trace: (step, images) at the steps that were requested, or None.
    """

    images: Tensor
    labels: Tensor
    steps: Tensor
    residual: Tensor
    trace: tuple[tuple[int, Tensor], ...] | None = None


def compute_victim_gradients(problem: Problem, images: Tensor, labels: Tensor) -> TensorDict:
    """Compute the updates of all victims, differentiable in images and labels.

    Args:
        problem: The model and the weights.
        images: [N, batch, c, h, w].
        labels: [N, batch], or label probabilities [N, batch, classes].

    Returns:
        {name: [N, ...]}.
    """
    weight_axis = None if problem.has_shared_weights else 0
    with ConvAsMatmul():
        return vmap(problem.compute_gradient, in_dims=(weight_axis, 0, 0))(
            problem.weights, images, labels
        )


def _check_label_range(labels: Tensor, classes: int) -> None:
    if labels.dtype != torch.long:
        return
    lowest = int(labels.min())
    highest = int(labels.max())
    if not 0 <= lowest <= highest < classes:
        raise DataError(
            f"Labels are from {lowest} to {highest}, but the model has {classes} classes. "
            f"Use 0 to {classes - 1}."
        )


def _has_shared_weights(model: nn.Module, weights: TensorDict) -> bool:
    name, weight = next(iter(weights.items()))
    return weight.ndim == dict(model.named_parameters())[name].ndim
