"""What a generator may know before anybody is asked: nothing, or how characters look when a pen follows printed ones. It is public."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from privot.components.glyphs import ALPHABETS, teach
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.runtime import Progress, Streams, silent

STARTS = ("nothing", "glyphs")
BATCH = 256  # characters in a step of practice


def fits(name: str, start: str, spec: Spec) -> None:
    """Refuse a start that is not known, or that knows nothing of such data: characters are 10 digits, or FEMNIST's 62 in its order.

    >>> fits("federated-gs-wgan", "glyphs", Spec((1, 28, 28), 62))
    >>> fits("federated-gs-wgan", "glyphs", Spec((3, 32, 32), 10))
    Traceback (most recent call last):
    privot.errors.SettingError: federated-gs-wgan.start='glyphs': it draws 10 or 62 classes in grey, and this data is not so; use nothing
    """
    if start not in STARTS:
        raise SettingError(f"{name}.start={start!r}: {' or '.join(STARTS)}")
    if start == "glyphs" and (spec.classes not in ALPHABETS or spec.shape[0] != 1):
        known = " or ".join(map(str, ALPHABETS))
        raise SettingError(
            f"{name}.start='glyphs': it draws {known} classes in grey, and this data is not so; use nothing"
        )


def begun(
    net: Any, start: str, practice: int, spec: Spec, streams: Streams, progress: Progress = silent
) -> nn.Module:
    """A fresh generator as the start leaves it, changed in place: ``practice`` steps on characters. No gate has a part in it.

    ``net`` has a field ``code``, the numbers of its codes. A run that goes on finds what was learned as it was.
    """
    fits("prior", start, spec)
    if start == "nothing" or practice < 1:
        return net
    device = next(net.parameters()).device

    def learned() -> dict[str, Tensor]:
        draws = streams.generator("glyphs", device)
        teach(
            net,
            net.code,
            spec.shape,
            spec.classes,
            practice,
            BATCH,
            draws,
            lambda step, of: progress("learning to write", step, of),
        )
        return {key: value.detach().clone() for key, value in net.state_dict().items()}

    net.load_state_dict(streams.once("prior", learned))
    return net
