"""The privacy report: one self-contained page that a data owner can sign, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.audit.result import AttackResult
from privot.data.dataset import Public, Sensitive
from privot.measures.result import MetricResult
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.release import Release
from privot.report import context, data_card, output_folder
from privot.report.comparison import compare
from privot.report.html import PageImages, render_report_page
from privot.report.images import flow_frames, sample_grid, sample_table
from privot.report.ledger_history import summarize_ledger
from privot.report.nearest_records import compare_nearest_records
from privot.report.output_folder import FolderFormat

__all__ = ["AttackResult", "OwnerInputs", "ReportFiles", "compare", "write_report"]

PUBLIC_FORMAT = FolderFormat(
    frozenset({"report.html", "report.json", "registry.yaml", "README.md"}), "report.json"
)
INTERNAL_FORMAT = FolderFormat(frozenset({"internal.html", "internal.json"}), "internal.json")
DEFAULT_HISTORY_DELTA = 1e-5  # of the ledger's epsilon, if the release has no guarantee


@dataclass(frozen=True)
class OwnerInputs:
    """What only the data owner has. It goes into the internal report only.

    Attributes:
        data: The real records, for the nearest neighbours of the samples.
        ledger: The ledger of the dataset, for its history.
    """

    data: Sensitive | Public | None = None
    ledger: Ledger | None = None


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report.

    Attributes:
        paths: The files, those of the public report first.
        guarantee_refuted: Whether a measured attack, public or internal, exceeds the certificate.
        num_left_out: Number of metric and attack results that are in no report, since they are not
            publishable and no internal report was written.
    """

    paths: tuple[Path, ...]
    guarantee_refuted: bool
    num_left_out: int


def write_report(
    release: Release,
    out: Path,
    *,
    name: str,
    results: Sequence[MetricResult] = (),
    attacks: Sequence[AttackResult] = (),
    owner_inputs: OwnerInputs | None = None,
) -> ReportFiles:
    """Write the public report of a release, and the internal report of its data owner.

    The public report (report.html, report.json, registry.yaml, README.md) depends only on the
    release, its name and the publishable results, byte for byte. The internal report
    (internal.html, internal.json) goes into a folder that only the user can read. An earlier report
    is replaced, and each folder is written whole or not at all.

    If an attack that is not publishable refutes the certificate, and no publishable attack does,
    the public report would be clean and false. Then no public report is written, and an earlier one
    is removed.

    Args:
        release: The release.
        out: Folder of the public report. The internal report goes into ``out``-internal.
        name: Name of the release.
        results: Results of metrics.
        attacks: Results of attacks.
        owner_inputs: What the data owner adds. None to write no internal report.

    Returns:
        The files, and whether an attack refutes the guarantee.

    Raises:
        ReleaseError: A folder contains other files, or the guarantee is not proven by the plan.

    >>> import tempfile, torch
    >>> from privot import NoGuarantee, Spec
    >>> from privot.release.artifact import Artifact
    >>> artifact = Artifact.from_images(torch.rand(4, 1, 8, 8), torch.arange(4) % 2)
    >>> release = Release(artifact, NoGuarantee("made by hand"), Spec((1, 8, 8), 2), {})
    >>> files = write_report(release, Path(tempfile.mkdtemp()) / "report", name="toy")
    >>> [path.name for path in files.paths]
    ['report.html', 'report.json', 'registry.yaml', 'README.md']
    """
    out = output_folder.check_replaceable_directory(Path(out), PUBLIC_FORMAT)
    internal_out = out.with_name(f"{out.name}-internal")
    if owner_inputs:
        output_folder.check_replaceable_directory(internal_out, INTERNAL_FORMAT)
    base = context.base_context(release, name)
    images = PageImages(sample_grid(release), flow_frames(release), sample_table(release))
    public = context.public_view(base, results, attacks)
    public_files = _render_public_files(public, images)
    internal = context.view(base, "internal", results, attacks)
    internal_files = {}
    if owner_inputs:
        internal_files = _render_internal_files(release, internal, images, owner_inputs)
    is_refuted_internally = internal["guarantee_refuted"] and not public["guarantee_refuted"]
    if is_refuted_internally:
        output_folder.remove_directory(out, PUBLIC_FORMAT)
    internal_paths = []
    if owner_inputs:
        internal_paths = output_folder.replace_directory(
            internal_out, internal_files, INTERNAL_FORMAT, private=True
        )
    public_paths = []
    if not is_refuted_internally:
        public_paths = output_folder.replace_directory(out, public_files, PUBLIC_FORMAT)
    num_left_out = 0
    if not owner_inputs:
        num_left_out = sum(not result.publishable for result in results)
        num_left_out += sum(not attack.publishable for attack in attacks)
    return ReportFiles(
        (*public_paths, *internal_paths), internal["guarantee_refuted"], num_left_out
    )


def _render_public_files(public: dict[str, Any], images: PageImages) -> dict[str, bytes]:
    """Render the public report: name -> content."""
    return {
        "report.html": render_report_page(public, images),
        "report.json": _to_json_bytes(public),
        "registry.yaml": data_card.dump_yaml(data_card.build_registry_record(public)).encode(),
        "README.md": data_card.render_data_card(public).encode(),
    }


def _render_internal_files(
    release: Release, internal: dict[str, Any], images: PageImages, owner_inputs: OwnerInputs
) -> dict[str, bytes]:
    """Render the internal report.

    Args:
        release: The release.
        internal: The facts of the internal report. Receives the nearest records and the history.
        images: The images of the page.
        owner_inputs: What the data owner adds.

    Returns:
        Name -> content.
    """
    nearest_pairs: list[dict[str, Any]] = []
    if owner_inputs.data is not None:
        internal["nearest"], nearest_pairs = compare_nearest_records(release, owner_inputs.data)
    if owner_inputs.ledger is not None:
        delta = DEFAULT_HISTORY_DELTA
        if isinstance(release.guarantee, Guarantee):
            delta = release.guarantee.delta
        internal["history"] = summarize_ledger(
            owner_inputs.ledger, delta, str(internal["ledger"].get("head"))
        )
    return {
        "internal.html": render_report_page(internal, images, nearest_pairs),
        "internal.json": _to_json_bytes(internal),
    }


def _to_json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
