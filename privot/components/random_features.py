"""Mean embeddings by random Fourier features: what DP-MERF asks for, of images or of codes, and how a generator is matched to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.runtime import Progress, Streams

COUNT_SHARE = 0.1  # of a part's norm goes to the class count: its noise is then 10 times that of a feature, its price 0.5 %

CALLS = 200  # of tensor operators, in a step of `match`
ELEMENTWISE = 4  # times that a step of `match` goes through the features of its batch


def embed(points: Tensor, frequencies: Tensor) -> Tensor:
    """Random Fourier features of unit norm: [..., numbers] to [..., features]."""
    phase = points @ frequencies
    return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(frequencies.shape[1])


def counted(features: Tensor, share: float) -> Tensor:
    """One record's part: its features and a constant that counts it, of norm 1 together: [features + 1]."""
    return torch.cat([features * math.sqrt(1 - share**2), features.new_full((1,), share)])


def count_share(spec: Spec) -> float:
    """Nothing where class sizes are declared."""
    return 0.0 if spec.class_sizes else COUNT_SHARE


def frequencies(
    numbers: int, features: int, widths: tuple[float, ...], scale: float, generator: torch.Generator
) -> Tensor:
    """[numbers, features / 2], an equal share for each kernel width, in units of ``scale``."""
    half = features // 2
    draws = torch.randn(numbers, half, generator=generator)
    return draws / (torch.tensor(widths).repeat(math.ceil(half / len(widths)))[:half] * scale)


def goals(answer: Tensor, share: float, spec: Spec) -> tuple[Tensor, Tensor]:
    """Of a noisy sum of `counted` parts by class: mean embeddings [classes, features], and how large each class is beside the mean."""
    sizes = (
        torch.tensor(spec.class_sizes, dtype=torch.float64, device=answer.device)
        if spec.class_sizes
        else (answer[:, -1] / share)
    )
    sizes = sizes.clamp(min=0)
    scale = sizes.mean().clamp(min=1)
    return (answer[:, :-1] / (scale * math.sqrt(1 - share**2))).float(), (sizes / scale).float()


def match(
    drawn: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    target: Tensor,
    weight: Tensor,
    known: Tensor,
    *,
    code: int,
    steps: int,
    batch: int,
    portion: int,
    rate: float,
    streams: Streams,
    progress: Progress,
) -> None:
    """Minimise the squared distance between the embeddings of ``drawn(codes, labels)`` and ``target``, over ``parameters``.

    ``known`` are the frequencies; the norm's batch bias (1 - 1/batch) is taken out.
    """
    device = target.device
    classes = len(target)
    labels = torch.arange(classes, device=device).repeat_interleave(batch)
    codes = streams.generator("codes", device)
    optimiser = torch.optim.Adam(parameters, lr=rate)
    unbiased = batch / (batch - 1)
    half = known.shape[1]
    seen = min(portion // 2, known.shape[1])
    offsets = torch.randint(half, (steps,), generator=streams.generator("portions")).tolist()
    for step in range(steps):
        # a short warm-up, then a cosine down to zero
        optimiser.param_groups[0]["lr"] = (
            rate * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
        )
        points = drawn(torch.randn(len(labels), code, generator=codes, device=device), labels)
        wanted = (
            torch.arange(seen, device=device) + offsets[step]
        ) % half  # any run of random features is a random choice
        goal = torch.cat([target[:, wanted], target[:, wanted + half]], 1) * math.sqrt(half / seen)
        mean = (
            embed(points.flatten(1), known[:, wanted]).view(classes, batch, -1).mean(1)
            * weight[:, None]
        )
        loss = unbiased * mean.square().sum() - 2 * (mean * goal).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        if step % 25 == 24 or step + 1 == steps:
            progress("training the generator", step + 1, steps)
