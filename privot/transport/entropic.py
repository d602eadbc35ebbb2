r"""Entropic transport as a loss, quick where the temperature is that of privacy noise, and its one-sided half.

For a cost :math:`c` [..., n, m] between equally weighted points and a temperature :math:`t`

.. math:: W_t = \min_P \sum P_{ij} c_{ij} + t\, KL(P \| 1/nm) = \max_{f,g} mean(f) + mean(g), \quad P_{ij} = e^{(f_i+g_j-c_{ij})/t} / nm.

With :math:`e^{-c/t}` the law of a noise, W is least in x where x is what the noise was added to (Rigollet and Weed 2018; Reshetova et al.
2024). It is not debiased, on purpose: the debiased divergence is least where x is as noisy as y.

The least of each row and then of each column is taken off the cost first: potentials are then a few temperatures where costs may be
hundreds, and single precision knows weights to 1e-6 where the size of the potentials would leave 3e-5. Sweeps (`privot.transport.sinkhorn_iterations`)
are done by products, or by logarithms where the range of the numbers is passed; on a GPU one kernel does half a sweep. With a check a
stride of them begins where the last ones lead (`privot.transport.anderson`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privot.transport.anderson import Extrapolation
from privot.transport.costs import fused
from privot.transport.sinkhorn_iterations import LEAST, STRIDE, Logarithms, Products, Stride, Way

MOST = 1000  # sweeps
TOLERANCE = 1e-6  # relative, of the weights of the points


class Settled(NamedTuple):
    """Potentials over the temperature, [..., n] and [..., m]: what was ``taken`` off the cost, and what sweeps ``found`` beside it; the
    largest relative error of a point's weight (a number on the device; columns are exact). ``sweeps`` were done."""

    taken: tuple[Tensor, Tensor]
    found: tuple[Tensor, Tensor]
    error: Tensor
    sweeps: int

    @property
    def first(self) -> Tensor:
        return self.taken[0] + self.found[0]

    @property
    def second(self) -> Tensor:
        return self.taken[1] + self.found[1]

    def plan(self, scaled: Tensor) -> Tensor:
        """For the cost over the temperature: [..., n, m]."""
        (n, m) = scaled.shape[-2:]
        (first, second) = self.found
        exponents = (
            _less(scaled, *self.taken).neg_().add_(first[..., :, None]).add_(second[..., None, :])
        )
        return exponents.clamp_(min=LEAST).exp_().div_(n * m)


