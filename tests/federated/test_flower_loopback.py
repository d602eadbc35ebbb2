"""A real federation on this machine: a SuperLink and five SuperNodes in processes of their own, with TLS and node keys."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

import httpx

from privot.federated.flower.keys import make_keys
from privot.federated.transcript import read_transcript
from privot.privacy.ledger import Ledger
from privot.release.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOSPITALS = [f"hospital-{number}" for number in range(1, 6)]
ROUNDS = 15  # those without one of them take ten seconds more, so it comes back in time


@pytest.fixture
def started(tmp_path):
    """Start `privot federate WORDS` as a process of its own; whatever still runs at the end is ended."""
    running = []

    def start(name, *words):
        environment = os.environ | {"PRIVOT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        with open(tmp_path / f"{name}.out", "w") as out, open(tmp_path / f"{name}.err", "w") as err:
            command = [sys.executable, "-m", "privot", "federate", *map(str, words)]
            running.append(
                subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path, env=environment)
            )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(what, process, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.2)


def test_five_hospitals(started, tmp_path):
    """One of them is killed and comes back, a stranger knocks, and the server's other doors stay shut."""
    make_keys(tmp_path / "keys", HOSPITALS, ["127.0.0.1"])
    make_keys(tmp_path / "forged", ["hospital-1"], ["127.0.0.1"])
    server = f"127.0.0.1:{free_port()}"

    def text(name):
        return Path(tmp_path / name).read_text()

    small = [
        word
        for each in (
            "critic_steps=1",
            "warmup_rounds=1",
            "critic_channels=4",
            "generator_channels=4",
            "records_per_critic=16",
        )
        for word in ("--set", each)
    ]
    main = started(
        "server",
        "server",
        "--address",
        server,
        "--tls",
        "keys",
        "--client-keys",
        "keys/nodes",
        "--spec-from",
        "digits",
        "--epsilon",
        20,
        "--rounds",
        ROUNDS,
        *small,
        "--round-timeout",
        30,
        "--out",
        "release",
        "--transcript",
        "wire",
        "--device",
        "cpu",
        "--json",
    )

    def hospital(number, name, folder="keys"):
        return started(
            name,
            "client",
            "--data",
            "digits",
            "--partition",
            f"{number}/5",
            "--server",
            server,
            "--ca",
            "keys/ca.crt",
            "--key",
            f"{folder}/hospital-{number + 1}.key",
            "--epsilon",
            20,
            "--ledger",
            f"{name.split()[0]}.jsonl",
            "--device",
            "cpu",
            "--idle-timeout",
            120,
            "--json",
        )

    clients = [hospital(number, name) for number, name in enumerate(HOSPITALS)]
    until(lambda: "open" in text("server.err"), main)
    stranger = hospital(0, "stranger", "forged")  # by a key that is on nobody's list
    trusting = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.crt"))
    for path in (
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
    ):
        assert httpx.post(f"https://{server}{path}", verify=trusting).status_code == 404
    for path in (
        "push-object",
        "push-messages",
        "activate-node",
    ):  # 100 MB of anybody's, of which next to nothing is read
        status = 0
        with contextlib.suppress(
            httpx.WriteError, httpx.RemoteProtocolError
        ):  # the line is cut while we speak
            long = (bytes(1 << 20) for _ in range(100))
            status = httpx.post(
                f"https://{server}/v1/fleet/{path}", content=long, verify=trusting
            ).status_code
        assert status in (0, 413)
    with pytest.raises(httpx.ConnectError):
        httpx.post(
            f"https://{server}/v1/fleet/activate-node"
        )  # whoever does not know the authority does not talk to it

    until(lambda: "answers:" in text("hospital-5.err"), main)
    clients[4].send_signal(signal.SIGKILL)
    clients[4].wait()
    back = hospital(4, "hospital-5 again")
    assert main.wait(600) == 0, text("server.err")
    facts = json.loads(text("server.out"))
    assert facts["rounds"] == ROUNDS
    assert facts["answers"] >= 4 * ROUNDS
    assert {each["client"] for each in facts["offenses"]} <= {"hospital-5"}
    assert not any(each["disqualifying"] for each in facts["offenses"])
    assert verify(tmp_path / "release")["epsilon_from_events"] == pytest.approx(20.0)

    for number, process in enumerate(clients[:4]):
        assert process.wait(200) == 0, text(f"hospital-{number + 1}.err")
        said = json.loads(text(f"hospital-{number + 1}.out"))
        assert (said["rounds"], said["refusals"]) == (ROUNDS, [])
    assert back.wait(200) == 0, text("hospital-5 again.err")
    assert 0 < json.loads(text("hospital-5 again.out"))["rounds"] < ROUNDS
    for name in HOSPITALS:
        assert Ledger(tmp_path / f"{name}.jsonl").compute_spent_cost().epsilon(
            1e-5
        ) == pytest.approx(20.0)
    assert stranger.wait(200) == 2
    assert "refuses this node" in text("stranger.err")
    assert not Ledger(tmp_path / "stranger.jsonl").entries()
    assert {entry.client_name for entry in read_transcript(tmp_path / "wire")} == set(HOSPITALS)
