"""What a figure depends on besides the code: the machine, the commit, and the peers that are installed."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privot.data import Public


def hardware() -> str:
    """Return the name of the GPU, or the type of CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the commit of this tree, or "unknown" outside a git checkout."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return result.stdout.strip() or "unknown"


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
    """Import POT without its other frameworks, which would take the GPU's memory; None without it."""
    for backend in ("JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    try:
        import ot
    except ImportError:
        return None
    return ot
