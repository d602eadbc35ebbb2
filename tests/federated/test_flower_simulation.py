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

from privot.federated.messages import Answer, Terms, unpack_message
from privot.federated.transcript import RECEIVED_FROM_CLIENT, read_transcript
from privot.privacy.ledger import Ledger
from privot.privacy.shard_checkpoint import list_shard_checkpoints
from privot.release import Release
from privot.release.verify import verify

KNOCK = "import sys, ray\ntry: ray.init(address=sys.argv[1], log_to_driver=False)\nexcept Exception: print('shut')"
SMALL = (
    "--set",
    "critic_steps=1",
    "--set",
    "warmup_rounds=1",
    "--set",
    "critic_channels=4",
    "--set",
    "generator_channels=4",
    "--set",
    "records_per_critic=16",
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
    start = ("--set", "pretrain=glyphs", "--set", "pretrain_steps=2")
    code, out, err = privot(
        *words, *start, "--out", "release", "--transcript", "wire", "--ledger", "ledgers", "--json"
    )
    assert code == 0, err
    assert "pretraining the generator on characters: 2 of 2" in err
    took = time.monotonic() - begun
    facts = json.loads(out)
    assert (facts["rounds"], facts["answers"], facts["clients"], facts["offenses"]) == (2, 6, 3, [])
    assert facts["guarantee"]["epsilon"] == pytest.approx(20.0)
    assert "rounds: 2 of 2" in err
    assert verify(tmp_path / "release")["epsilon_from_events"] == pytest.approx(20.0)
    assert Release.load(tmp_path / "release").sample(10)[0].shape == (10, 1, 8, 8)
    assert not (tmp_path / "release.run").exists()
    # What crossed is what the gates released, byte for byte, and each ledger has the price of the terms.
    seen: dict = {}
    for entry in read_transcript(tmp_path / "wire"):
        if entry.direction == RECEIVED_FROM_CLIENT:
            seen.setdefault(entry.client_name, []).append(entry.message)
    for number in range(3):
        consent, *answers = seen[f"client {number}"]
        assert isinstance(unpack_message(consent), Terms)
        assert [
            unpack_message(each).round
            for each in answers
            if isinstance(unpack_message(each), Answer)
        ] == [
            0,
            1,
        ]
        ledger = Ledger(tmp_path / "ledgers" / f"client-{number}.jsonl")
        known = [each["digest"] for each in ledger.entries() if each["kind"] == "commit"]
        assert known == [hashlib.sha256(each).hexdigest() for each in answers]
        assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(20.0)
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
        "clients_per_round=5",
    )
    code, out, err = privot(
        *words, "--device", "cpu", "--out", "release", "--ledger", "ledgers", "--json"
    )
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["rounds"], facts["answers"], facts["clients"], facts["offenses"]) == (
        6,
        30,
        20,
        [],
    )
    books = [Ledger(tmp_path / "ledgers" / f"client-{number}.jsonl") for number in range(20)]
    asked = [sum(each["kind"] == "ask" for each in book.entries()) for book in books]
    assert asked == [2] * 10 + [1] * 10
    assert not any(list_shard_checkpoints(book) for book in books)


@pytest.mark.slow
def test_ray_opens_to_nobody_else():
    """Under its guard; without it, the same knock would be let in. Another cluster afterwards needs no word."""
    import ray

    from privot.federated.flower.simulation_guards import require_ray_token

    stranger = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
    }
    for guard, said in ((require_ray_token(), "shut"), (contextlib.nullcontext(), "")):
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
