"""Steps of WGAN-GP critics in a second: many side by side, and one after another as usual code has them, in the same run.

    python bench/critics.py --critics 1000 --width 32 64 [--chunk-size 4000]

A step is of one critic on 32 real and 32 generated images of 28 x 28, with gradient penalty, spectral norm and Adam.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime

import torch
from environment import commit, hardware
from torch import Tensor, nn
from torch.func import vmap

from privot.components.critic_training import train_critic
from privot.nets.functional_critic import Critic

BATCH = 32
SHAPE = (1, 28, 28)
CLASSES = 10


class Plain(nn.Module):
    """The same critic as one writes it for one."""

    def __init__(self, critic: Critic):
        super().__init__()
        shapes = [
            shape for name, shape in critic.parameter_shapes.items() if name.startswith("conv")
        ]
        self.convs = nn.ModuleList(
            nn.utils.parametrizations.spectral_norm(
                nn.Conv2d(shape[1], shape[0], 5, stride=2, padding=2)
            )
            for shape in shapes
        )
        self.dense = nn.Linear(critic.parameter_shapes["dense"][1], 1)
        self.label = nn.Embedding(CLASSES, critic.parameter_shapes["dense"][1])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for conv in self.convs:
            x = nn.functional.leaky_relu(conv(x), 0.1)
        x = x.flatten(1)
        return self.dense(x)[:, 0] + (x * self.label(labels)).sum(1)


def one_by_one(critic: Critic, device: torch.device, seconds: float = 5.0) -> float:
    net = Plain(critic).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, betas=(0.5, 0.9))
    real, fake = torch.rand(2, BATCH, *SHAPE, device=device)
    labels = torch.arange(BATCH, device=device) % CLASSES

    def step() -> None:
        mid = torch.lerp(fake, real, torch.rand(BATCH, 1, 1, 1, device=device)).requires_grad_()
        (gradient,) = torch.autograd.grad(net(mid, labels).sum(), mid, create_graph=True)
        known = net(real, labels)
        drawn = net(fake, labels)
        loss = (
            drawn.mean()
            - known.mean()
            + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()
            + 0.001 * known.square().mean()
        )
        adam.zero_grad()
        loss.backward()
        adam.step()

    return rate(step, device, seconds)


def side_by_side(
    critic: Critic, count: int, chunk_size: int, device: torch.device, seconds: float = 10.0
) -> float:
    """Through the query that the gate runs, in chunks as the gate takes them."""
    generator = torch.Generator().manual_seed(0)
    weights, left_vectors = (values.to(device) for values in critic.init_weights(count, generator))
    state = {
        "weights": weights,
        "left_vectors": left_vectors,
        "adam_mean": torch.zeros_like(weights),
        "adam_square": torch.zeros_like(weights),
    }
    images = torch.rand(count, 60, *SHAPE, device=device)
    labels = torch.randint(CLASSES, (count, 60), device=device)
    fakes = torch.rand(CLASSES, BATCH, *SHAPE, device=device)
    number = torch.zeros((), device=device)
    each = vmap(train_critic, in_dims=(0, 0, 0, *(None for _ in range(7))))

    def step() -> None:
        places, mix = torch.rand(2, 1, BATCH, device=device)
        which = torch.randint(BATCH, (1, BATCH), device=device)
        for part in torch.arange(count, device=device).split(max(1, chunk_size // 60)):
            known = {name: value[part] for name, value in state.items()}
            fresh = each(
                images[part], labels[part], known, critic, fakes, places, which, mix, number, 1e-4
            )
            for name, value in state.items():
                value[part] = fresh[name]

    return count * rate(step, device, seconds)


def rate(step: object, device: torch.device, seconds: float) -> float:
    """Calls a second, after some to warm up."""
    done = (lambda: torch.cuda.synchronize()) if device.type == "cuda" else (lambda: None)
    for _ in range(2):
        step()  # type: ignore[operator]
    done()
    begin = time.perf_counter()
    count = 0
    while time.perf_counter() - begin < seconds:
        step()  # type: ignore[operator]
        done()
        count += 1
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--critics", type=int, default=1000)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[4000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each timing")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
    )
    print(
        "| width | critics | records at a time | side by side, steps a second | one by one | times |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for width in asked.width:
        critic = Critic(SHAPE, CLASSES, width)
        alone = one_by_one(critic, device, asked.seconds / 2)
        for chunk_size in asked.chunk_size:
            many = side_by_side(critic, asked.critics, chunk_size, device, asked.seconds)
            print(
                f"| {width} | {asked.critics} | {chunk_size} | {many:.0f} | {alone:.0f} | {many / alone:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
