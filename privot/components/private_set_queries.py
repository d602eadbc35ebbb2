"""The queries of the private set: noisy class means of images and of network features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.components.feature_matching import MatchingRound, compute_unit_features
from privot.components.private_set_nets import build_set_nets, get_block_weights
from privot.components.private_set_settings import PrivateSetSettings, count_queries
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.nets.augment import AugmentParams, list_augmentations, sample_augment_params
from privot.nets.ensemble import Ensemble, FrozenEnsemble
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams

# Share of the norm of a record's vector for the class count, where sizes are not declared.
COUNT_SHARE = 0.1
# Largest norm of an image over the root of its number of pixel values; brighter images are scaled
# down.
MAX_RELATIVE_NORM = 12 / 28
SEED_NAMES = {"pretrained": "seeing"}  # round -> its name in random streams, where it differs


def clip_and_count_image(
    image: Tensor, label: Tensor, max_norm: float, count_share: float
) -> Tensor:
    """Clip an image to a ball, scale it to norm 1 at most, and append a constant that counts it.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sum by class.
        max_norm: Radius of the ball.
        count_share: Share of the norm that goes to the count.

    Returns:
        The vector [num_pixel_values + 1], of norm 1 at most.
    """
    pixels = image.flatten()
    pixels = pixels / pixels.norm().clamp(min=max_norm)
    return torch.cat([pixels * math.sqrt(1 - count_share**2), pixels.new_full((1,), count_share)])


def compute_record_features(
    image: Tensor,
    label: Tensor,
    nets: Ensemble,
    weights: dict[str, Tensor],
    augment_params: AugmentParams,
    center: Tensor,
) -> Tensor:
    """Compute a record's unit features by k networks, of norm 1 together.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sum by class.
        nets: The networks.
        weights: Weights of k networks.
        augment_params: One augmentation of each network.
        center: Centers of the features [k, num_features].

    Returns:
        The features over sqrt(k) [k * num_features].
    """
    features = compute_unit_features(nets, weights, image[None], augment_params, center)[:, 0]
    return (features / math.sqrt(len(center))).flatten()


def query_class_means(gate: Gate, device: torch.device) -> tuple[Tensor, Tensor]:
    """Query noisy class means and, unless they are declared, class sizes.

    Args:
        gate: The gate in front of the records, with a stage "means".
        device: Device of the results.

    Returns:
        Class means [classes, channels, height, width] and class sizes [classes], at least 1.
    """
    spec = gate.spec
    max_norm = MAX_RELATIVE_NORM * math.sqrt(spec.num_features)
    count_share = 0.0 if spec.class_sizes else COUNT_SHARE
    noisy_sum = gate.sum(
        "means", clip_and_count_image, max_norm, count_share, clip_norm=1.0, per_class=True
    )
    class_sizes = (
        noisy_sum[:, -1] / count_share
        if count_share
        else torch.tensor(spec.class_sizes, dtype=torch.float64, device=device)
    )
    class_sizes = class_sizes.clamp(min=1)
    scale = max_norm / math.sqrt(1 - count_share**2)
    means = noisy_sum[:, :-1] * scale / class_sizes[:, None]
    return means.float().view(-1, *spec.shape), class_sizes


def query_features(
    settings: PrivateSetSettings,
    gate: Gate,
    round_name: str,
    nets: Ensemble,
    images: Tensor,
    class_sizes: Tensor,
    streams: Streams,
    progress: Progress,
) -> MatchingRound:
    """Query noisy class means of the networks' unit features, centered by the images so far.

    Args:
        settings: The settings.
        gate: The gate in front of the records.
        round_name: Name of the round, which is that of its stage.
        nets: The networks of the round.
        images: Images of the set so far.
        class_sizes: Class sizes [classes].
        streams: Public random streams and checkpoints.
        progress: Shows the progress.

    Returns:
        The round with its noisy targets.

    Raises:
        ReleaseError: A resumed run has other random networks than the run before.
    """
    spec = gate.spec
    count, budget_share = settings.plan_rounds(spec)[round_name]
    groups = torch.arange(count, device=images.device).tensor_split(count_queries(count))
    augment_params, centers = _prepare_round(spec, round_name, nets, images, groups, streams)
    frozen = FrozenEnsemble(nets)
    targets = []
    for group in groups:
        noisy_sum = gate.sum(
            round_name,
            compute_record_features,
            nets,
            frozen[group % nets.num_nets],
            augment_params.select(group),
            centers[group],
            clip_norm=1.0,
            per_class=True,
        )
        class_means = noisy_sum * math.sqrt(len(group)) / class_sizes[:, None]
        targets.append(class_means.float().view(spec.num_classes, len(group), -1).transpose(0, 1))
        progress(f"querying features of {round_name} networks", sum(map(len, targets)), count)
    return MatchingRound(nets, augment_params, centers, torch.cat(targets), budget_share)


def _prepare_round(
    spec: Spec,
    round_name: str,
    nets: Ensemble,
    images: Tensor,
    groups: tuple[Tensor, ...],
    streams: Streams,
) -> tuple[AugmentParams, Tensor]:
    """Draw the augmentations of a round and compute its centers, or load both from a checkpoint.

    Args:
        spec: Spec of the data.
        round_name: Name of the round.
        nets: The networks of the round.
        images: Images of the set so far.
        groups: Indices of the features in each query.
        streams: Public random streams and checkpoints.

    Returns:
        The augmentations, and the centers [num_features, feature_dim].

    Raises:
        ReleaseError: A resumed run has other random networks than the run before.
    """
    count = sum(map(len, groups))
    seed_name = SEED_NAMES.get(round_name, round_name)
    fresh_params = sample_augment_params(
        count,
        spec.shape[1:],
        streams.make_rng(f"{seed_name} augmentations"),
        list_augmentations(spec.is_flip_invariant),
    ).to(images.device)
    frozen = FrozenEnsemble(nets)

    def compute_centers() -> dict[str, Tensor]:
        with torch.no_grad():
            centers = [
                compute_unit_features(
                    nets, frozen[group % nets.num_nets], images, fresh_params.select(group), None
                ).mean(1)
                for group in groups
            ]
        return {
            "center": torch.cat(centers),
            **fresh_params._asdict(),
            **get_block_weights(nets, 1),
        }

    prepared = streams.compute_once(f"{seed_name} asked", compute_centers)
    for name, value in get_block_weights(nets, 1).items():
        if not torch.equal(value, prepared[name]):
            raise ReleaseError(
                "This version of PyTorch draws other random networks than the version that started "
                "the run. Resume the run with that version."
            )
    augment_params = AugmentParams(*(prepared[name] for name in AugmentParams._fields))
    return augment_params, prepared["center"]


def run_dummy_query(settings: PrivateSetSettings, spec: Spec, streams: Streams) -> None:
    """Run the largest query on as many black images as the gate takes at a time.

    A query that does not fit into memory then fails before anything is charged.

    Args:
        settings: The settings.
        spec: Spec of the data.
        streams: Public random streams.
    """
    device = streams.runtime.torch_device
    num_nets = max(
        -(-plan.num_features // count_queries(plan.num_features))
        for plan in settings.plan_rounds(spec).values()
    )
    nets = build_set_nets(settings, num_nets, spec, streams.make_rng("rehearsal"))
    nets = nets.to(device).requires_grad_(False)
    augment_params = sample_augment_params(
        num_nets,
        spec.shape[1:],
        streams.make_rng("rehearsal"),
        list_augmentations(spec.is_flip_invariant),
    ).to(device)
    query = torch.func.vmap(compute_record_features, in_dims=(0, 0, None, None, None, None))
    query(
        torch.zeros(streams.runtime.chunk_size, *spec.shape, device=device),
        torch.zeros(streams.runtime.chunk_size, device=device),
        nets,
        FrozenEnsemble(nets)[:],
        augment_params,
        torch.zeros(num_nets, nets.num_extracted_features, device=device),
    )
