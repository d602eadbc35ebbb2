"""What surrounds a method: where it computes, its public randomness, and who watches. Nothing here may change a privacy claim."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from privot.errors import ReleaseError, SettingError
from privot.io import put
from privot.progress import Progress, silent
from privot.runtime.process_group import Alone, place

STORED = 20  # times in a run that the state of a long stage is kept: a crash then loses little of what was paid for
CHEAP = 1.0  # seconds: what takes less is done each time
PATIENCE = 9  # times as long as the last keeping took the work goes on before the next: the states of a thousand critics are gigabytes

LARGEST_PORTION = 2**20  # records at a time of which a float64 sum is exact, by a wide margin

__all__ = ["Progress", "Runtime", "Streams", "silent", "threads"]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads; None leaves their number as it is.

    Small nets gain nothing from a second thread: it spins between operations that take microseconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Runtime:
    """Where and in what portions to compute. No field of it changes a plan, an event or the law of an answer."""

    device: str = "auto"
    microbatch: int | None = None  # records at a time; None: 1000, or 4000 on a GPU
    compile: bool | None = (
        None  # lessons of shards as CUDA graphs (`privot.runtime.graph_cache`); None: on a GPU
    )

    def __post_init__(self) -> None:
        if self.microbatch is not None and not 1 <= self.microbatch <= LARGEST_PORTION:
            raise SettingError(
                f"microbatch={self.microbatch}: a number from 1 to {LARGEST_PORTION} is needed"
            )
        if ":" in self.device and place()[1] > 1:
            raise SettingError(
                f"device={self.device!r}: torchrun gives each process a GPU of its own; use auto, cuda or cpu"
            )
        if self.device != "auto":
            try:
                if torch.empty(1, device=self.device).device.type not in ("cpu", "cuda"):
                    raise RuntimeError
            except (RuntimeError, AssertionError):
                raise SettingError(
                    f"device={self.device!r} is not there: use auto or cpu, or a GPU that this machine has"
                ) from None
        if self.target.index is not None and self.target.type == "cuda":
            if self.target.index >= torch.cuda.device_count():
                raise SettingError(
                    f"{self.target} is not there: start as many processes on a machine as it has GPUs, or use --device cpu"
                )
            torch.cuda.set_device(self.target)  # graphs and fused steps run on the current one

    @property
    def target(self) -> torch.device:
        name = (
            self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        _, count, local = place()
        return torch.device(
            f"cuda:{local}" if name == "cuda" and count > 1 else name
        )  # a GPU for each process that torchrun started

    @property
    def replays(self) -> bool:
        """Whether lessons are written down and repeated."""
        return self.target.type == "cuda" if self.compile is None else self.compile

    @property
    def portion(self) -> int:
        """Records at a time."""
        return self.microbatch or (4000 if self.target.type == "cuda" else 1000)


@dataclass(frozen=True)
class Streams:
    """The public random stream: seeded, recorded in the manifest, so that the public half of a run replays exactly."""

    seed: int
    runtime: Runtime = field(default_factory=Runtime)
    folder: Path | None = None  # of an unfinished run, on the public side
    aside: Tensor | None = field(
        default=None, compare=False, repr=False
    )  # images of public data that a setting names, [count, ...]
    ranks: Alone = field(
        default_factory=Alone
    )  # in all but the first of several processes there is no folder: they hear what it held
    _pace: _Pace = field(default_factory=lambda: _Pace(), init=False, compare=False, repr=False)

    def generator(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """An independent generator for a named purpose.

        By a digest of seed and name, since a CPU's generator looks at 32 bits of its seed alone.
        """
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def once(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What ``make`` gives, kept with the unfinished run: when it goes on, this is as it was; a GPU would not repeat it to the bit.

        A later query may depend on it, so the answers kept by the gate belong to these very tensors.

        >>> Streams(0).once("start", lambda: {"x": torch.zeros(2)})
        {'x': tensor([0., 0.])}
        """
        if (found := self.stored(name)) is None:
            self.store(name, found := make())
        return found

    def due(self, step: int, of: int) -> bool:
        """Whether a long stage should keep where it has come to, after this step (the first is 0): about 20 times a run.

        Less often where keeping takes long, so that no more than a tenth of the time goes into it. To be asked once a step.
        """
        patient = self._pace.passed(time.monotonic())
        if (step + 1) % max(1, of // STORED):
            return False
        self._pace.keeping = bool(
            self.ranks.told(torch.tensor(patient))[0]
        )  # by the clock of the first process: all must agree
        return self._pace.keeping

    def store(self, name: str, state: dict[str, Tensor]) -> None:
        """Keep where a long stage has come to, in the place of what was kept under this name; all of it is public."""
        if self.folder is None:
            return
        old = self._files(name)
        raw = save({key: value.detach().cpu().contiguous() for key, value in state.items()})
        put(
            new := self.folder
            / f"{self._begin(name)}{hashlib.sha256(raw).hexdigest()[:16]}.safetensors",
            raw,
        )
        for file in old:
            if file != new:
                file.unlink()

    def stored(self, name: str) -> dict[str, Tensor] | None:
        """What `store` kept last, if anything."""
        found = self.ranks.shared(self._stored(name))
        return found and {key: value.to(self.runtime.target) for key, value in found.items()}

    def _stored(self, name: str) -> dict[str, Tensor] | None:
        if not (files := self._files(name)):
            return None
        raw = (
            file := max(files, key=lambda each: each.stat().st_mtime_ns)
        ).read_bytes()  # two lie there if a crash came between
        if (
            hashlib.sha256(raw).hexdigest()[:16]
            != file.name[len(self._begin(name)) : -len(".safetensors")]
        ):  # its name tells its digest
            raise ReleaseError(
                f"{file}: this part of an unfinished run was altered; start anew, at a new charge"
            )
        return load(raw)

    def show(self, images: Tensor, columns: int) -> None:
        """A picture of what is drawn so far, in ``samples.png`` beside the unfinished run; the images are public."""
        if self.folder is not None:
            from privot.release.export import picture

            picture(images.detach(), columns).save(part := self.folder / "samples.part.png")
            part.replace(self.folder / "samples.png")

    def _begin(self, name: str) -> str:
        return f"{name.replace(' ', '-')}.public."

    def _files(self, name: str) -> list[Path]:
        return list(self.folder.glob(f"{self._begin(name)}*.safetensors")) if self.folder else []


@dataclass
class _Pace:
    """How long keeping takes, by the clock: what a step with it takes beyond one without."""

    last: float | None = None  # when it was asked for the last time
    usual: float | None = None  # seconds from one question to the next
    took: float = 0.0
    ended: float = -math.inf
    keeping: bool = False

    def passed(self, now: float) -> bool:
        """A step has passed. Whether the work since the last keeping has been long enough for another."""
        if self.last is not None:
            between = now - self.last
            if not self.keeping:
                self.usual = between
            elif self.usual is not None:
                self.took = between - self.usual
                self.ended = now
        self.last = now
        self.keeping = False
        return self.took < CHEAP or now - self.ended >= PATIENCE * self.took
