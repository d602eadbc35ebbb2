"""Release: the only thing that leaves. A folder of safetensors and one JSON manifest; its digests cover every byte of it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import ReleaseError, refusing
from privot.local.channels import channel_from
from privot.privacy import accounting
from privot.privacy.plan import Plan
from privot.release.artifact import Product

FORMAT = 1
TENSORS = "tensors.safetensors"
BROKEN = "{}: not a sound release; name a folder that synthesize wrote"
PURPOSES = (
    "shadow",
    "audit",
)  # of output that is no release: it is for the data owner's eyes alone
RATES = (
    0.001,
    0.01,
    0.1,
)  # false-positive rates at which the certificate states the power of any attack


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of one unit, for the named neighbours, and what any membership attack can reach."""

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
        renyi = float(accounting.renyi(plan.event(), plan.neighbours).epsilon(delta))
        powers = {f"{rate:g}": cost.tpr(rate) for rate in RATES}
        return cls(
            float(cost.epsilon(delta)),
            delta,
            str(plan.neighbours),
            cost.method,
            renyi,
            powers,
            plan.neighbours.unit,
        )


@dataclass(frozen=True)
class NoGuarantee:
    """No proof, no epsilon; and why."""

    reason: str


@dataclass(frozen=True)
class Release:
    """A product with its certificate. ``facts`` is the manifest: method, settings, plan, events, seed, ledger head, versions."""

    product: Product
    guarantee: Guarantee | NoGuarantee
    spec: Spec
    facts: dict[str, Any]

    def sample(
        self,
        count: int,
        labels: Tensor | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        spread: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Images [count, channels, height, width] in [0, 1] and labels [count]; see `Product.sample`. It costs nothing."""
        return self.product.sample(self.spec, count, labels, seed, device, spread)

    def save(self, folder: str | Path) -> Path:
        """Write the release, whole or not at all; an existing folder is never overwritten."""
        folder = Path(folder)
        part = folder.with_name(f".{folder.name}.part")
        if os.path.lexists(folder):
            raise ReleaseError(f"{folder} is there already: name another folder, or remove it")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            text, raw = self._written()
            (part / TENSORS).write_bytes(raw)
            (part / "manifest.json").write_bytes(text)
            (part / "manifest.sha256").write_text(_digest(text) + "\n")
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    @functools.cached_property
    def digest(self) -> str:
        """Of the manifest as it stands in a folder, and so of all that is released; of one that was loaded, as it was found."""
        return _digest(self._written()[0])

    def _written(self) -> tuple[bytes, bytes]:
        """The manifest and the tensors."""
        raw = save(self.product.tensors)
        return json.dumps(
            self.manifest() | {"files": {TENSORS: _digest(raw)}}, indent=1
        ).encode(), raw

    def manifest(self) -> dict[str, Any]:
        claim = {"kind": type(self.guarantee).__name__, **asdict(self.guarantee)}
        product = {
            "kind": self.product.kind,
            "net": self.product.net,
            "arguments": self.product.arguments,
        }
        return {
            "format": FORMAT,
            "product": product,
            "guarantee": claim,
            "spec": self.spec.to_json(),
            **self.facts,
        }

    @classmethod
    def load(cls, folder: str | Path) -> Release:
        """Read a release after checking every digest. Nothing in it is executed, and it allocates no more than its files hold."""
        with refusing(ReleaseError, BROKEN.format(folder)):
            manifest, raw, digest = _checked(Path(folder))
            claim = dict(manifest["guarantee"])
            product = manifest["product"]
            kind = {"Guarantee": Guarantee, "NoGuarantee": NoGuarantee}[claim.pop("kind")]
            made = Product(product["kind"], load(raw), product["net"], product["arguments"])
            if not made.known():
                raise ReleaseError(
                    f"{folder}: made by a newer version, with a {made.kind} {made.net} that this one does not know"
                )
            facts = {
                key: value
                for key, value in manifest.items()
                if key not in ("format", "product", "guarantee", "spec", "files")
            }
            release = cls(made, kind(**claim), Spec.from_json(manifest["spec"]), facts)
            if not made.fits(release.spec):
                raise ReleaseError(
                    f"{folder}: its tensors are not those that its manifest describes"
                )
            vars(release)["digest"] = digest
            return release


def refuse_internal(release: Release, name: Any = "the release") -> None:
    """Refuse what was made for an attack or an audit: it stays with the data owner, and no ledger has charged it as a release.

    Args:
        release: The release, as it was loaded.
        name: What an error calls it.
    """
    if purpose := release.facts.get("purpose"):
        word = purpose if purpose in PURPOSES else "another purpose"
        raise ReleaseError(
            f"{name}: made for an attack on the data owner's side ({word}); not a release"
        )


def proved(release: Release, name: Any = "the release") -> tuple[Plan, Guarantee | None]:
    """The plan of a release and what its events prove; raises where the manifest claims anything else, or is not of a release."""
    refuse_internal(release, name)
    plan = Plan.from_json(release.facts.get("plan"))
    claim = release.guarantee
    again = None
    if str(plan.event()) != release.facts.get("event"):
        raise ReleaseError(f"{name}: the recorded events are not those of its plan")
    if (channel := release.facts.get("channel")) is not None:
        with refusing(ReleaseError, f"{name}: its channel is not sound"):
            if channel_from(channel).plan() != plan:
                raise ReleaseError(f"{name}: the recorded plan is not that of its channel")
    if isinstance(claim, Guarantee):
        again = Guarantee.of(plan, claim.delta)
        said = _flat(claim)
        shown = _flat(again)
        if wrong := said.keys() ^ shown.keys() or {
            key for key in shown if not _agree(said[key], shown[key])
        }:
            raise ReleaseError(
                f"{name}: claims {(key := min(wrong))} {said.get(key)}, but its events prove {shown.get(key)}"
            )
    return plan, again


def verify(folder: str | Path) -> dict[str, Any]:
    """Prove a release again without the data: digests, then epsilon and attack power from the recorded events."""
    release = Release.load(folder)
    with refusing(ReleaseError, BROKEN.format(folder)):
        _, again = proved(release, folder)
        result = {
            "release": str(folder),
            "digests": "ok",
            "method": release.facts.get("method"),
            "guarantee": asdict(release.guarantee),
        }
        return result | ({"epsilon_from_events": again.epsilon} if again else {})


def refuse_other(release: Release, said: Any, name: Any) -> None:
    """Refuse a file that says itself, by the digest ``release`` in it, that it is of another release, or of none."""
    if isinstance(said, dict) and said.get("release", release.digest) != release.digest:
        raise ReleaseError(
            f"{name}: this is of another release, not of this one: measure or attack this one, or remove the file"
        )


def _flat(claim: Guarantee) -> dict[str, Any]:
    return {
        **asdict(claim),
        "max_tpr": None,
        **{f"max_tpr at {rate}": power for rate, power in claim.max_tpr.items()},
    }


def _agree(said: Any, proved: Any) -> bool:
    numbers = isinstance(said, (int, float)) and isinstance(proved, float)
    return (
        math.isclose(said, proved, rel_tol=1e-6, abs_tol=1e-9) if numbers else bool(said == proved)
    )


def _checked(folder: Path) -> tuple[dict[str, Any], bytes, str]:
    """The manifest, the bytes of the tensors and the digest: what is used is what was checked, since each file is read once."""
    text = (folder / "manifest.json").read_bytes()
    raw = (folder / TENSORS).read_bytes()
    if (folder / "manifest.sha256").read_bytes() != _digest(text).encode() + b"\n":
        raise ReleaseError(f"{folder / 'manifest.json'}: its digest does not match")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ReleaseError(f"{folder}: format {manifest['format']} is not known to this version")
    if manifest["files"] != {TENSORS: _digest(raw)}:
        raise ReleaseError(f"{folder / TENSORS}: its digest does not match")
    return manifest, raw, _digest(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
