r"""Recover labels from an update without a search.

With softmax cross-entropy, p the predicted and t the true distribution, the gradient of the last
layer's weight is (p - t) h^T, and the gradient of its bias is the mean of p - t over the batch. For
one image the only negative entry is the label (iDLG, Zhao et al. 2020). Without a bias the row sums
of the weight's gradient have the same sign where the features h are not negative. For larger
batches the entries are  mean(p) - count / batch, and the counts are rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privot.attacks.inversion.conv_as_matmul import ConvAsMatmul
from privot.attacks.inversion.problem import Problem
from privot.errors import SettingError

NUM_PROBES = 64  # random images from which the model's mean prediction is estimated


def recover_labels(problem: Problem, seed: int = 0) -> Tensor:
    """Recover labels [N, batch] in ascending order.

    They are exact for one image behind an update, and rounded counts for more.

    Raises:
        SettingError: The model has no last linear layer whose gradient is in the update.

    >>> net, images = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.rand(6, 1, 1, 2, 2)
    >>> labels = torch.tensor([[0], [1], [2]] * 2)
    >>> problem = Problem.from_images(net, nn.functional.cross_entropy, images, labels)
    >>> recover_labels(problem).flatten().tolist()
    [0, 1, 2, 0, 1, 2]
    """
    name, last_layer = find_last_linear(problem.model, problem.classes)
    if last_layer.out_features == 1:
        return _recover_from_sign(problem, name, last_layer)
    logit_gradients = compute_mean_logit_gradient(problem, name, last_layer, seed)
    if problem.batch_size == 1:
        return logit_gradients.argmin(1, keepdim=True)
    return _recover_by_counting(problem, logit_gradients, seed)


def find_last_linear(model: nn.Module, classes: int) -> tuple[str, nn.Linear]:
    """Find the name and the module of the layer that gives the logits.

    Raises:
        SettingError: The last linear layer does not have one output for each class.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    if not layers or layers[-1][1].out_features not in (classes, 1):
        raise SettingError(
            f"Labels are recovered from a last Linear layer with {classes} outputs, and this model "
            "has none. Give the labels, or use the attack dlg."
        )
    return layers[-1]


def compute_mean_logit_gradient(
    problem: Problem, name: str, last_layer: nn.Linear, seed: int = 0
) -> Tensor:
    """Compute the mean of p - t over the batch.

    It is the gradient of the bias. Without a bias it is the row sums of the weight's gradient,
    divided by the mean sum of the features.

    Args:
        problem: The updates.
        name: Name of the last layer, for messages.
        last_layer: The layer that gives the logits.
        seed: Seed of the random images with which the sum of the features is estimated.

    Returns:
        [N, classes].

    Raises:
        SettingError: Neither weight nor bias of the layer is in the update.
    """
    parameters = dict(problem.model.named_parameters())
    prefix = next(
        key for key, parameter in parameters.items() if parameter is last_layer.weight
    ).removesuffix("weight")
    if last_layer.bias is not None and f"{prefix}bias" in problem.update:
        return problem.update[f"{prefix}bias"]
    if f"{prefix}weight" not in problem.update:
        raise SettingError(
            f"{name}: neither its weight nor its bias is in the update, so no label can be "
            "recovered. Give the labels, or use the attack dlg."
        )
    row_sums = problem.update[f"{prefix}weight"].sum(2)
    if problem.batch_size == 1:
        return row_sums  # the sum of the features is the same positive factor in every row
    return row_sums / _estimate_feature_sum(problem, last_layer, seed)[:, None]


def _recover_by_counting(problem: Problem, logit_gradients: Tensor, seed: int) -> Tensor:
    """Recover labels from mean(p) - count / batch.

    One label at a time: the class whose gradient is furthest below the mean prediction.

    Args:
        problem: The updates.
        logit_gradients: [N, classes].
        seed: Seed of the random images with which the mean prediction is estimated.

    Returns:
        Labels [N, batch] in ascending order.
    """
    remainder = logit_gradients - _estimate_mean_prediction(problem, seed)
    share = torch.full_like(remainder[:, :1], 1 / problem.batch_size)
    labels = []
    for _ in range(problem.batch_size):
        label = remainder.argmin(1, keepdim=True)
        remainder = remainder.scatter_add(1, label, share.expand(len(remainder), 1))
        labels.append(label)
    return torch.cat(labels, 1).sort(1).values


def _recover_from_sign(problem: Problem, name: str, last_layer: nn.Linear) -> Tensor:
    """Recover labels [N, 1] of a model with one logit: the bias's gradient is negative for label 1.

    Without a bias the other label fits as well, with features of the opposite sign.

    Args:
        problem: The updates.
        name: Name of the last layer.
        last_layer: The layer that gives the logit.

    Returns:
        Labels [N, 1].

    Raises:
        SettingError: There is more than one image, or no bias.
    """
    if problem.batch_size > 1 or last_layer.bias is None:
        raise SettingError(
            f"{name}: labels cannot be recovered from one logit for a batch, nor without a bias. "
            "Give the labels."
        )
    return (compute_mean_logit_gradient(problem, name, last_layer) < 0).long()


def _sample_probes(problem: Problem, seed: int) -> Tensor:
    """Sample random images [NUM_PROBES, c, h, w], uniform within the bounds."""
    generator = torch.Generator().manual_seed(seed)
    low, high = problem.bounds
    uniform = torch.rand(NUM_PROBES, *problem.shape, generator=generator)
    return (uniform * (high - low) + low).to(problem.reference_tensor)


def _estimate_mean_prediction(problem: Problem, seed: int) -> Tensor:
    """Estimate the mean prediction on random images, [N, classes] or [1, classes]."""
    return _evaluate_on_probes(problem, seed, lambda logits: logits.softmax(1).mean(0))


def _estimate_feature_sum(problem: Problem, last_layer: nn.Linear, seed: int) -> Tensor:
    """Estimate the mean sum of the last layer's input features on random images.

    Args:
        problem: Model and weights.
        last_layer: The layer that gives the logits.
        seed: Seed of the random images.

    Returns:
        [N] or [1].
    """
    feature_sums: list[Tensor] = []
    hook = last_layer.register_forward_pre_hook(
        lambda _, inputs: feature_sums.append(inputs[0].sum(1).mean(0))
    )
    try:
        return _evaluate_on_probes(problem, seed, lambda _: feature_sums.pop())
    finally:
        hook.remove()


def _evaluate_on_probes(
    problem: Problem, seed: int, summarize_logits: Callable[[Tensor], Tensor]
) -> Tensor:
    """Evaluate a summary of the logits of random images for each set of weights.

    Args:
        problem: Model and weights.
        seed: Seed of the random images.
        summarize_logits: Function from logits [NUM_PROBES, classes] to a tensor.

    Returns:
        [N, ...], or [1, ...] where all victims share their weights.
    """
    probes = _sample_probes(problem, seed)

    def evaluate_model(weights: dict[str, Tensor]) -> Tensor:
        return summarize_logits(functional_call(problem.model, weights, (probes,)))

    with torch.no_grad(), ConvAsMatmul():
        if problem.has_shared_weights:
            return evaluate_model(problem.weights)[None]
        return vmap(evaluate_model)(problem.weights)
