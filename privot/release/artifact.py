"""What a method made, and how to sample from it. All of it is public; nothing here knows of privacy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.nets import NETS
from privot.progress import Progress, silent

KEPT = "kept."
MOST = 10_000_000  # samples at a time
PORTION = 1000  # of them that a generator draws in one go
TOLERANCE = 1e-3  # of the sum of an image's soft labels: float32 and a softmax in half precision stay well within


@dataclass(frozen=True)
class Product:
    """What a method made: a generator (a net by name, its arguments and weights) or a set (images, labels, perhaps soft labels)."""

    kind: str
    tensors: dict[str, Tensor]
    net: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # what the method says of its own work, for the manifest; plain data

    @classmethod
    def generator(
        cls,
        name: str,
        arguments: dict[str, Any],
        net: nn.Module,
        facts: dict[str, Any] | None = None,
    ) -> Product:
        tensors = {
            key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()
        }
        return cls("generator", tensors, name, arguments, facts or {})

    @classmethod
    def set(
        cls,
        images: Tensor,
        labels: Tensor,
        soft: Tensor | None = None,
        kept: dict[str, Tensor] | None = None,
    ) -> Product:
        """``images`` float in [0, 1], [count, channels, height, width]; ``labels`` [count]; ``soft`` probabilities [count, classes].

        ``kept`` is what the method needs to make a set of another size later: answers and what came of them, all public.
        """
        made = {
            "images": images.float(),
            "labels": labels.long(),
            **({} if soft is None else {"soft": soft.float()}),
        }
        made |= {KEPT + name: value for name, value in (kept or {}).items()}
        return cls("set", {key: value.detach().cpu().contiguous() for key, value in made.items()})

    @property
    def kept(self) -> dict[str, Tensor]:
        """What the method kept for later, by its own names."""
        return {
            name.removeprefix(KEPT): value
            for name, value in self.tensors.items()
            if name.startswith(KEPT)
        }

    def known(self) -> bool:
        """Whether this version can rebuild it."""
        return self.kind == "set" or (self.kind == "generator" and self.net in NETS)

    def sample(
        self,
        spec: Spec,
        count: int,
        labels: Tensor | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        spread: float = 1.0,
        progress: Progress = silent,
    ) -> tuple[Tensor, Tensor]:
        """Images [count, channels, height, width] in [0, 1] and labels [count]; classes take turns unless labels are given.

        Sampling touches no data and costs nothing. A set gives its own images, each as often as it must. A generator draws on the
        ``device``, from the same codes on each, but rounded in its own way; images come back to the CPU. A ``spread`` below 1 draws its
        codes less widely: cleaner images, and less varied ones.
        """
        if not 1 <= count <= MOST:
            raise ReleaseError(f"count={count}: 1 to {MOST} samples at a time")
        labels = torch.arange(count) % spec.classes if labels is None else torch.as_tensor(labels)
        if len(labels) != count or labels.min() < 0 or labels.max() >= spec.classes:
            raise ReleaseError(f"labels: {count} of them in 0 to {spec.classes - 1} are needed")
        if not 0 < spread <= 1 or (self.kind == "set" and spread != 1):
            raise ReleaseError(
                f"spread={spread}: above 0 and at most 1 for a generator, and a set has none"
            )
        if self.kind == "set":
            return self.tensors["images"][self.places(labels)], labels
        net: Any = self.build().to(device)
        codes = spread * torch.randn(count, net.code, generator=torch.Generator().manual_seed(seed))
        images = torch.empty(count, *spec.shape)
        for begin in range(0, count, PORTION):
            some = slice(begin, begin + PORTION)
            with torch.no_grad():
                images[some] = net(codes[some].to(device), labels[some].to(device)).cpu()
            if count > PORTION:
                progress("drawing", min(begin + PORTION, count), count)
        if not images.isfinite().all():
            raise ReleaseError(
                "the generator gives values that are not finite: its training diverged; train again at a lower rate"
            )
        return images, labels

    def places(self, labels: Tensor) -> Tensor:
        """Where in a set the images lie that `sample` gives for these labels: [count]; those of a class take turns."""
        own = self.tensors["labels"]
        turn = torch.zeros(len(labels), dtype=torch.int64)
        for label in labels.unique():
            places = (own == label).nonzero().flatten()
            wanted = labels == label
            if not len(places):
                raise ReleaseError(f"the set has no image of class {label}")
            turn[wanted] = places[torch.arange(int(wanted.sum())) % len(places)]
        return turn

    def build(self) -> nn.Module:
        """The generator, ready to sample."""
        net = NETS[self.net](**self.arguments)
        net.load_state_dict(self.tensors)
        return net.eval()

    def fits(self, spec: Spec) -> bool:
        """Whether the tensors are finite and those that spec and net ask for; the net is only outlined, so a huge one costs nothing."""
        kept = self.kept if self.kind == "set" else {}
        found = {
            key: (tuple(value.shape), value.dtype)
            for key, value in self.tensors.items()
            if kept == {} or not key.startswith(KEPT)
        }
        if self.kind == "set":
            if not all(
                value.is_floating_point() and value.isfinite().all()
                for value in (*kept.values(), self.tensors["images"])
            ):
                return False
            labels = self.tensors["labels"]
            wanted = {
                "images": ((len(labels), *spec.shape), torch.float32),
                "labels": ((len(labels),), torch.int64),
            }
            if (soft := self.tensors.get("soft")) is not None:
                wanted["soft"] = ((len(labels), spec.classes), torch.float32)
            if found != wanted or int(labels.min()) < 0 or int(labels.max()) >= spec.classes:
                return False
            # comparisons with NaN are false, so what is not finite does not pass
            return soft is None or bool(
                (soft >= 0).all() and ((soft.double().sum(1) - 1).abs() <= TOLERANCE).all()
            )
        if not all(
            value.isfinite().all() for value in self.tensors.values() if value.is_floating_point()
        ):
            return False
        with torch.device("meta"):
            net: Any = NETS[self.net](**self.arguments)
        wanted = {key: (tuple(value.shape), value.dtype) for key, value in net.state_dict().items()}
        return found == wanted and (net.shape, net.classes) == (spec.shape, spec.classes)
