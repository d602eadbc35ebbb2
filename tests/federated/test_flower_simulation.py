"""`privot federate simulate`: from the command line to a release, in this process and with Flower's simulation on Ray."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

from support.in_process_federation import TINY_ARGUMENTS, simulate_here

from privot.federated.messages import Answer, Terms, unpack_message
from privot.federated.transcript import RECEIVED_FROM_CLIENT, read_transcript
from privot.privacy.ledger import Ledger
from privot.privacy.shard_checkpoint import list_shard_checkpoints
from privot.release import Release
from privot.release.verify import verify

SIMULATE = "federate simulate --data digits --epsilon 20 --device cpu --out release --json"
FILES = "--transcript wire --ledger ledgers"
CONNECT = (
    "import sys, ray\ntry: ray.init(address=sys.argv[1], log_to_driver=False)\n"
    "except Exception: print('refused')"
)


@pytest.mark.parametrize("on_ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_three_owners_and_two_rounds(privot, tmp_path, monkeypatch, on_ray):
    if not on_ray:
        simulate_here(monkeypatch)
    start = "--clients 3 --set pretrain=glyphs --set pretrain_steps=2"
    code, out, err = privot(*SIMULATE.split(), *start.split(), *FILES.split(), *TINY_ARGUMENTS)
    assert code == 0, err
    assert "pretraining the generator on characters: 2 of 2" in err
    facts = json.loads(out)
    assert (facts["rounds"], facts["clients"], facts["offenses"]) == (2, 3, [])
    assert facts["guarantee"]["epsilon"] == pytest.approx(20.0)
    if on_ray:
        assert facts["answers"] == 6
        assert "rounds: 2 of 2" in err
    assert verify(tmp_path / "release")["epsilon_from_events"] == pytest.approx(20.0)
    release = Release.load(tmp_path / "release")
    assert release.metadata["num_answers"] == 6
    assert release.sample(10)[0].shape == (10, 1, 8, 8)
    assert not (tmp_path / "release.run").exists()
    # What crossed is what the gates released, byte for byte, and each ledger has the price of the terms.
    received: dict = {}
    for entry in read_transcript(tmp_path / "wire"):
        if entry.direction == RECEIVED_FROM_CLIENT:
            received.setdefault(entry.client_name, []).append(entry.message)
    for number in range(3):
        consent, *answers = received[f"client {number}"]
        assert isinstance(unpack_message(consent), Terms)
        messages = [unpack_message(raw) for raw in answers]
        assert all(isinstance(message, Answer) for message in messages)
        assert [message.round for message in messages] == [0, 1]
        ledger = Ledger(tmp_path / "ledgers" / f"client-{number}.jsonl")
        assert [entry["digest"] for entry in ledger.entries() if entry["kind"] == "commit"] == [
            hashlib.sha256(raw).hexdigest() for raw in answers
        ]
        assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(20.0)


@pytest.mark.slow
def test_twenty_owners_of_whom_five_are_asked_in_a_round(privot, tmp_path):
    cohort = "--clients 20 --set clients_per_round=5 --ledger ledgers"
    code, out, err = privot(
        *SIMULATE.split(), *cohort.split(), *TINY_ARGUMENTS, "--set", "rounds=6"
    )
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["rounds"], facts["answers"], facts["clients"]) == (6, 30, 20)
    assert facts["offenses"] == []
    ledgers = [Ledger(tmp_path / "ledgers" / f"client-{number}.jsonl") for number in range(20)]
    asked = [sum(entry["kind"] == "ask" for entry in ledger.entries()) for ledger in ledgers]
    assert asked == [2] * 10 + [1] * 10
    assert not any(list_shard_checkpoints(ledger) for ledger in ledgers)


@pytest.mark.slow
def test_ray_opens_to_nobody_else():
    """Under its guard; without it, the same stranger would be let in. Another cluster afterwards needs no token."""
    import ray

    from privot.federated.flower.simulation_guards import require_ray_token

    stranger = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    for guard, output in ((require_ray_token(), "refused"), (contextlib.nullcontext(), "")):
        with guard:
            ray.init(
                num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error"
            )
            try:
                address = ray.get_runtime_context().gcs_address
                command = [sys.executable, "-c", CONNECT, address]
                done = subprocess.run(command, env=stranger, capture_output=True, text=True)
                assert done.stdout.strip() == output
            finally:
                ray.shutdown()
