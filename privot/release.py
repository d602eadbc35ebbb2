"""Release: the only thing that leaves. A folder of safetensors and one JSON manifest; its digests cover every byte of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from privot.data.spec import Spec
from privot.errors import PrivotError, ReleaseError
from privot.nets import NETS
from privot.privacy import accounting
from privot.privacy.plan import Plan

FORMAT, TENSORS = 1, "tensors.safetensors"
MOST = 10_000_000  # samples at a time
RATES = (0.001, 0.01, 0.1)  # false-positive rates at which the certificate states the power of any attack
PACKAGES = ("privot", "torch", "numpy", "scipy", "dp-accounting", "safetensors")


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of one record, for the named neighbours, and what any membership attack can reach."""

    epsilon: float
    delta: float
    neighbours: str
    accountant: str
    renyi_epsilon: float  # the same events by the looser Renyi accountant, as a check
    max_tpr: dict[str, float]
    unit: str = "one record"

    @classmethod
    def of(cls, plan: Plan, delta: float) -> Guarantee:
        """What the events of a plan prove."""
        cost = plan.cost()
        renyi = accounting.renyi_epsilon(plan.event(), plan.neighbours, delta)
        powers = {f"{rate:g}": cost.tpr(rate) for rate in RATES}
        return cls(float(cost.epsilon(delta)), delta, str(plan.neighbours), cost.method, renyi, powers)


@dataclass(frozen=True)
class NoGuarantee:
    """No proof, no epsilon; and why."""

    reason: str


@dataclass(frozen=True)
class Product:
    """What a method made: a generator (a net by name, its arguments and weights) or a set (images and labels)."""

    kind: str
    tensors: dict[str, Tensor]
    net: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def generator(cls, name: str, arguments: dict[str, Any], net: nn.Module) -> Product:
        return cls("generator", {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}, name, arguments)

    @classmethod
    def set(cls, images: Tensor, labels: Tensor) -> Product:
        """``images`` float in [0, 1], [count, channels, height, width]; ``labels`` [count]."""
        return cls("set", {"images": images.detach().cpu().float().contiguous(), "labels": labels.detach().cpu().long().contiguous()})


