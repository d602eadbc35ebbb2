"""The one-pass sum of clipped rows: to the bit what the plain one gives, on a GPU or in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from privot.privacy import clipping as clipping_module

SCRIPT = """
import torch
from privot.privacy.kernels.clipped_sum import sum_truncated_products
from privot.privacy.clipping import clip_to_grid, compute_clip_factors
draw = torch.Generator().manual_seed(0)
for rows, numbers in ((1, 5), (33, 700), (16, 256)):
    parts = torch.randn(rows, numbers, generator=draw) * torch.logspace(-3, 3, rows)[:, None]
    if rows > 5:
        parts[3], parts[4, 2] = float("nan"), float("inf")
    factors = compute_clip_factors(parts, 1.0, 2.0**-20)
    plain = clip_to_grid(parts, 1.0, 2.0**-20).sum(0)
    assert torch.equal(plain, sum_truncated_products(parts, factors)), rows
"""


def test_the_kernel_gives_the_plain_sum_in_the_interpreter():
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(("rows", "shape"), [(1, (3,)), (4000, (1, 28, 28)), (700, (187_115,))])
def test_on_a_gpu_a_total_is_the_plain_sum_to_the_bit(rows, shape):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    draw = torch.Generator("cuda").manual_seed(0)
    parts = torch.randn(rows, *shape, generator=draw, device="cuda") / 20
    parts[rows // 2] = float("nan")
    plain = clipping_module.clip_to_grid(parts, 1.0, 2.0**-24).sum(0)
    assert torch.equal(clipping_module.sum_clipped_rows(parts, 1.0, 2.0**-24), plain)


def test_factors_are_powers_of_two_apart_for_units():
    """So that clipping in units of the grid is clipping, then dividing by the grid, to the bit."""
    parts = torch.randn(50, 9, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(
        clipping_module.clip_rows(parts, 1.0, 2.0**-24),
        clipping_module.clip_rows(parts, 1.0) * 2.0**24,
    )
