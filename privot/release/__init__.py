"""The release: the only thing that leaves the data owner.

A release is a folder of safetensors and one JSON manifest. The digests in the manifest, and the
digest of the manifest, cover every byte of the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import ReleaseError, reraise_as
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.release.artifact import Artifact

RELEASE_FORMAT = 2
TENSORS_FILE = "tensors.safetensors"
INVALID_RELEASE_MESSAGE = "{}: not a valid release. Name a folder that synthesize wrote."
INTERNAL_PURPOSES = ("shadow", "audit")  # of output that stays with the data owner
CERTIFICATE_CLASSES = {"Guarantee": Guarantee, "NoGuarantee": NoGuarantee}
MANIFEST_FIELDS = ("format", "artifact", "guarantee", "spec", "files")  # the rest is metadata


@dataclass(frozen=True)
class Release:
    """An artifact with its certificate.

    Attributes:
        artifact: The generator or the set of images.
        guarantee: What is proven about privacy, or why nothing is.
        spec: Shape and classes of the images.
        metadata: The other fields of the manifest: method, settings, plan, event, seed, ledger
            head, versions of packages.
    """

    artifact: Artifact
    guarantee: Guarantee | NoGuarantee
    spec: Spec
    metadata: dict[str, Any]

    def sample(
        self,
        num_samples: int,
        labels: Tensor | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        latent_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Sample images. It reads no data and costs no privacy; see `Artifact.sample`.

        Args:
            num_samples: Number of images.
            labels: The class of each image, [num_samples]; None: classes in turn.
            seed: Seed of the latents of a generator.
            device: Where a generator runs.
            latent_scale: Standard deviation of the latents, above 0 and at most 1.

        Returns:
            Images in [0, 1], [num_samples, channels, height, width], and labels [num_samples].
        """
        return self.artifact.sample(self.spec, num_samples, labels, seed, device, latent_scale)

    def save(self, folder: str | Path) -> Path:
        """Write the release as a folder, completely or not at all. Never overwrite a folder."""
        folder = Path(folder)
        part = folder.with_name(f".{folder.name}.part")
        if os.path.lexists(folder):
            raise ReleaseError(f"{folder} already exists. Choose another folder or remove it.")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            manifest_bytes, tensor_bytes = self._serialize()
            (part / TENSORS_FILE).write_bytes(tensor_bytes)
            (part / "manifest.json").write_bytes(manifest_bytes)
            (part / "manifest.sha256").write_text(_compute_sha256(manifest_bytes) + "\n")
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest, which covers all that is released.

        A release that was loaded has the digest of the manifest as it was read.
        """
        return _compute_sha256(self._serialize()[0])

    def _serialize(self) -> tuple[bytes, bytes]:
        """Give the bytes of the manifest and of the tensors."""
        tensor_bytes = save(self.artifact.tensors)
        files = {TENSORS_FILE: _compute_sha256(tensor_bytes)}
        manifest = self.build_manifest() | {"files": files}
        return json.dumps(manifest, indent=1).encode(), tensor_bytes

    def build_manifest(self) -> dict[str, Any]:
        """Build the manifest, without the digests of files, as plain data."""
        return {
            "format": RELEASE_FORMAT,
            "artifact": {
                "kind": self.artifact.kind,
                "generator_class": self.artifact.generator_class,
                "generator_config": self.artifact.generator_config,
            },
            "guarantee": {"kind": type(self.guarantee).__name__, **asdict(self.guarantee)},
            "spec": self.spec.to_json(),
            **self.metadata,
        }

    @classmethod
    def load(cls, folder: str | Path) -> Release:
        """Read a release and check every digest.

        Nothing in the folder is executed, and no more memory is allocated than its files hold.

        Raises:
            ReleaseError: If a digest does not match, or the release is invalid.
        """
        with reraise_as(ReleaseError, INVALID_RELEASE_MESSAGE.format(folder)):
            manifest, tensor_bytes, digest = _read_checked_files(Path(folder))
            certificate = dict(manifest["guarantee"])
            certificate_class = CERTIFICATE_CLASSES[certificate.pop("kind")]
            described = manifest["artifact"]
            artifact = Artifact(
                described["kind"],
                load(tensor_bytes),
                described["generator_class"],
                described["generator_config"],
            )
            if not artifact.is_supported():
                raise ReleaseError(
                    f"{folder}: a newer version made this release. This version has no "
                    f"{artifact.kind} {artifact.generator_class}."
                )
            release = cls(
                artifact,
                certificate_class(**certificate),
                Spec.from_json(manifest["spec"]),
                {key: value for key, value in manifest.items() if key not in MANIFEST_FIELDS},
            )
            if not artifact.is_consistent_with(release.spec):
                raise ReleaseError(f"{folder}: its tensors do not match its manifest.")
            vars(release)["digest"] = digest
            return release


def _read_checked_files(folder: Path) -> tuple[dict[str, Any], bytes, str]:
    """Read the manifest, the bytes of the tensors and the digest of the manifest.

    Every file is read once, so the bytes that are used are the bytes that were checked.
    """
    manifest_bytes = (folder / "manifest.json").read_bytes()
    tensor_bytes = (folder / TENSORS_FILE).read_bytes()
    digest = _compute_sha256(manifest_bytes)
    if (folder / "manifest.sha256").read_bytes() != digest.encode() + b"\n":
        raise ReleaseError(f"{folder / 'manifest.json'}: its digest does not match.")
    manifest = json.loads(manifest_bytes)
    if manifest["format"] != RELEASE_FORMAT:
        raise ReleaseError(f"{folder}: this version cannot read format {manifest['format']}.")
    if manifest["files"] != {TENSORS_FILE: _compute_sha256(tensor_bytes)}:
        raise ReleaseError(f"{folder / TENSORS_FILE}: its digest does not match.")
    return manifest, tensor_bytes, digest


def _compute_sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
