"""The report: one self-contained page that a data owner can sign, and the same facts for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.audit.result import Attack
from privot.data.dataset import Public, Sensitive
from privot.measures.result import Reading
from privot.privacy.ledger import Ledger
from privot.release import Guarantee, Release
from privot.report import context, data_card, output_folder
from privot.report.comparison import compare
from privot.report.html import page
from privot.report.images import film, grid, sample_table
from privot.report.ledger_history import history
from privot.report.nearest_records import study

__all__ = ["Attack", "Owner", "Written", "compare", "write"]

PUBLIC = frozenset({"report.html", "report.json", "registry.yaml", "README.md"}), "report.json"
INTERNAL = frozenset({"internal.html", "internal.json"}), "internal.json"


@dataclass(frozen=True)
class Owner:
    """What only the data owner has: the real records, and the ledger with its history. All of it stays on the internal face."""

    data: Sensitive | Public | None = None
    ledger: Ledger | None = None


@dataclass(frozen=True)
class Written:
    """The files of a report, public ones first. ``broken``: a measured attack, internal ones included, lies above the certificate."""

    files: tuple[Path, ...]
    broken: bool
    left_out: (
        int  # readings and attacks that are not publishable and found no internal face to stand on
    )


def write(
    release: Release,
    out: Path,
    *,
    name: str,
    readings: Sequence[Reading] = (),
    attacks: Sequence[Attack] = (),
    owner: Owner | None = None,
) -> Written:
    """Write the public face of a release's report into the folder ``out``, and with ``owner`` the internal one into ``out``-internal.

    The public face (report.html, report.json, registry.yaml, README.md) depends on the release, its ``name`` and publishable
    numbers alone, byte for byte. The internal one (internal.html, internal.json) lies in a folder that its user alone can read. An
    earlier report is replaced, anything else refused; each folder comes whole or not at all.

    When an attack that is not publishable refutes the certificate, and no publishable one does, the public face would be clean and
    false: then none is written, an earlier one in ``out`` is removed, and ``broken`` says why.

    >>> import tempfile, torch
    >>> from privot import NoGuarantee, Spec
    >>> from privot.release.artifact import Product
    >>> release = Release(Product.set(torch.rand(4, 1, 8, 8), torch.arange(4) % 2), NoGuarantee("made by hand"), Spec((1, 8, 8), 2), {})
    >>> [path.name for path in write(release, Path(tempfile.mkdtemp()) / "report", name="toy").files]
    ['report.html', 'report.json', 'registry.yaml', 'README.md']
    """
    out = output_folder.check(Path(out), *PUBLIC)
    aside = out.with_name(f"{out.name}-internal")
    if owner:
        output_folder.check(aside, *INTERNAL)
    known = context.known(release, name)
    rows = grid(release)
    frames = film(release)
    table = sample_table(release)
    shown = context.public(known, readings, attacks)
    files = {
        "report.html": page(shown, rows, film=frames, table=table),
        "report.json": _json(shown),
        "registry.yaml": data_card.yaml(data_card.registry(shown)).encode(),
        "README.md": data_card.card(shown).encode(),
    }
    whole = context.face(known, "internal", readings, attacks)
    inside: dict[str, bytes] = {}
    if owner:
        pairs: list[dict[str, Any]] = []
        if owner.data is not None:
            whole["nearest"], pairs = study(release, owner.data)
        if owner.ledger is not None:
            delta = release.guarantee.delta if isinstance(release.guarantee, Guarantee) else 1e-5
            whole["history"] = history(owner.ledger, delta, str(shown["ledger"].get("head")))
        inside = {
            "internal.html": page(whole, rows, pairs, frames, table),
            "internal.json": _json(whole),
        }
    hidden = whole["broken"] and not shown["broken"]
    if hidden:
        output_folder.remove(out, *PUBLIC)
    private = output_folder.replace(aside, inside, *INTERNAL, private=True) if owner else []
    public = [] if hidden else output_folder.replace(out, files, *PUBLIC)
    left = (
        0
        if owner
        else sum(not each.publishable for each in readings)
        + sum(not each.publishable for each in attacks)
    )
    return Written((*public, *private), whole["broken"], left)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
