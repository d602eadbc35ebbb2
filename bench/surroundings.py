"""What a figure depends on beside the code that is timed: the machine, the commit, and the peers that are at hand."""

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
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Of this tree; an archive of it (`git archive`) carries its own in a file."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    carried = (Path(__file__).parent / "commit.txt").read_text().strip()
    return done.stdout.strip() or ("unknown" if carried.startswith("$") else carried)


def part(kind: type, box: Public, some: Any, name: str, sizes: bool = False) -> Any:
    """A box of this kind (`Public`, `Sensitive`) with records ``some`` of a public one; with ``sizes``, its class sizes are declared."""
    images, labels = (each.cpu()[some].numpy() for each in box.records())
    known = tuple(np.bincount(labels, minlength=box.spec.num_classes).tolist()) if sizes else None
    return kind(images, labels, replace(box.spec, size=len(labels), class_sizes=known), name=name)


def pot() -> Any:
    """The package POT, or None; kept from loading other frameworks, which would take the GPU's memory."""
    for backend in ("JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    try:
        import ot
    except ImportError:
        return None
    return ot
