"""Shared by all benchmarks: the environment of a figure, settings, Markdown rows, JSON files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import privot
from privot.data import Public


def hardware() -> str:
    """Return the name of the GPU, or the type of CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"


def commit() -> str:
    """Return the commit of this tree, or "unknown" outside a git checkout."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return result.stdout.strip() or "unknown"


def describe_environment() -> dict[str, str]:
    """Return the date, the hardware, the version of torch and the commit."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def format_environment() -> str:
    """Format `describe_environment` as one line."""
    facts = describe_environment()
    return f"{facts['date']}, {facts['hardware']}, torch {facts['torch']}, commit {facts['commit']}"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Build a parser whose help shows the docstring of the script as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """Parse settings of the form KEY=VALUE."""
    return dict(pair.split("=", 1) for pair in pairs)


def print_row(*cells: object) -> None:
    """Print one row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*cells: str) -> None:
    """Print the header of a Markdown table."""
    print_row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, replacing it only when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def load_public(source: str, split: str = "train") -> Public:
    """Load a dataset whose records anyone may read."""
    dataset = privot.load(source, split, public=True)
    assert isinstance(dataset, Public)
    return dataset


def select_records(
    kind: type, dataset: Public, selection: Any, name: str, sizes: bool = False
) -> Any:
    """Build a dataset of some records of a public one.

    Args:
        kind: `Public` or `Sensitive`.
        dataset: The public dataset.
        selection: Indices or a mask of the records.
        name: The name of the new dataset.
        sizes: Whether its class sizes are declared.

    Returns:
        The new dataset.
    """
    images, labels = (values.cpu()[selection].numpy() for values in dataset.records())
    class_sizes = None
    if sizes:
        class_sizes = tuple(np.bincount(labels, minlength=dataset.spec.num_classes).tolist())
    spec = replace(dataset.spec, size=len(labels), class_sizes=class_sizes)
    return kind(images, labels, spec, name=name)


def import_pot() -> Any:
    """Import POT without its other frameworks, which would take GPU memory; None without POT."""
    for backend in ("JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    try:
        import ot
    except ImportError:
        return None
    return ot
