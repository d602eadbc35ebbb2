"""What surrounds a method: where it computes, its public randomness, and who watches. Nothing here may change a privacy claim."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from privot.errors import SettingError
from privot.show import Progress, silent

__all__ = ["Progress", "Runtime", "Streams", "silent"]


@dataclass(frozen=True)
class Runtime:
    """Where and in what portions to compute. No field of it changes a plan, an event or the law of an answer."""

    device: str = "auto"
    microbatch: int = 1000

    def __post_init__(self) -> None:
        if self.microbatch < 1:
            raise SettingError(f"microbatch={self.microbatch}: at least 1 is needed")
        if self.device != "auto":
            try:
                if torch.empty(1, device=self.device).device.type not in ("cpu", "cuda"):
                    raise RuntimeError
            except (RuntimeError, AssertionError):
                raise SettingError(f"device={self.device!r} is not there: use auto, cpu or cuda") from None

    @property
    def target(self) -> torch.device:
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)


@dataclass(frozen=True)
class Streams:
    """The public random stream: seeded, recorded in the manifest, so that the public half of a run replays exactly."""

    seed: int
    runtime: Runtime = field(default_factory=Runtime)

    def generator(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """An independent generator for a named purpose."""
        offset = int.from_bytes(name.encode()[:8].ljust(8, b"\0"), "little")
        return torch.Generator(device).manual_seed((self.seed * 1_000_003 + offset) % 2**63)
