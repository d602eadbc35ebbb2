r"""GAN-Leaks (Chen et al. 2020): how well can a generator reproduce a candidate?

    full black box     R(x) = the nearest of some images that the generator gave
    partial black box  R(x) = G(z), z by an evolution strategy that only queries G for images
    white box          R(x) = G(z), z by the gradient of
                       |x - G(z)|^2 + w * LPIPS(x, G(z)) + penalty * (|z|^2 / latent_dim - 1)^2

The squared distance is the mean over pixels in [-1, 1], as in the paper. A score is minus the
distance of R(x). It can be calibrated by reference generators that were not trained on the
candidate (`calibrate_scores`). A generator is an `Artifact`, or a net (latents, labels) -> images
with an attribute ``latent_dim``, which is moved to the device and frozen. The attacker knows the
candidates' labels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from privot.attacks.membership.latent_search import (
    compute_squared_error,
    evolve_latents,
    iterate_batches,
    optimize_latents,
)
from privot.attacks.membership.nearest import score_nearest_distance
from privot.errors import DataError, SettingError
from privot.measures.image_similarity import find_lpips_weights
from privot.measures.nearest import (
    EmbeddingFunction,
    build_lpips_embedding,
)
from privot.progress import Progress, ignore_progress
from privot.release.artifact import Artifact

# The paper's weights of LPIPS and of the penalty on the norm of the latent.
LPIPS_WEIGHT = 0.2
LATENT_PENALTY = 0.001


def score_full_black_box(
    candidates: Tensor,
    generated: Tensor,
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
) -> np.ndarray:
    """Score each candidate by minus the L2 distance to the nearest generated image.

    Args:
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        generated: Generated images, [generated, channels, height, width] in [0, 1].
        labels: Classes of the candidates. With labels, only images of the candidate's class count.
        released_labels: Classes of the generated images.

    Returns:
        Scores, float64 [candidates].

    >>> score_full_black_box(torch.zeros(1, 1, 2, 2), torch.ones(3, 1, 2, 2)).tolist()
    [-2.0]
    """
    return score_nearest_distance(
        candidates, generated, "pixels", labels=labels, released_labels=released_labels
    )


def score_partial_black_box(
    generator: Artifact | nn.Module,
    candidates: Tensor,
    labels: Tensor,
    *,
    num_rounds: int = 200,
    num_children: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = ignore_progress,
) -> np.ndarray:
    """Score each candidate by a (1 + children) evolution strategy on the latent.

    A search starts from the best of 1000 random latents (`latent_search`). No gradient is used. The
    generator makes 1000 images a class and num_rounds * num_children images a candidate.

    Args:
        generator: The generator.
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        labels: Their classes, [candidates].
        num_rounds: Rounds of the strategy.
        num_children: Children of each round.
        seed: Seed of the search.
        device: Where the generator runs.
        progress: Called with the number of searched candidates.

    Returns:
        Scores, float64 [candidates].

    Raises:
        SettingError: If the release is a set, or candidates and labels do not fit together.
        ReleaseError: If the generator gives values that are not finite.
    """
    net = _prepare_generator(generator, device)
    rng = torch.Generator(device).manual_seed(seed)
    scores: list[Tensor] = []
    for targets, batch_labels, latents in iterate_batches(net, candidates, labels, 1, seed, device):
        progress("searching latents", sum(map(len, scores)), len(labels))
        errors = evolve_latents(net, targets, batch_labels, latents, num_rounds, num_children, rng)
        scores.append(-errors.double().cpu())
    progress("searching latents", len(labels), len(labels))
    return torch.cat(scores).numpy()


def score_white_box(
    generator: Artifact | nn.Module,
    candidates: Tensor,
    labels: Tensor,
    *,
    steps: int = 200,
    restarts: int = 3,
    learning_rate: float = 0.05,
    lpips_weight: float | None = None,
    latent_penalty: float = LATENT_PENALTY,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = ignore_progress,
) -> np.ndarray:
    """Score each candidate by Adam on the latent; the best of several restarts counts.

    The restarts begin at the nearest of 1000 generated images. The learning rate
    and the penalty decay to 0 by a cosine: the penalty guides the search and is not part of the
    score. On a GPU, the search is in half precision and the score is not.

    Args:
        generator: The generator.
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        labels: Their classes, [candidates].
        steps: Steps of Adam.
        restarts: Searches of each candidate.
        learning_rate: Initial learning rate.
        lpips_weight: Weight of LPIPS. None: 0.2 if its weights are available, otherwise 0.
        latent_penalty: Initial weight of the penalty on the norm of the latent.
        seed: Seed of the initial latents.
        device: Where the generator runs.
        progress: Called with the number of searched candidates.

    Returns:
        Scores, float64 [candidates].

    Raises:
        SettingError: If the release is a set, or candidates and labels do not fit together.
        ReleaseError: If the generator gives values that are not finite.
    """
    net = _prepare_generator(generator, device)
    weight = _resolve_lpips_weight(lpips_weight)
    embed = build_lpips_embedding(torch.device(device)) if weight else None
    scores: list[Tensor] = []
    for batch, batch_labels, initial_latents in iterate_batches(
        net, candidates, labels, restarts, seed, device
    ):
        progress("searching latents", sum(map(len, scores)), len(labels))
        targets = batch.repeat_interleave(restarts, 0)
        target_labels = batch_labels.repeat_interleave(restarts)
        with torch.no_grad():
            target_embeddings = embed(targets) if embed else None
        compute_distance = partial(
            _compute_distance,
            targets=targets,
            embed=embed,
            target_embeddings=target_embeddings,
            lpips_weight=weight,
        )
        latents = optimize_latents(
            net,
            initial_latents,
            target_labels,
            compute_distance,
            steps,
            learning_rate,
            latent_penalty,
        )
        with torch.no_grad():
            distances = compute_distance(net(latents, target_labels)).view(-1, restarts)
            scores.append(-distances.min(1).values.double().cpu())
    progress("searching latents", len(labels), len(labels))
    return torch.cat(scores).numpy()


def _resolve_lpips_weight(lpips_weight: float | None) -> float:
    """Give the weight of LPIPS, 0 if none is set and LPIPS is not available."""
    if lpips_weight is not None:
        return lpips_weight
    try:
        find_lpips_weights()
    except DataError:
        return 0.0
    return LPIPS_WEIGHT


def _prepare_generator(generator: Artifact | nn.Module, device: torch.device | str) -> Any:
    """Build a generator if necessary, move it to the device and freeze it."""
    net: Any = generator
    if isinstance(generator, Artifact):
        if generator.kind != "generator":
            raise SettingError("the release is a set. Attack it with nearest-pixels or tracing.")
        net = generator.build_generator()
        net.to(memory_format=torch.channels_last)  # the layout that tensor cores need
    return net.to(device).eval().requires_grad_(False)


def _compute_distance(
    images: Tensor,
    targets: Tensor,
    embed: EmbeddingFunction | None,
    target_embeddings: Tensor | None,
    lpips_weight: float,
) -> Tensor:
    """Compute the distance between images and targets, with LPIPS if there is an embedding.

    Args:
        images: Generated images, [count, channels, height, width].
        targets: Candidates, of the same shape.
        embed: The embedding of LPIPS.
        target_embeddings: Embedded targets.
        lpips_weight: Weight of LPIPS.

    Returns:
        Distances, [count].
    """
    squared_error = compute_squared_error(images, targets)
    if embed is None or target_embeddings is None:
        return squared_error
    return squared_error + lpips_weight * (embed(images) - target_embeddings).square().sum(1)
