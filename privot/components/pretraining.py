"""Public pretraining of a generator before the first query: none, or on synthetic characters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from privot.components.glyphs import ALPHABETS, pretrain_on_glyphs
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.runtime import Progress, Streams, ignore_progress

PRETRAIN_SOURCES = ("off", "glyphs")
PRETRAIN_BATCH_SIZE = 256  # characters in a step


def validate_pretrain(method_name: str, pretrain: str, spec: Spec) -> None:
    """Raise an error if the pretraining is unknown or does not fit the data.

    Args:
        method_name: Name of the method, for the error message.
        pretrain: "off" or "glyphs".
        spec: Spec of the data.

    Raises:
        SettingError: The value is unknown, or the data is not 10 or 62 classes in gray.

    >>> validate_pretrain("federated-gs-wgan", "glyphs", Spec((1, 28, 28), 62))
    >>> validate_pretrain("federated-gs-wgan", "glyphs", Spec((3, 32, 32), 10))
    Traceback (most recent call last):
    privot.errors.SettingError: federated-gs-wgan.pretrain='glyphs' needs gray images of ...
    """
    if pretrain not in PRETRAIN_SOURCES:
        raise SettingError(
            f"{method_name}.pretrain={pretrain!r} is unknown. "
            f"Choose {' or '.join(PRETRAIN_SOURCES)}."
        )
    if pretrain == "glyphs" and (spec.num_classes not in ALPHABETS or spec.shape[0] != 1):
        raise SettingError(
            f"{method_name}.pretrain='glyphs' needs gray images of "
            f"{' or '.join(map(str, ALPHABETS))} classes. Set {method_name}.pretrain=off."
        )


def pretrain_generator(
    net: Any,
    pretrain: str,
    pretrain_steps: int,
    spec: Spec,
    streams: Streams,
    progress: Progress = ignore_progress,
) -> nn.Module:
    """Pretrain a fresh generator in place on public synthetic images. No gate is involved.

    A resumed run loads the pretrained weights from its checkpoint.

    Args:
        net: The generator, with its `latent_dim`.
        pretrain: "off" or "glyphs".
        pretrain_steps: Number of training steps.
        spec: Spec of the data.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.

    Returns:
        The same generator.
    """
    validate_pretrain("prior", pretrain, spec)
    if pretrain == "off" or pretrain_steps < 1:
        return net
    device = next(net.parameters()).device

    def train() -> dict[str, Tensor]:
        pretrain_on_glyphs(
            net,
            net.latent_dim,
            spec.shape,
            spec.num_classes,
            pretrain_steps,
            PRETRAIN_BATCH_SIZE,
            streams.make_rng("glyphs", device),
            lambda step, steps: progress("pretraining the generator on characters", step, steps),
        )
        return {key: value.detach().clone() for key, value in net.state_dict().items()}

    net.load_state_dict(streams.compute_once("prior", train))
    return net
