"""Flower's simulation with Ray: three owners, two rounds, from the command line to a release, in processes of their own."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

from privot.federated.messages import Answer, Terms, unpack
from privot.federated.transcript import SEEN, read
from privot.privacy.ledger import Ledger
from privot.privacy.shard_checkpoint import vaults
from privot.release import Release, verify

KNOCK = "import sys, ray\ntry: ray.init(address=sys.argv[1], log_to_driver=False)\nexcept Exception: print('shut')"
SMALL = (
    "--set",
    "lessons=1",
    "--set",
    "warm=1",
    "--set",
    "width=4",
    "--set",
    "channels=4",
    "--set",
    "records=16",
)


def test_three_owners_and_two_rounds(privot, tmp_path):
    begun = time.monotonic()
    words = (
        "federate",
        "simulate",
        "--data",
        "digits",
        "--clients",
        3,
        "--epsilon",
        20,
        "--rounds",
        2,
        *SMALL,
        "--device",
        "cpu",
    )
    start = ("--set", "start=glyphs", "--set", "practice=2")
    code, out, err = privot(
        *words, *start, "--out", "release", "--record", "wire", "--ledger", "ledgers", "--json"
    )
    assert code == 0, err
    assert "learning to write: 2 of 2" in err
    took = time.monotonic() - begun
    facts = json.loads(out)
    assert (facts["rounds"], facts["answers"], facts["owners"], facts["offences"]) == (2, 6, 3, [])
    assert facts["guarantee"]["epsilon"] == pytest.approx(20.0)
    assert "rounds: 2 of 2" in err
    assert verify(tmp_path / "release")["epsilon_from_events"] == pytest.approx(20.0)
    assert Release.load(tmp_path / "release").sample(10)[0].shape == (10, 1, 8, 8)
    assert not (tmp_path / "release.run").exists()
    # What crossed is what the gates released, byte for byte, and each ledger has the price of the terms.
    seen: dict = {}
    for entry in read(tmp_path / "wire"):
        if entry.way == SEEN:
            seen.setdefault(entry.name, []).append(entry.message)
    for number in range(3):
        consent, *answers = seen[f"owner {number}"]
        assert isinstance(unpack(consent), Terms)
        assert [unpack(each).round for each in answers if isinstance(unpack(each), Answer)] == [
            0,
            1,
        ]
        ledger = Ledger(tmp_path / "ledgers" / f"owner-{number}.jsonl")
        known = [each["digest"] for each in ledger.entries() if each["kind"] == "commit"]
        assert known == [hashlib.sha256(each).hexdigest() for each in answers]
        assert ledger.spent().epsilon(1e-5) == pytest.approx(20.0)
    print(f"three owners, two rounds: {took:.1f} s")


@pytest.mark.slow
def test_twenty_owners_of_whom_five_are_asked_in_a_round(privot, tmp_path):
    words = (
        "federate",
        "simulate",
        "--data",
        "digits",
        "--clients",
        20,
        "--epsilon",
        20,
        "--rounds",
        6,
        *SMALL,
        "--set",
        "cohort=5",
    )
    code, out, err = privot(
        *words, "--device", "cpu", "--out", "release", "--ledger", "ledgers", "--json"
    )
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["rounds"], facts["answers"], facts["owners"], facts["offences"]) == (
        6,
        30,
        20,
        [],
    )
    books = [Ledger(tmp_path / "ledgers" / f"owner-{number}.jsonl") for number in range(20)]
    asked = [sum(each["kind"] == "ask" for each in book.entries()) for book in books]
    assert asked == [2] * 10 + [1] * 10
    assert not any(vaults(book) for book in books)


@pytest.mark.slow
def test_ray_opens_to_nobody_else():
    """Under its guard; without it, the same knock would be let in. Another cluster afterwards needs no word."""
    import ray

    from privot.federated.flower.simulation import _guarded

    stranger = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
    }
    for guard, said in ((_guarded(), "shut"), (contextlib.nullcontext(), "")):
        with guard:
            ray.init(
                num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error"
            )
            try:
                knock = [sys.executable, "-c", KNOCK, ray.get_runtime_context().gcs_address]
                assert (
                    subprocess.run(
                        knock, env=stranger, capture_output=True, text=True
                    ).stdout.strip()
                    == said
                )
            finally:
                ray.shutdown()
