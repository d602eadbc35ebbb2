"""Kernels without a GPU: in a process where Triton interprets them, in full precision."""

import os
import subprocess
import sys


def run_interpreted(code):
    """Run code that prints "right" at its end."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout == "right\n", done.stderr
