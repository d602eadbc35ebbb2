"""Release: the only thing that leaves. A folder of safetensors and one JSON manifest; its digests cover every byte of it."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from privot.data.spec import Spec
from privot.errors import PrivotError, ReleaseError
from privot.nets import NETS
from privot.privacy import accounting
from privot.privacy.plan import Plan

FORMAT = 1
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
        return cls("set", {"images": images.detach().cpu().float().contiguous(), "labels": labels.detach().cpu().contiguous()})


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
        if count < 1:
            raise ReleaseError(f"count={count}: at least one sample is needed")
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
            return torch.cat([net(*part) for part in zip(codes.split(1000), labels.split(1000), strict=True)]), labels

    def net(self) -> nn.Module:
        """The generator, ready to sample."""
        net = NETS[self.product.net](**self.product.arguments)
        net.load_state_dict(self.product.tensors)
        return net.eval()

    def save(self, folder: str | Path) -> Path:
        """Write the release, whole or not at all; an existing folder is never overwritten."""
        folder = Path(folder)
        part = folder.with_name(f".{folder.name}.part")
        if folder.exists():
            raise ReleaseError(f"{folder} is there already: name another folder, or remove it")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(self.product.tensors, part / "tensors.safetensors")
        text = json.dumps(self.manifest() | {"files": {"tensors.safetensors": _digest(part / "tensors.safetensors")}}, indent=1)
        (part / "manifest.json").write_text(text)
        (part / "manifest.sha256").write_text(_digest(part / "manifest.json") + "\n")
        part.replace(folder)
        return folder

    def manifest(self) -> dict[str, Any]:
        claim = {"kind": type(self.guarantee).__name__, **asdict(self.guarantee)}
        product = {"kind": self.product.kind, "net": self.product.net, "arguments": self.product.arguments}
        return {"format": FORMAT, "product": product, "guarantee": claim, "spec": self.spec.to_json(), **self.facts}

    @classmethod
    def load(cls, folder: str | Path) -> Release:
        """Read a release after checking every digest. Nothing in it is executed."""
        manifest = _checked(Path(folder))
        try:
            claim, product = dict(manifest["guarantee"]), manifest["product"]
            kind = {"Guarantee": Guarantee, "NoGuarantee": NoGuarantee}[claim.pop("kind")]
            tensors = load_file(Path(folder) / "tensors.safetensors")
            own = {"format", "product", "guarantee", "spec", "files"}
            facts = {key: value for key, value in manifest.items() if key not in own}
            made = Product(product["kind"], tensors, product["net"], product["arguments"])
            if made.kind not in ("generator", "set") or (made.kind == "generator" and made.net not in NETS):
                raise ReleaseError(f"{folder}: made by a newer version, with a {made.kind} {made.net} that this one does not know")
            return cls(made, kind(**claim), Spec.from_json(manifest["spec"]), facts)
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ReleaseError(f"{folder}: not a sound release ({type(error).__name__})") from None


def verify(folder: str | Path) -> dict[str, Any]:
    """Prove a release again without the data: digests, then epsilon and attack power from the recorded events."""
    release = Release.load(folder)
    plan = Plan.from_json(release.facts.get("plan"))
    event = accounting.to_json(plan.event()) if plan.stages else []
    if event != release.facts.get("event"):
        raise ReleaseError(f"{folder}: the recorded events are not those of its plan")
    claim = release.guarantee
    result: dict[str, Any] = {"release": str(folder), "digests": "ok", "method": release.facts.get("method"), "guarantee": asdict(claim)}
    if isinstance(claim, Guarantee):
        again = Guarantee.of(plan, claim.delta)
        close = [math.isclose(claim.epsilon, again.epsilon, rel_tol=1e-6, abs_tol=1e-9), claim.neighbours == again.neighbours]
        close += [math.isclose(claim.max_tpr.get(rate, -1), power, rel_tol=1e-6) for rate, power in again.max_tpr.items()]
        if not all(close):
            raise ReleaseError(f"{folder}: claims epsilon {claim.epsilon:.6g}, but its events prove {again.epsilon:.6g}")
        result["epsilon_from_events"] = again.epsilon
    return result


def _checked(folder: Path) -> dict[str, Any]:
    try:
        if (folder / "manifest.sha256").read_text() != _digest(folder / "manifest.json") + "\n":
            raise ReleaseError(f"{folder / 'manifest.json'}: its digest does not match")
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ReleaseError(f"{folder}: format {manifest['format']} is not known to this version")
        for name, digest in manifest["files"].items():
            if Path(name).name != name or _digest(folder / name) != digest:
                raise ReleaseError(f"{folder / name}: its digest does not match")
        return manifest
    except PrivotError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{folder}: not a release ({type(error).__name__})") from None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
