"""What a figure depends on beside the code that is timed: the machine, the commit, and the peers that are at hand."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Of this tree; an archive of it (`git archive`) carries its own in a file."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent)
    carried = (Path(__file__).parent / "commit.txt").read_text().strip()
    return done.stdout.strip() or ("unknown" if carried.startswith("$") else carried)


def pot() -> Any:
    """The package POT, or None; kept from loading other frameworks, which would take the GPU's memory."""
    for backend in ("JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    try:
        import ot
    except ImportError:
        return None
    return ot
