r"""Entropic transport as a loss, quick where the temperature is that of privacy noise, and its one-sided half.

For a cost :math:`c` [..., n, m] between equally weighted points and a temperature :math:`t`

.. math:: W_t = \min_P \sum P_{ij} c_{ij} + t\, KL(P \| 1/nm) = \max_{f,g} mean(f) + mean(g), \quad P_{ij} = e^{(f_i+g_j-c_{ij})/t} / nm.

With :math:`e^{-c/t}` the law of a noise, W is least in x where x is what the noise was added to (Rigollet and Weed 2018; Reshetova et al.
2024). It is not debiased, on purpose: the debiased divergence is least where x is as noisy as y.

A sweep is two products of a kernel with a vector. The kernel is made from the potentials found so far, so that its largest entries are
near 1 whatever the cost; between two makings only vectors change, which is several times as quick as logarithms of sums. Where even that
passes the range of the numbers, sums are shifted by their largest part instead. On a GPU one kernel does a half sweep by logarithms.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privot.transport.absolute import fused

STRIDE = 5  # sweeps between two looks at how far it has got
MOST = 1000  # sweeps
TOLERANCE = 1e-6  # relative, of the weights of the points
OUTGROWN = 30.0  # e to this is how far vectors may go before the kernel is made anew: 13 digits of the 38 that float32 has
LEAST = -80.0  # exponents below it count as it: e^-80 is nothing beside a row's largest part, and below -86 a CPU is 100 times slower


class Settled(NamedTuple):
    """The potentials over the temperature, [..., n] and [..., m], and the largest relative error of a point's weight (a number on the
    device; columns are exact). ``sweeps`` were done."""

    first: Tensor
    second: Tensor
    error: Tensor
    sweeps: int

    def plan(self, scaled: Tensor) -> Tensor:
        """For the cost over the temperature: [..., n, m]."""
        n, m = scaled.shape[-2:]
        return (self.first[..., :, None] + self.second[..., None, :] - scaled).clamp(min=LEAST).exp() / (n * m)


def sweeps(epsilon: float, tolerance: float = TOLERANCE, most: int = 50) -> int:
    r"""How many sweeps surely do for a channel of this epsilon, whatever the data; at most ``most``, where experience says enough.

    Under epsilon-local privacy :math:`|c(x,y) - c(x',y)| \le t \epsilon`, so a sweep shrinks the error by :math:`tanh(\epsilon/2)^2`
    (Birkhoff), from at most :math:`2\epsilon`. With a delta this holds but for a few y.

    >>> sweeps(0.5), sweeps(1.0), sweeps(2.0), sweeps(348.0)
    (5, 10, 28, 50)
    """
    shrink = 2 * math.log(math.tanh(epsilon / 2)) if epsilon < 30 else 0.0
    return min(most, math.ceil(math.log(tolerance / (2 * epsilon)) / shrink)) if shrink and tolerance < 2 * epsilon else most


def settle(cost: Tensor, temperature: float, count: int | None = None, tolerance: float = TOLERANCE, most: int = MOST) -> Settled:
    """The potentials of ``cost`` [..., n, m]; they carry no gradient.

    With a ``count`` of sweeps the host is asked nothing, so that a CUDA graph can hold it. Without one it looks at the error at every
    stride, and stops.

    >>> settle(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 0.5).sweeps
    5
    """
    scaled = cost.detach() / temperature
    tolerance = max(tolerance, 32 * torch.finfo(scaled.dtype).eps)
    if fused(scaled) and scaled.ndim == 2:
        return _on_a_gpu(scaled, count, tolerance, most)
    found = _by_products(scaled, wanted := most if count is None else count, 0.0 if count else tolerance)
    return _by_logarithms(scaled, wanted, 0.0 if count else tolerance) if found is None else found


def _on_a_gpu(scaled: Tensor, count: int | None, tolerance: float, most: int) -> Settled:
    from privot.transport.fused_sinkhorn import Strides, Sweeping

    if count is None:
        return Settled(*Strides.of(scaled.shape, scaled.device, STRIDE).settle(scaled, tolerance, most))
    state = Sweeping(scaled)
    state.sweep(count)
    return Settled(state.first, state.second, state.error(), count)


def _by_products(scaled: Tensor, wanted: int, tolerance: float) -> Settled | None:
    """Sweeps with a kernel that is made anew when the potentials have outgrown it; None where they pass the range of the numbers."""
    n, m = scaled.shape[-2:]
    f = scaled.amin(-1)
    g = (scaled - f[..., :, None]).amin(-2)  # now every row and every column of the kernel has a 1
    kernel, done, asking = None, 0, not scaled.is_cuda or tolerance > 0
    while True:
        if kernel is None:
            kernel = (f[..., :, None] + g[..., None, :] - scaled).clamp_(min=LEAST).exp_()
            sums = kernel.sum(-1, keepdim=True)
        for _ in range(min(STRIDE, wanted - done)):
            u = m / sums
            v = n / (kernel.mT @ u)
            sums = kernel @ v
        done = min(done + STRIDE, wanted)
        error = (u * sums / m - 1).abs().amax()
        up, right = u.squeeze(-1).log(), v.squeeze(-1).log()
        if (far := float(error) if asking else math.inf) != far:
            return None
        outgrown = not asking or float(torch.maximum(up.abs().amax(), right.abs().amax())) > OUTGROWN
        if done == wanted or (far <= tolerance and not outgrown):
            return Settled(f + up, g + right, error, done)
        if outgrown:
            f, g, kernel = f + up, g + right, None


def _by_logarithms(scaled: Tensor, wanted: int, tolerance: float) -> Settled:
    """The same by sums that are shifted by their largest part, for costs that are thousands of temperatures."""
    n, m = scaled.shape[-2:]
    g = torch.zeros_like(scaled[..., 0, :])
    for done in range(1, wanted + 1):
        f = math.log(m) - _log_sum(g[..., None, :] - scaled)
        g = math.log(n) - _log_sum(f[..., None, :] - scaled.mT)
        if done % STRIDE == 0 or done == wanted:
            error = (f - math.log(m) + _log_sum(g[..., None, :] - scaled)).expm1().abs().amax()
            if not float(error) > tolerance:
                break
    return Settled(f, g, error, done)


def _log_sum(exponents: Tensor) -> Tensor:
    top = exponents.amax(-1, keepdim=True)
    return (exponents - top).clamp_(min=LEAST).exp_().sum(-1).log() + top.squeeze(-1)


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


def entropic(cost: Tensor, temperature: float, count: int | None = None, tolerance: float = TOLERANCE, most: int = MOST) -> Tensor:
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
