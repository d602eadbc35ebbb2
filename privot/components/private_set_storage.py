"""The query results of the private set in a release, from which sets of other sizes can be made."""

from __future__ import annotations

import torch
from torch import Tensor

from privot.components.feature_matching import MatchingRound
from privot.components.private_set_nets import (
    build_random_nets,
    build_set_nets,
    get_block_weights,
)
from privot.components.private_set_settings import PrivateSetSettings
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.nets.augment import AugmentParams
from privot.nets.conv_shapes import ConvNetShapes
from privot.nets.ensemble import Ensemble
from privot.runtime import Streams

MAX_HALF = 6e4  # targets are clamped to the range of half precision
AUGMENT_PARAM_SHAPES = {"affine": (2, 3), "cutout": (4,), "color": (3,)}  # of one augmentation


def export_rounds(means: Tensor, rounds: dict[str, MatchingRound]) -> dict[str, Tensor]:
    """Collect the tensors to store, in half precision.

    Random networks are built again from the seed, so one of them is stored as a check. All other
    networks are stored without their last layer.

    Args:
        means: Noisy class means [classes, channels, height, width].
        rounds: The rounds by name.

    Returns:
        Tensors by name.
    """
    tensors = {"means": means}
    for round_name, matching_round in rounds.items():
        num_nets = 1 if round_name == "random" else matching_round.nets.num_nets
        target = matching_round.target.clamp(-MAX_HALF, MAX_HALF)
        stored = {
            "center": matching_round.center.half(),
            "target": target.half(),
            **matching_round.augment_params._asdict(),
            **{
                name: value.half()
                for name, value in get_block_weights(matching_round.nets, num_nets).items()
            },
        }
        tensors |= {f"{round_name}.{name}": value for name, value in stored.items()}
    return tensors


def restore_rounds(
    settings: PrivateSetSettings, tensors: dict[str, Tensor], spec: Spec, streams: Streams
) -> tuple[Tensor, dict[str, MatchingRound]]:
    """Restore what `export_rounds` collected. All shapes are checked before anything is built.

    Args:
        settings: Settings of the release.
        tensors: Stored tensors by name.
        spec: Spec of the data.
        streams: Public random streams, with the seed of the release.

    Returns:
        The noisy class means and the rounds by name.

    Raises:
        ReleaseError: A tensor is missing, has another shape, or the random networks differ.
    """
    device = streams.runtime.torch_device

    def get_tensor(name: str, *shape: int) -> Tensor:
        value = tensors.get(name)
        if value is None or value.shape != shape:
            raise ReleaseError(
                "The release lacks the query results that a set of another size needs. "
                "Make the release again with keep_answers=true."
            )
        return value.float().to(device)

    means = get_tensor("means", spec.num_classes, *spec.shape)
    net_shapes = ConvNetShapes(
        spec.shape, settings.resolve_setting(spec, "net_width"), settings.net_depth
    )
    rounds = {}
    for round_name, (count, budget_share) in settings.plan_rounds(spec).items():
        augment_params = AugmentParams(
            *(
                get_tensor(f"{round_name}.{name}", count, *shape)
                for name, shape in AUGMENT_PARAM_SHAPES.items()
            )
        )
        num_stored = 1 if round_name == "random" else count // settings.augmentations
        block_weights = {
            name: get_tensor(f"{round_name}.{name}", num_stored, *shape)
            for name, shape in net_shapes.parameter_shapes.items()
        }
        nets = (
            build_random_nets(settings, spec, streams)
            if round_name == "random"
            else build_set_nets(settings, num_stored, spec, torch.Generator())
        )
        nets = nets.to(device).requires_grad_(False)
        num_features = nets.num_extracted_features
        center = get_tensor(f"{round_name}.center", count, num_features)
        target = get_tensor(f"{round_name}.target", count, spec.num_classes, num_features)
        if round_name == "random":
            _require_same_weights(nets, block_weights)
        else:
            _load_weights(nets, block_weights)
        rounds[round_name] = MatchingRound(nets, augment_params, center, target, budget_share)
    return means, rounds


def _require_same_weights(nets: Ensemble, block_weights: dict[str, Tensor]) -> None:
    """Raise an error unless the first network has the stored weights."""
    for name, value in nets.named_parameters():
        if name in block_weights and not torch.equal(value[:1].half().float(), block_weights[name]):
            raise ReleaseError(
                "This version of PyTorch draws other random networks than the version that made "
                "the release. Use that version."
            )


def _load_weights(nets: Ensemble, block_weights: dict[str, Tensor]) -> None:
    """Copy stored weights into networks whose parameters need no gradient."""
    for name, value in nets.named_parameters():
        if name in block_weights:
            value.copy_(block_weights[name])
