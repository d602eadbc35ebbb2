"""The cost forecast of the private set: operations, and the predicted signal-to-noise ratio."""

from __future__ import annotations

import math
from typing import Any

from privot.components.private_set_nets import (
    NUM_SYNTHETIC_CLASSES,
    PRETRAIN_BATCH_SIZE,
    SYNTHETIC_PER_CLASS,
    TRAIN_BATCH_SIZE,
)
from privot.components.private_set_settings import PrivateSetSettings
from privot.data.spec import Spec
from privot.nets.conv_shapes import ConvNetShapes
from privot.privacy.plan import Neighbours, Plan

CALLS_PER_STEP = 500  # calls of tensor operators in a step of the images or of the networks
SYNTHESIS_PASSES = 200  # passes over the pixels of a synthetic image while it is generated
# Passes over the feature maps of an image in a pass through a network.
MAP_PASSES = 2.5
TEXTURED_MAP_PASSES = 5.0
# Typical norm of a class's mean unit feature (.27 to .40), and directions that take up noise, for
# each pixel of a map. On digits wider networks are no worse at the same epsilon, and the accuracy
# falls to 0.6 where these predict a ratio of 1.
FEATURE_SIGNAL_NORM = 0.3
NUM_NOISE_DIRECTIONS = 16


def forecast_private_set(settings: PrivateSetSettings, spec: Spec, plan: Plan) -> dict[str, Any]:
    """Forecast the operations of a run and the quality of its query results.

    Args:
        settings: The settings.
        spec: Spec of the data.
        plan: The plan, with its final noise.

    Returns:
        The forecast, see `privot.methods.Method.forecast`.
    """
    net_shapes = ConvNetShapes(
        spec.shape, settings.resolve_setting(spec, "net_width"), settings.net_depth
    )
    rounds = settings.plan_rounds(spec)
    shares = settings.get_budget_shares(spec)
    num_trained_rounds = len(shares) - 3
    is_pretrained = bool(shares[2])
    num_images = spec.num_classes * settings.images_per_class
    steps = settings.resolve_setting(spec, "steps") * (num_trained_rounds + 1) * len(rounds)
    train_epochs = settings.resolve_setting(spec, "net_train_epochs")
    num_synthetic = NUM_SYNTHETIC_CLASSES * SYNTHETIC_PER_CLASS * is_pretrained
    # Passes of one image through one network: forward in queries, forward and backward in
    # optimization and training.
    query_passes = (spec.size or 0) * sum(plan.num_features for plan in rounds.values())
    optimization_passes = num_images * settings.nets_per_step * steps
    training_passes = (
        num_images
        * settings.resolve_setting(spec, "nets_per_round")
        * train_epochs
        * num_trained_rounds
        + num_synthetic * settings.pretrain_epochs * settings.num_pretrained_nets
    )
    passes = query_passes + 3 * (optimization_passes + training_passes)
    map_passes = TEXTURED_MAP_PASSES if settings.resolve_texture_norm(spec) else MAP_PASSES
    batches = (
        num_trained_rounds * train_epochs * math.ceil(num_images / TRAIN_BATCH_SIZE)
        + num_synthetic * settings.pretrain_epochs // PRETRAIN_BATCH_SIZE
    )
    synthesis_operations = SYNTHESIS_PASSES * num_synthetic * spec.num_features
    return {
        "images": num_images,
        "signal_to_noise_per_class": _predict_signal_to_noise(spec, plan, net_shapes),
        "floating_point_operations": net_shapes.flops * passes,
        "elementwise_operations": passes * map_passes * net_shapes.num_activations
        + synthesis_operations,
        "operator_calls": CALLS_PER_STEP * (steps + batches),
    }


def _predict_signal_to_noise(spec: Spec, plan: Plan, net_shapes: ConvNetShapes) -> float | None:
    """Predict the norm of the smallest class's feature sum over the noise in its directions.

    Args:
        spec: Spec of the data.
        plan: The plan.
        net_shapes: Shapes of the networks.

    Returns:
        The ratio, or None without noise or without declared sizes.
    """
    if spec.class_sizes:
        smallest_class: float | None = min(spec.class_sizes)
    else:
        smallest_class = spec.size / spec.num_classes if spec.size else None
    # All rounds together are one Gaussian. This is its noise along one direction of the features,
    # in unit vectors of a class's sum.
    noise_multiplier = (
        1 / math.sqrt(sum(stage.steps / stage.noise_multiplier**2 for stage in plan.stages))
        if all(stage.noise_multiplier for stage in plan.stages)
        else 0
    )
    noise_std = noise_multiplier * (2 if plan.neighbours is Neighbours.REPLACE else 1)
    num_directions = (
        NUM_NOISE_DIRECTIONS * net_shapes.num_features / net_shapes.width
        if net_shapes.num_blocks
        else net_shapes.num_features
    )
    if not smallest_class or not noise_std:
        return None
    return FEATURE_SIGNAL_NORM * smallest_class / (noise_std * math.sqrt(num_directions))
