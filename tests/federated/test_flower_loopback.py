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

import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

import httpx
from support.in_process_federation import TINY_ARGUMENTS

from privot.federated.flower.keys import make_keys
from privot.federated.transcript import read_transcript
from privot.privacy.ledger import Ledger
from privot.release.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOSPITALS = [f"hospital-{number}" for number in range(1, 6)]
ROUNDS = 15  # those without one of them take ten seconds more, so it comes back in time
COMMON = "--epsilon 20 --device cpu --json"
SERVER = (
    "server --tls keys --client-keys keys/nodes --spec-from digits --round-timeout 30"
    f" --out release --transcript wire {COMMON}"
)
CLIENT = f"client --data digits --ca keys/ca.crt --idle-timeout 120 {COMMON}"


@pytest.fixture
def start(tmp_path):
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


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_text(path, text, process, seconds=300):
    end = time.monotonic() + seconds
    while text not in path.read_text():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.2)


def test_five_hospitals(start, tmp_path):
    """One of them is killed and comes back, a stranger tries to join, and the server refuses all other calls."""
    make_keys(tmp_path / "keys", HOSPITALS, ["127.0.0.1"])
    make_keys(tmp_path / "forged", ["hospital-1"], ["127.0.0.1"])
    address = f"127.0.0.1:{find_free_port()}"
    rounds = ("--set", f"rounds={ROUNDS}")
    main = start("server", *SERVER.split(), "--address", address, *TINY_ARGUMENTS, *rounds)

    def start_hospital(number, name, folder="keys"):
        own = f"--partition {number}/5 --server {address} --ledger {name.split()[0]}.jsonl"
        key = f"{folder}/hospital-{number + 1}.key"
        return start(name, *CLIENT.split(), *own.split(), "--key", key)

    def read(name):
        return (tmp_path / name).read_text()

    clients = [start_hospital(number, name) for number, name in enumerate(HOSPITALS)]
    wait_for_text(tmp_path / "server.err", "open", main)
    stranger = start_hospital(0, "stranger", "forged")  # by a key that is on nobody's list
    trusting = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.crt"))
    for path in ("control/register-node", "control/start-run", "runtime/acquire-task"):
        assert httpx.post(f"https://{address}/v1/{path}", verify=trusting).status_code == 404
    assert httpx.post(f"https://{address}/docs", verify=trusting).status_code == 404
    for path in ("push-object", "push-messages", "activate-node"):
        status = 0  # 100 MB of anybody's, of which next to nothing is read
        with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):  # it is cut off
            content = (bytes(1 << 20) for _ in range(100))
            url = f"https://{address}/v1/fleet/{path}"
            status = httpx.post(url, content=content, verify=trusting).status_code
        assert status in (0, 413)
    with pytest.raises(httpx.ConnectError):  # for whoever does not trust the authority
        httpx.post(f"https://{address}/v1/fleet/activate-node")

    wait_for_text(tmp_path / "hospital-5.err", "answers:", main)
    clients[4].send_signal(signal.SIGKILL)
    clients[4].wait()
    back = start_hospital(4, "hospital-5 again")
    assert main.wait(600) == 0, read("server.err")
    facts = json.loads(read("server.out"))
    assert facts["rounds"] == ROUNDS
    assert facts["answers"] >= 4 * ROUNDS
    assert {offense["client"] for offense in facts["offenses"]} <= {"hospital-5"}
    assert not any(offense["disqualifying"] for offense in facts["offenses"])
    assert verify(tmp_path / "release")["epsilon_from_events"] == pytest.approx(20.0)

    for number, process in enumerate(clients[:4], 1):
        assert process.wait(200) == 0, read(f"hospital-{number}.err")
        facts = json.loads(read(f"hospital-{number}.out"))
        assert (facts["rounds"], facts["refusals"]) == (ROUNDS, [])
    assert back.wait(200) == 0, read("hospital-5 again.err")
    assert 0 < json.loads(read("hospital-5 again.out"))["rounds"] < ROUNDS
    for name in HOSPITALS:
        cost = Ledger(tmp_path / f"{name}.jsonl").compute_spent_cost()
        assert cost.epsilon(1e-5) == pytest.approx(20.0)
    assert stranger.wait(200) == 2
    assert "refuses this node" in read("stranger.err")
    assert not Ledger(tmp_path / "stranger.jsonl").entries()
    assert {entry.client_name for entry in read_transcript(tmp_path / "wire")} == set(HOSPITALS)