def _less(scaled: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (scaled - first[..., :, None]).sub_(second[..., None, :])


def sweeps(epsilon: float, tolerance: float = TOLERANCE, most: int = 50) -> int:
    r"""How many sweeps surely do for a channel of this epsilon, whatever the data; at most ``most``, where experience says enough.

    Under epsilon-local privacy :math:`|c(x,y) - c(x',y)| \le t \epsilon`, so a sweep shrinks the error by :math:`tanh(\epsilon/2)^2`
    (Birkhoff), from at most :math:`2\epsilon`. With a delta this holds but for a few y.

    >>> sweeps(0.5), sweeps(1.0), sweeps(2.0), sweeps(348.0)
    (5, 10, 28, 50)
    """
    shrink = 2 * math.log(math.tanh(epsilon / 2)) if epsilon < 30 else 0.0
    return (
        min(most, math.ceil(math.log(tolerance / (2 * epsilon)) / shrink))
        if shrink and tolerance < 2 * epsilon
        else most
    )


def settle(
    cost: Tensor,
    temperature: float,
    count: int | None = None,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> Settled:
    """The potentials of ``cost`` [..., n, m]; they carry no gradient.

    With a ``count`` of sweeps the host is asked nothing, so that a CUDA graph can hold it. Without one it looks at the error at every
    stride, and stops where that is below ``tolerance``, or what the rounding of the potentials may leave.

    >>> settle(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 0.5).sweeps
    5
    """
    scaled = cost.detach() / temperature
    rows = scaled.amin(-1)
    reduced = scaled - rows[..., :, None]
    columns = reduced.amin(-2)
    reduced.sub_(columns[..., None, :])  # every row and every column of the kernel has a 1 now
    tolerance = max(tolerance, 32 * torch.finfo(scaled.dtype).eps)
    asking = count is None or not scaled.is_cuda
    stride, done = _swept(
        _way(reduced, count, asking), torch.zeros_like(columns), count, tolerance, most
    )
    if asking and stride.error.isnan():  # products passed the range of the numbers
        stride, done = _swept(
            Logarithms(reduced), torch.zeros_like(columns), count, tolerance, most
        )
    return Settled((rows, columns), (stride.first, stride.second), stride.error, done)


def _way(reduced: Tensor, count: int | None, asking: bool) -> Way:
    if not fused(reduced) or reduced.ndim > 2:
        return Products(reduced, asking)
    from privot.transport.kernels.sinkhorn import Strides, Sweeping

    return (
        Sweeping(reduced)
        if count is not None
        else Strides.of(reduced.shape, reduced.device, STRIDE).begin(reduced)
    )


def _swept(
    way: Way, second: Tensor, count: int | None, tolerance: float, most: int
) -> tuple[Stride, int]:
    """The last stride from ``second`` on, and the number of sweeps.

    With a check, a stride begins where the last ones lead. If after it the error is no smaller or the dual's value is lower, it is taken
    back, and the more often this happens in a row the longer plain sweeps go on before the next try: they do neither.
    """
    if count is not None:
        return way.stride(second, count), count
    steps = Extrapolation(second)
    back = None
    last = math.inf
    highest = -math.inf
    done = 0
    wait = 1
    again = 0
    while True:
        stride = way.stride(second, times := min(STRIDE, most - done))
        done += times
        far, least, value = steps.look(
            second, stride.second, stride.error, stride.rounding, stride.value
        )
        if far <= max(tolerance, least) or done == most or (back is None and math.isnan(far)):
            return stride, done
        if back is not None and not (far < last and value >= highest):
            steps.forget()
            second = back
            back = None
            wait = 2 * wait
            again = done + wait * STRIDE
            continue
        wait = wait if back is None else 1
        last = far
        highest = value - 8 * max(
            least, torch.finfo(second.dtype).eps
        )  # rounding may lower it by so much
        leap = (
            steps.ahead() if done >= again and done + STRIDE < most else None
        )  # the last stride is one that cannot fail
        second, back = (stride.second, None) if leap is None else (leap, stride.second)


class _Envelope(torch.autograd.Function):
    """A value whose gradient in the cost is known: the plan. How the plan came about is not followed."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, value: Tensor, plan: Tensor) -> Tensor:
        ctx.save_for_backward(plan)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream[..., None, None] * ctx.saved_tensors[0], None, None


def entropic(
    cost: Tensor,
    temperature: float,
    count: int | None = None,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> Tensor:
    """The loss W of ``cost`` [..., n, m]: [...]. Its gradient is that of the cost under the plan (the envelope theorem).

    >>> cost = torch.tensor([[0.0, 4.0], [4.0, 0.0]], requires_grad=True)
    >>> entropic(cost, 1.0).backward()
    >>> cost.grad
    tensor([[0.4910, 0.0090],
            [0.0090, 0.4910]])
    """
    found = settle(cost, temperature, count, tolerance, most)
    value = temperature * (found.first.mean(-1) + found.second.mean(-1))
    made: Tensor = _Envelope.apply(cost, value, found.plan(cost.detach() / temperature))
    return made


def likelihood(cost: Tensor, temperature: float) -> Tensor:
    r"""The one-sided loss :math:`-t\, mean_j \log mean_i e^{-c_{ij}/t}`: [..., n, m] to [...]. No sweeps: f is zero.

    Never above W, and least at the same x when there are many; each y weighs the x for itself, so nothing makes each x count alike.

    >>> likelihood(torch.tensor([[0.0, 4.0], [4.0, 0.0]]), 1.0)
    tensor(0.6750)
    """
    scaled = cost.detach() / temperature
    least = scaled.amin(-2, keepdim=True)
    kernel = (least - scaled).clamp_(min=LEAST).exp_()
    sums = kernel.sum(-2, keepdim=True)
    n, m = cost.shape[-2:]
    value = temperature * (least - (sums / n).log()).mean((-2, -1))
    made: Tensor = _Envelope.apply(cost, value, kernel / (m * sums))
    return made
