"""Training steps of WGAN-GP critics in a second: batched, and one after another, in the same run.

    python bench/critics.py --critics 1000 --channels 32 64 [--chunk-size 4000]

A step trains one critic on 32 real and 32 generated images of 28 x 28, with gradient penalty,
spectral norm and Adam.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from environment import format_environment, make_parser, print_header, print_row
from torch import Tensor, nn
from torch.func import vmap

from privot.components.critic_training import train_critic
from privot.nets.functional_critic import Critic

BATCH_SIZE = 32
RECORDS_PER_CRITIC = 60
SHAPE = (1, 28, 28)
NUM_CLASSES = 10


class PlainCritic(nn.Module):
    """The same critic as an ordinary module."""

    def __init__(self, critic: Critic):
        super().__init__()
        shapes = critic.parameter_shapes
        self.convs = nn.ModuleList(
            nn.utils.parametrizations.spectral_norm(
                nn.Conv2d(shape[1], shape[0], 5, stride=2, padding=2)
            )
            for name, shape in shapes.items()
            if name.startswith("conv")
        )
        self.dense = nn.Linear(shapes["dense"][1], 1)
        self.label = nn.Embedding(NUM_CLASSES, shapes["dense"][1])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for conv in self.convs:
            x = nn.functional.leaky_relu(conv(x), 0.1)
        x = x.flatten(1)
        return self.dense(x)[:, 0] + (x * self.label(labels)).sum(1)


def measure_sequential(critic: Critic, device: torch.device, seconds: float) -> float:
    """Measure steps in a second of one ordinary critic."""
    net = PlainCritic(critic).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, betas=(0.5, 0.9))
    real, fake = torch.rand(2, BATCH_SIZE, *SHAPE, device=device)
    labels = torch.arange(BATCH_SIZE, device=device) % NUM_CLASSES

    def step() -> None:
        weights = torch.rand(BATCH_SIZE, 1, 1, 1, device=device)
        mixed = torch.lerp(fake, real, weights).requires_grad_()
        (gradient,) = torch.autograd.grad(net(mixed, labels).sum(), mixed, create_graph=True)
        real_scores = net(real, labels)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        drift = real_scores.square().mean()
        loss = net(fake, labels).mean() - real_scores.mean() + 10 * penalty + 0.001 * drift
        adam.zero_grad()
        loss.backward()
        adam.step()

    return count_calls_per_second(step, device, seconds)


def measure_batched(
    critic: Critic, num_critics: int, chunk_size: int, device: torch.device, seconds: float
) -> float:
    """Measure steps in a second of many critics, in chunks of records as the gate has them."""
    rng = torch.Generator().manual_seed(0)
    weights, left_vectors = (values.to(device) for values in critic.init_weights(num_critics, rng))
    state = {
        "weights": weights,
        "left_vectors": left_vectors,
        "adam_mean": torch.zeros_like(weights),
        "adam_square": torch.zeros_like(weights),
    }
    images = torch.rand(num_critics, RECORDS_PER_CRITIC, *SHAPE, device=device)
    labels = torch.randint(NUM_CLASSES, (num_critics, RECORDS_PER_CRITIC), device=device)
    fakes = torch.rand(NUM_CLASSES, BATCH_SIZE, *SHAPE, device=device)
    start_step = torch.zeros((), device=device)
    train_critics = vmap(train_critic, in_dims=(0, 0, 0, *(None for _ in range(7))))
    critics_per_chunk = max(1, chunk_size // RECORDS_PER_CRITIC)

    def step() -> None:
        record_fractions, mix_weights = torch.rand(2, 1, BATCH_SIZE, device=device)
        fake_indices = torch.randint(BATCH_SIZE, (1, BATCH_SIZE), device=device)
        for chunk in torch.arange(num_critics, device=device).split(critics_per_chunk):
            trained = train_critics(
                images[chunk],
                labels[chunk],
                {name: values[chunk] for name, values in state.items()},
                critic,
                fakes,
                record_fractions,
                fake_indices,
                mix_weights,
                start_step,
                1e-4,
            )
            for name, values in state.items():
                values[chunk] = trained[name]

    return num_critics * count_calls_per_second(step, device, seconds)


def count_calls_per_second(
    function: Callable[[], None], device: torch.device, seconds: float
) -> float:
    """Count calls in a second, after two calls to warm up."""

    def call() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        call()
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--critics", type=int, default=1000, help="number of critics")
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64])
    parser.add_argument(
        "--chunk-size", type=int, nargs="+", default=[4000], help="records in a chunk"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each timing")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"\n{format_environment()}\n")
    print_header(
        "channels",
        "critics",
        "chunk size",
        "batched, steps a second",
        "one after another, steps a second",
        "ratio",
    )
    for channels in options.channels:
        critic = Critic(SHAPE, NUM_CLASSES, channels)
        sequential = measure_sequential(critic, device, options.seconds / 2)
        for chunk_size in options.chunk_size:
            batched = measure_batched(critic, options.critics, chunk_size, device, options.seconds)
            print_row(
                channels,
                options.critics,
                chunk_size,
                f"{batched:.0f}",
                f"{sequential:.0f}",
                f"{batched / sequential:.1f}",
            )


if __name__ == "__main__":
    main()