@dataclass(frozen=True)
class Release:
    """A product with its certificate. ``facts`` is the manifest: method, settings, plan, events, seed, ledger head, versions."""

    product: Product
    guarantee: Guarantee | NoGuarantee
    spec: Spec
    facts: dict[str, Any]

    def sample(self, count: int, labels: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images [count, channels, height, width] in [0, 1] and labels [count]; classes take turns unless labels are given.

        Sampling touches no data and costs nothing. A set gives its own images, each as often as it must.
        """
        if not 1 <= count <= MOST:
            raise ReleaseError(f"count={count}: 1 to {MOST} samples at a time")
        labels = torch.arange(count) % self.spec.classes if labels is None else torch.as_tensor(labels)
        if len(labels) != count or labels.min() < 0 or labels.max() >= self.spec.classes:
            raise ReleaseError(f"labels: {count} of them in 0 to {self.spec.classes - 1} are needed")
        if self.product.kind == "set":
            own, turn = self.product.tensors["labels"], torch.zeros(count, dtype=torch.int64)
            for label in labels.unique():
                places, wanted = (own == label).nonzero().flatten(), labels == label
                if not len(places):
                    raise ReleaseError(f"the set has no image of class {label}")
                turn[wanted] = places[torch.arange(int(wanted.sum())) % len(places)]
            return self.product.tensors["images"][turn], labels
        net: Any = self.net()
        codes = torch.randn(count, net.code, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            images = torch.cat([net(*part) for part in zip(codes.split(1000), labels.split(1000), strict=True)])
        if not images.isfinite().all():
            raise ReleaseError("the generator gives values that are not finite: its training diverged; train again at a lower rate")
        return images, labels

    def net(self) -> nn.Module:
        """The generator, ready to sample."""
        net = NETS[self.product.net](**self.product.arguments)
        net.load_state_dict(self.product.tensors)
        return net.eval()

    def save(self, folder: str | Path) -> Path:
        """Write the release, whole or not at all; an existing folder is never overwritten."""
        folder = Path(folder)
        part = folder.with_name(f".{folder.name}.part")
        if os.path.lexists(folder):
            raise ReleaseError(f"{folder} is there already: name another folder, or remove it")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            save_file(self.product.tensors, part / TENSORS)
            files = {TENSORS: _digest((part / TENSORS).read_bytes())}
            text = json.dumps(self.manifest() | {"files": files}, indent=1).encode()
            (part / "manifest.json").write_bytes(text)
            (part / "manifest.sha256").write_text(_digest(text) + "\n")
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    def manifest(self) -> dict[str, Any]:
        claim = {"kind": type(self.guarantee).__name__, **asdict(self.guarantee)}
        product = {"kind": self.product.kind, "net": self.product.net, "arguments": self.product.arguments}
        return {"format": FORMAT, "product": product, "guarantee": claim, "spec": self.spec.to_json(), **self.facts}

    @classmethod
    def load(cls, folder: str | Path) -> Release:
        """Read a release after checking every digest. Nothing in it is executed, and it allocates no more than its files hold."""
        with _refusing(folder):
            manifest, raw = _checked(Path(folder))
            claim, product = dict(manifest["guarantee"]), manifest["product"]
            kind = {"Guarantee": Guarantee, "NoGuarantee": NoGuarantee}[claim.pop("kind")]
            made = Product(product["kind"], load(raw), product["net"], product["arguments"])
            if made.kind not in ("generator", "set") or (made.kind == "generator" and made.net not in NETS):
                raise ReleaseError(f"{folder}: made by a newer version, with a {made.kind} {made.net} that this one does not know")
            facts = {key: value for key, value in manifest.items() if key not in ("format", "product", "guarantee", "spec", "files")}
            release = cls(made, kind(**claim), Spec.from_json(manifest["spec"]), facts)
            if not release._fits():
                raise ReleaseError(f"{folder}: its tensors are not those that its manifest describes")
            return release

    def _fits(self) -> bool:
        """Whether the tensors are those that the spec and the net ask for; the net is only outlined, so a huge one costs nothing."""
        found = {key: (tuple(value.shape), value.dtype) for key, value in self.product.tensors.items()}
        if self.product.kind == "set":
            labels = self.product.tensors["labels"]
            wanted = {"images": ((len(labels), *self.spec.shape), torch.float32), "labels": ((len(labels),), torch.int64)}
            return found == wanted and int(labels.min()) >= 0 and int(labels.max()) < self.spec.classes
        with torch.device("meta"):
            net: Any = NETS[self.product.net](**self.product.arguments)
        wanted = {key: (tuple(value.shape), value.dtype) for key, value in net.state_dict().items()}
        return found == wanted and (net.shape, net.classes) == (self.spec.shape, self.spec.classes)


def verify(folder: str | Path) -> dict[str, Any]:
    """Prove a release again without the data: digests, then epsilon and attack power from the recorded events."""
    release = Release.load(folder)
    with _refusing(folder):
        plan, claim = Plan.from_json(release.facts.get("plan")), release.guarantee
        if (accounting.to_json(plan.event()) if plan.stages else []) != release.facts.get("event"):
            raise ReleaseError(f"{folder}: the recorded events are not those of its plan")
        result = {"release": str(folder), "digests": "ok", "method": release.facts.get("method"), "guarantee": asdict(claim)}
        if isinstance(claim, Guarantee):
            again = Guarantee.of(plan, claim.delta)
            said, proved = _flat(claim), _flat(again)
            if wrong := said.keys() ^ proved.keys() or {key for key in proved if not _agree(said[key], proved[key])}:
                key = min(wrong)
                raise ReleaseError(f"{folder}: claims {key} {said.get(key)}, but its events prove {proved.get(key)}")
            result["epsilon_from_events"] = again.epsilon
        return result


def _flat(claim: Guarantee) -> dict[str, Any]:
    return {**asdict(claim), "max_tpr": None, **{f"max_tpr at {rate}": power for rate, power in claim.max_tpr.items()}}


def _agree(said: Any, proved: Any) -> bool:
    numbers = isinstance(said, (int, float)) and isinstance(proved, float)
    return math.isclose(said, proved, rel_tol=1e-6, abs_tol=1e-9) if numbers else bool(said == proved)


@contextmanager
def _refusing(folder: str | Path) -> Iterator[None]:
    """Whatever a broken or hostile release provokes becomes one line."""
    try:
        yield
    except PrivotError:
        raise
    except Exception as error:
        raise ReleaseError(f"{folder}: not a sound release ({type(error).__name__}); name a folder that synthesize wrote") from None


def _checked(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest and the bytes of the tensors: what is used is what was checked, since each file is read once."""
    text, raw = (folder / "manifest.json").read_bytes(), (folder / TENSORS).read_bytes()
    if (folder / "manifest.sha256").read_bytes() != _digest(text).encode() + b"\n":
        raise ReleaseError(f"{folder / 'manifest.json'}: its digest does not match")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ReleaseError(f"{folder}: format {manifest['format']} is not known to this version")
    if manifest["files"] != {TENSORS: _digest(raw)}:
        raise ReleaseError(f"{folder / TENSORS}: its digest does not match")
    return manifest, raw


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
