"""On a GPU: neighbours as files move no answer beyond its bound, and answers are those of a CPU up to the rounding of float32.

Kernels of our own, captured graphs and cuBLAS run here as they do in a long run. Without a GPU all of it is skipped.
"""

import pytest
import torch
from contract.test_file_neighbours import CASES, Asked, boxes, declared, problems
from support.file_leaks import find_file_leaks
from support.neighbour_files import CHANGES, READERS, coupled_orders
from support.tiny_settings import choose_spec, choose_tiny_settings, has_no_mechanism, make_records

from privot.data.dataset import Sensitive
from privot.methods import list_methods, make_method
from privot.privacy import clipping as clipping_module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.privacy.sampling import Full
from privot.runtime import Runtime

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: its answers cannot be compared with a CPU's"
)

WITH_A_MECHANISM = [
    name
    for name in sorted(list_methods())
    if not has_no_mechanism(make_method(name, choose_tiny_settings(name)))
]


@pytest.mark.parametrize("reader", READERS)
def test_one_file_moves_no_answer_beyond_its_bound(reader, tmp_path):
    compared, wrong = problems(reader, tmp_path, device="cuda")
    assert wrong == []
    assert compared >= 50


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_answers_as_a_cpu_does(case, tmp_path):
    verb, relation, sampling = CASES[case]
    pair = boxes("npz", tmp_path, "one changed")
    order = coupled_orders(*pair)[0]
    here, there = (
        Asked(declared(pair[0], verb), verb, relation, sampling, order, device)
        .value()
        .cpu()
        .double()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WITH_A_MECHANISM)
def test_whole_methods_keep_to_their_bounds(name, tmp_path):
    """What is made of the answers may be rounded in another way at each run of a GPU; the answers themselves may not move too far."""
    method = make_method(name, choose_tiny_settings(name))
    changes = {kind: CHANGES[kind] for kind in ("one renamed", "one replaced", "one removed")}
    leaks = find_file_leaks(
        method,
        make_records(),
        choose_spec(method),
        tmp_path / "run",
        "npz",
        changes,
        Runtime("cuda", 16),
    )
    assert [leak for _, leak in leaks if "moves" in str(leak)] == []


def wide(image, label, weights):
    """A net with matrix products large enough for cuBLAS to choose among its ways."""
    x = torch.tanh(weights[0] @ image.flatten())
    return weights[1] @ torch.tanh(x)


@pytest.mark.parametrize("portion", [16, 64, 1000, 4000])
def test_a_part_does_not_depend_on_its_place_or_its_company(portion, monkeypatch):
    """To the bit: the same record first, in the middle and last of a portion, beside black, white and random images."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.randn(300, 784, device="cuda", generator=generator) / 28,
        torch.randn(500, 300, device="cuda", generator=generator) / 17,
    ]
    record = torch.rand(1, 28, 28, device="cuda", generator=generator)
    gate = object.__new__(Gate)
    gate._chunk_size = portion
    gate._stages = {"it": None}
    gate._device = torch.device("cuda")
    gate.plan = type("", (), {"neighbours": Neighbours.REPLACE, "stages": (None,)})()
    stage = Stage("it", "sum", 1.0, 1, Full())
    parts = set()
    for company in (torch.zeros, torch.ones, torch.rand):
        for place in (0, portion // 2, portion - 1):
            images = company(portion, 1, 28, 28, device="cuda")
            images[place] = record
            labels = torch.zeros(portion, dtype=torch.int64, device="cuda")
            part = gate._map_query(wide, images, labels, (weights,), stage)[place]
            parts.add(part.cpu().numpy().tobytes())
    assert len(parts) == 1


def test_the_kernel_adds_up_as_plain_code_does():
    parts = torch.randn(4000, 777, device="cuda")
    parts[17] = float("nan")
    plain = clipping_module.clip_to_grid(parts, 0.7, 2.0**-20).sum(0)
    assert torch.equal(clipping_module.sum_clipped_rows(parts, 0.7, 2.0**-20), plain)
    assert torch.equal(clipping_module.sum_clipped_rows(parts.cpu(), 0.7, 2.0**-20), plain.cpu())


def test_records_near_a_gpu_come_in_the_secret_order(tmp_path):
    pair = boxes("folder", tmp_path, "one changed")
    order = coupled_orders(*pair)[0]
    asked = Asked(declared(pair[0], "rows"), "rows", Neighbours.REPLACE, Full(), order, "cuda")
    near = asked.gate._load_records(slice(0, 7))
    far = Sensitive._read_records(pair[0], torch.from_numpy(order[:7]))
    torch.testing.assert_close(
        near.images.cpu(), far.images, rtol=1e-6, atol=0
    )  # bytes become floats by another division there
    assert torch.equal(near.labels.cpu(), far.labels)
