r"""Labels from an update, without any search: the last layer's gradient is (p - t) h^T, and p - t is negative at a label alone.

With softmax cross-entropy, p the predicted and t the true distribution, the gradient of the last bias is the mean of p - t over the batch.
For one image its only negative entry is the label (iDLG, Zhao et al. 2020); without a bias the row sums of the weight's gradient tell the
same where features h are not negative. For larger batches entries are  mean(p) - count / batch: counts are rounded from them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privot.attacks.inversion.conv_as_matmul import Patches
from privot.attacks.inversion.problem import Problem
from privot.errors import SettingError

PROBES = 64  # random images by which the net's usual prediction is estimated


def recovered(problem: Problem, seed: int = 0) -> Tensor:
    """Labels [N, batch] in ascending order. Exact for one image behind an update; for more, counts by rounding, a good guess.

    >>> net, x, y = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.rand(6, 1, 1, 2, 2), torch.tensor([[0], [1], [2]] * 2)
    >>> recovered(Problem.of(net, nn.functional.cross_entropy, x, y)).flatten().tolist()
    [0, 1, 2, 0, 1, 2]
    """
    name, last = last_linear(problem.net, problem.classes)
    if last.out_features == 1:
        return _sign(problem, name, last)
    slopes = mean_error(problem, name, last, seed)  # [N, classes]
    if problem.batch == 1:
        return slopes.argmin(1, keepdim=True)
    return _counted(problem, slopes, seed)


def last_linear(net: nn.Module, classes: int) -> tuple[str, nn.Linear]:
    """The name and the layer that gives the logits."""
    found = [(name, each) for name, each in net.named_modules() if isinstance(each, nn.Linear)]
    if not found or found[-1][1].out_features not in (classes, 1):
        raise SettingError(
            f"labels are read off a last Linear layer of {classes} classes, and there is none: give them, or use dlg"
        )
    return found[-1]


def mean_error(problem: Problem, name: str, last: nn.Linear, seed: int = 0) -> Tensor:
    """The mean of p - t over the batch [N, classes]: the bias's gradient; else row sums of the weight's over the mean feature sum."""
    own = dict(problem.net.named_parameters())
    here = next(each for each, value in own.items() if value is last.weight).removesuffix("weight")
    if last.bias is not None and f"{here}bias" in problem.update:
        return problem.update[f"{here}bias"]
    if f"{here}weight" not in problem.update:
        raise SettingError(
            f"{name}: neither weight nor bias is in the update, so no label can be read off it: give the labels, or use dlg"
        )
    rows = problem.update[f"{here}weight"].sum(2)
    if problem.batch == 1:
        return rows  # the sum of the features is the same positive factor in every row
    return rows / _features(problem, last, seed)[:, None]


def _counted(problem: Problem, slopes: Tensor, seed: int) -> Tensor:
    """Labels [N, batch] from mean(p) - count / batch: one at a time, the class that is furthest under what the net would predict."""
    left = slopes - _predicted(problem, seed)
    chosen = []
    for _ in range(problem.batch):
        label = left.argmin(1, keepdim=True)
        left = left.scatter_add(
            1, label, torch.full_like(left[:, :1], 1 / problem.batch).expand(len(left), 1)
        )
        chosen.append(label)
    return torch.cat(chosen, 1).sort(1).values


def _sign(problem: Problem, name: str, last: nn.Linear) -> Tensor:
    """Of one logit: the bias's gradient is negative for label 1. Without a bias the other label fits as well (features change sign)."""
    if problem.batch > 1 or last.bias is None:
        raise SettingError(
            f"{name}: one logit does not tell the labels of a batch, nor any without a bias; give the labels"
        )
    return (mean_error(problem, name, last) < 0).long()


def _probes(problem: Problem, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = problem.bounds
    return (torch.rand(PROBES, *problem.shape, generator=generator) * (high - low) + low).to(
        problem.example
    )


def _predicted(problem: Problem, seed: int) -> Tensor:
    """What the net predicts of random images on average, [N, classes] or [1, classes]."""
    return _over_nets(problem, seed, lambda logits: logits.softmax(1).mean(0))


def _features(problem: Problem, last: nn.Linear, seed: int) -> Tensor:
    """Sum of the features that enter the last layer, on average over random images: [N] or [1]."""
    held: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, given: held.append(given[0].sum(1).mean(0)))
    try:
        return _over_nets(problem, seed, lambda _: held.pop())
    finally:
        hook.remove()


def _over_nets(problem: Problem, seed: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """What is read off the logits [PROBES, classes] of random images, for each net: [N, ...] or [1, ...]."""
    probes = _probes(problem, seed)

    def one(weights: dict[str, Tensor]) -> Tensor:
        return read(functional_call(problem.net, weights, (probes,)))

    with torch.no_grad(), Patches():
        return one(problem.weights)[None] if problem.shared else vmap(one)(problem.weights)
