"""Local privacy in four pictures: what was noised by its owners, and what can be learned from it.

python examples/local_privacy.py [--out docs/pictures/local-half-disk.png] [--steps 1000] [--count 200000]

Two hundred thousand people hold a point of a half disk each. Every one adds Laplace noise at epsilon 5 on their own machine and sends the
sum; the server sees nothing else. Three generators: from points without noise; from the noisy points with hardly any regularisation, which
learns the noise; and with the regularisation that fits the noise, which takes it away.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from torch import Tensor

from privot import synthesize
from privot.data.spec import Spec
from privot.local.channels import Laplace, Projection
from privot.local.dataset import PrivatizedDataset


def half_disk(count: int, seed: int) -> Tensor:
    """[count, 2]."""
    points = 2 * torch.rand(5 * count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return points[(points.norm(dim=1) < 1) & (points[:, 0] >= 0)][:count]


def distance(x: Tensor, y: Tensor) -> float:
    """The exact transport distance W2 of equally many points."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return float(cost[linear_sum_assignment(cost)].mean() ** 0.5)


def learned(values: Tensor, channel: Laplace, **settings: float | str) -> Tensor:
    """Two thousand points that a generator draws which has seen these answers alone: [2000, 2]."""
    box = PrivatizedDataset(values, channel, Spec((1, 1, 2), 1, len(values)), "half disk")
    return synthesize(box, "entropic-gan", settings=settings).sample(2000)[0].flatten(1)


def main() -> None:
    """Four panels in a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="docs/pictures/local-half-disk.png")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--count", type=int, default=200_000)
    given = parser.parse_args()
    space = Projection(shape=(2,))
    channel = Laplace.calibrate(5.0, space=space, low=-1.0, high=1.0)
    faint = Laplace.calibrate(120.0, space=space, low=-1.0, high=1.0)
    # Room to make the mistake: the same noise, for a generator that may leave the domain.
    roomy = dataclasses.replace(channel, low=-6.0, high=6.0)
    clean = half_disk(given.count, 0)
    fresh = half_disk(2000, 1)
    noisy = channel.privatize(clean)  # on the clients
    panels = {
        "what the server gets (epsilon 5)": noisy[:2000],
        "no noise": learned(faint.privatize(clean), faint, steps=given.steps),
        "noise, a tenth of the regularisation": learned(
            noisy, roomy, steps=given.steps, strength=0.1
        ),
        "noise, the regularisation that fits": learned(
            noisy, channel, steps=given.steps, batch=1000, loss="nll"
        ),
    }
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.5))
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        far = distance(points, fresh)
        print(f"{title}: W2 to clean points {far:.3f}")  # noqa: T201
        axis.scatter(*points.T, s=2, alpha=0.5, linewidths=0)
        axis.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        axis.set_title(f"{title}\nW2 to clean {far:.2f}", fontsize=9)
    figure.tight_layout()
    figure.savefig(given.out, dpi=110)


if __name__ == "__main__":
    main()
