"""The random, pretrained and trained networks of the private set.

Pretraining uses synthetic images, training uses the set so far. Everything here is public.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privot.components.dead_leaves import generate_dead_leaves
from privot.components.private_set_settings import PrivateSetSettings
from privot.data.spec import Spec
from privot.nets.augment import list_augmentations
from privot.nets.ensemble import Ensemble
from privot.nets.recipe import Recipe
from privot.nets.training import train_ensemble
from privot.runtime import Progress, Streams

# Synthetic classes of the pretraining, and images of each.
NUM_SYNTHETIC_CLASSES = 100
SYNTHETIC_PER_CLASS = 200
PRETRAIN_BATCH_SIZE = 200
TRAIN_BATCH_SIZE = 256
HEAD_PARAMETERS = ("head_weight", "head_bias")  # of the last layer


def build_set_nets(
    settings: PrivateSetSettings,
    num_nets: int,
    spec: Spec,
    rng: torch.Generator,
    classes: int | None = None,
) -> Ensemble:
    """Build networks with random weights.

    Args:
        settings: The settings.
        num_nets: Number of networks.
        spec: Spec of the data.
        rng: Random generator on the CPU.
        classes: Number of classes. None: that of the data.

    Returns:
        The networks.
    """
    return Ensemble(
        num_nets,
        spec.shape,
        classes or spec.num_classes,
        settings.resolve_setting(spec, "net_width"),
        settings.net_depth,
        texture_norm=settings.resolve_texture_norm(spec),
        generator=rng,
    )


def build_random_nets(settings: PrivateSetSettings, spec: Spec, streams: Streams) -> Ensemble:
    """Build the networks of the round "random", the same for the same seed.

    Args:
        settings: The settings.
        spec: Spec of the data.
        streams: Public random streams.

    Returns:
        The networks.
    """
    num_nets = settings.resolve_setting(spec, "num_random_nets")
    return build_set_nets(settings, num_nets, spec, streams.make_rng("random"))


def pretrain_nets(
    settings: PrivateSetSettings, spec: Spec, streams: Streams, progress: Progress
) -> Ensemble:
    """Train networks to classify synthetic images. No record is involved.

    Args:
        settings: The settings.
        spec: Spec of the data.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.

    Returns:
        The networks.
    """
    device = streams.runtime.torch_device
    nets = build_set_nets(
        settings,
        settings.num_pretrained_nets,
        spec,
        streams.make_rng("seeing"),
        NUM_SYNTHETIC_CLASSES,
    ).to(device)
    epochs = settings.pretrain_epochs
    recipe = Recipe(
        epochs,
        0.02,
        batch_size=PRETRAIN_BATCH_SIZE,
        weight_decay=5e-4,
        lr_milestones=(epochs // 2, epochs * 4 // 5),
        half_precision=True,
        augmentations=list_augmentations(spec.is_flip_invariant),
    )

    def pretrain() -> dict[str, Tensor]:
        images, labels = generate_dead_leaves(
            NUM_SYNTHETIC_CLASSES,
            SYNTHETIC_PER_CLASS,
            spec.shape,
            streams.make_rng("scenes"),
            device,
        )
        train_ensemble(
            nets,
            images,
            labels,
            recipe,
            streams.make_rng("looking"),
            progress=progress,
            stage="pretraining networks on synthetic images",
        )
        return nets.state_dict()

    nets.load_state_dict(streams.compute_once("seeing", pretrain))
    return nets


def train_nets_on_set(
    settings: PrivateSetSettings,
    images: Tensor,
    labels: Tensor,
    pretrained_nets: Ensemble | None,
    spec: Spec,
    streams: Streams,
    round_name: str,
    progress: Progress,
) -> Ensemble:
    """Train networks on the set so far.

    Args:
        settings: The settings.
        images: Images of the set [count, channels, height, width].
        labels: Their labels [count].
        pretrained_nets: Networks whose blocks are the initial ones, or None for random blocks.
        spec: Spec of the data.
        streams: Public random streams and checkpoints.
        round_name: Name of the round, which fixes the random numbers.
        progress: Shows the progress.

    Returns:
        The networks.
    """
    nets = build_set_nets(
        settings,
        settings.resolve_setting(spec, "nets_per_round"),
        spec,
        streams.make_rng(f"{round_name} nets"),
    ).to(images.device)
    if pretrained_nets is not None:
        nets.copy_blocks_from(pretrained_nets)
    epochs = settings.resolve_setting(spec, "net_train_epochs")
    training_rng = streams.make_rng(f"{round_name} lessons")
    recipe = Recipe(
        epochs,
        0.01,
        batch_size=TRAIN_BATCH_SIZE,
        weight_decay=5e-4,
        lr_milestones=(epochs // 2,),
        half_precision=True,
        even_batches=True,
        augmentations=list_augmentations(spec.is_flip_invariant),
    )

    def train() -> dict[str, Tensor]:
        train_ensemble(
            nets,
            images,
            labels,
            recipe,
            training_rng,
            progress=progress,
            stage=f"training the networks of {round_name}",
        )
        return nets.state_dict()

    nets.load_state_dict(streams.compute_once(round_name, train))
    return nets


def get_block_weights(nets: Ensemble, num_nets: int) -> dict[str, Tensor]:
    """Return the weights of the first networks' blocks, all but those of the last layer."""
    return {
        name: value.detach()[:num_nets]
        for name, value in nets.named_parameters()
        if name not in HEAD_PARAMETERS
    }
