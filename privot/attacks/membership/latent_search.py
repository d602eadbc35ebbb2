"""Search of a generator's latents: which latent reproduces a given image best?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from privot.errors import ReleaseError, SettingError
from privot.measures.nearest import search_nearest_neighbours
from privot.nets.conv_block import autocast_half
from privot.runtime.cuda_graphs import GraphedStep

NUM_INITIAL_LATENTS = 1000  # latents of each class; a search starts from the best of them
SEARCHES_PER_BATCH = 512
GENERATOR_BATCH_SIZE = 4096  # images that a generator makes at a time
# The evolution strategy: a step size that stays the same if a fifth of the rounds succeed.
INITIAL_STEP = 0.5
GROWTH_ON_SUCCESS = math.exp(0.4)
SHRINKAGE_ON_FAILURE = math.exp(-0.1)


@torch.no_grad()
def evolve_latents(
    generator: Any,
    targets: Tensor,
    labels: Tensor,
    latents: Tensor,
    num_rounds: int,
    num_children: int,
    rng: torch.Generator,
) -> Tensor:
    """Search latents by a (1 + children) evolution strategy, one for each target.

    The step size grows when a child is better and shrinks when none is.

    Args:
        generator: The net.
        targets: Images to reproduce, [count, channels, height, width].
        labels: Their classes, [count].
        latents: Initial latents, [count, latent_dim].
        num_rounds: Rounds of the strategy.
        num_children: Children of each round.
        rng: Source of randomness, on the device of the net.

    Returns:
        Smallest squared errors, [count].
    """
    best = compute_squared_error(generate_images(generator, latents, labels), targets)
    step = torch.full_like(best, INITIAL_STEP)
    shape = (len(labels), num_children, generator.latent_dim)
    for _ in range(num_rounds):
        noise = torch.randn(shape, generator=rng, device=latents.device)
        children = latents[:, None] + step[:, None, None] * noise
        images = generate_images(
            generator, children.flatten(0, 1), labels.repeat_interleave(num_children)
        )
        errors = compute_squared_error(images, targets.repeat_interleave(num_children, 0))
        error, child_index = errors.view(-1, num_children).min(1)
        is_better = error < best
        gather_index = child_index[:, None, None].expand(-1, 1, generator.latent_dim)
        best_child = children.gather(1, gather_index)[:, 0]
        latents = torch.where(is_better[:, None], best_child, latents)
        best = torch.where(is_better, error, best)
        step = step * torch.where(is_better, GROWTH_ON_SUCCESS, SHRINKAGE_ON_FAILURE).to(step)
    return best


def optimize_latents(
    generator: Any,
    initial_latents: Tensor,
    labels: Tensor,
    compute_distance: Callable[[Tensor], Tensor],
    steps: int,
    learning_rate: float,
    latent_penalty: float,
) -> Tensor:
    """Run Adam on the latents; on a GPU one step is one CUDA graph.

    Args:
        generator: The net.
        initial_latents: Latents, [searches, latent_dim].
        labels: Classes, [searches].
        compute_distance: Gives the distance [searches] of images [searches, ...].
        steps: Steps of Adam.
        learning_rate: Initial learning rate.
        latent_penalty: Initial weight of the penalty.

    Returns:
        Latents, [searches, latent_dim].
    """
    latents = initial_latents.clone().requires_grad_()
    decay = torch.ones((), device=initial_latents.device)
    on_gpu = initial_latents.is_cuda
    adam = torch.optim.Adam([latents], lr=learning_rate * decay, capturable=on_gpu, fused=on_gpu)

    def take_step() -> None:
        adam.zero_grad(set_to_none=True)
        with autocast_half(latents.device):
            distances = compute_distance(generator(latents, labels))
        penalties = latent_penalty * decay * (latents.square().mean(1) - 1).square()
        # In a sum over searches, each search has the gradient that it would have alone.
        (distances + penalties).sum().backward()
        adam.step()

    graphed_step = GraphedStep(take_step, latents.device)
    for step in range(steps):
        decay.fill_(0.5 * (1 + math.cos(math.pi * step / steps)))
        adam.param_groups[0]["lr"].copy_(learning_rate * decay)
        graphed_step()
    return latents.detach()


def iterate_batches(
    generator: Any,
    candidates: Tensor,
    labels: Tensor,
    num_starts: int,
    seed: int,
    device: torch.device | str,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Divide the candidates into batches and find the latents that their searches start from.

    Args:
        generator: The net.
        candidates: Candidates, [candidates, channels, height, width].
        labels: Their classes, [candidates].
        num_starts: Searches of each candidate.
        seed: Seed of the initial latents.
        device: Where the net is.

    Yields:
        Candidates, their labels, and latents [candidates * num_starts, latent_dim].
    """
    if len(candidates) != len(labels) or not len(labels):
        raise SettingError(
            f"{len(candidates)} candidates and {len(labels)} labels: give one label for each "
            "candidate, and at least one candidate"
        )
    rng = torch.Generator(device).manual_seed(seed)
    latents = torch.randn(NUM_INITIAL_LATENTS, generator.latent_dim, generator=rng, device=device)
    images_by_label = {
        int(label): generate_images(
            generator, latents, torch.full((NUM_INITIAL_LATENTS,), int(label), device=device)
        )
        for label in labels.unique()
    }
    if not all(images.isfinite().all() for images in images_by_label.values()):
        raise ReleaseError(
            "the generator gives values that are not finite, so it cannot be searched. Train it "
            "again at a lower learning rate."
        )
    batch_size = max(1, SEARCHES_PER_BATCH // num_starts)
    for batch, batch_labels in zip(
        candidates.split(batch_size), labels.split(batch_size), strict=True
    ):
        batch = batch.to(device).float()
        batch_labels = batch_labels.to(device)
        starts = torch.zeros(len(batch_labels), num_starts, generator.latent_dim, device=device)
        for label in batch_labels.unique():
            is_label = batch_labels == label
            nearest = search_nearest_neighbours(
                batch[is_label], images_by_label[int(label)], num_starts
            )
            starts[is_label] = latents[nearest.indices.to(device)]
        yield batch, batch_labels, starts.flatten(0, 1)


@torch.no_grad()
def generate_images(generator: Any, latents: Tensor, labels: Tensor) -> Tensor:
    """Generate an image for each latent, in batches.

    Args:
        generator: The net.
        latents: Latents, [count, latent_dim].
        labels: Classes, [count].

    Returns:
        Images, [count, channels, height, width].
    """
    batches = zip(
        latents.split(GENERATOR_BATCH_SIZE), labels.split(GENERATOR_BATCH_SIZE), strict=True
    )
    return torch.cat([generator(*batch) for batch in batches])


def compute_squared_error(images: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean squared error over pixels in [-1, 1]: [count]."""
    return 4 * (images - targets).flatten(1).square().mean(1)
