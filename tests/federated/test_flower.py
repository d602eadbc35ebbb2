"""Our end of Flower, without its processes: what it carries, whom it asks, what it says of failures, and which calls it refuses."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import telemetry, update_check
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from support.federation import ROOMY, RUN, Ward, is_answer, pack_request, serving, terms, wards

from privot.cli.client_progress import CLIENT_STOPPED_MESSAGE, ClientMonitor
from privot.errors import DataError, ReleaseError, SettingError
from privot.federated import pack_message
from privot.federated.flower import server_app, simulation, supernode
from privot.federated.flower.client_app import build_client_app
from privot.federated.flower.codec import unwrap_message, wrap_message
from privot.federated.flower.grid import NonBlockingGrid
from privot.federated.flower.http_limits import SECRET_HEADER
from privot.federated.flower.keys import make_keys, read_node_keys
from privot.federated.flower.server_app import ClientMessenger, run_federation
from privot.federated.flower.superlink import split_address
from privot.federated.flower.superlink_firewall import SuperLinkFirewall
from privot.federated.flower.supernode import check_private_key
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.privacy.shard_checkpoint import list_shard_checkpoints
from privot.runtime import ignore_progress

TERMS = terms()
CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Flower's messages want to know in which run they are made; no test waits for a poll."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(server_app, "MIN_POLL_SECONDS", 0.0)
    monkeypatch.setattr(server_app, "OFFLINE_WAIT_SECONDS", 0.0)


class Grid:
    """Flower's grid with nodes in this process: each is a function from a message to its reply, or None if there is none."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.online = set(nodes)
        self.sent = []
        self.replies = {}

    def get_node_ids(self):
        return list(self.online)

    def push_messages(self, messages):
        for message in messages:
            number = message.object_id
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            if reply := self.nodes[message.metadata.dst_node_id](message):
                self.replies[number] = reply
            yield number

    def pull_messages(self, numbers):
        return [self.replies.pop(number) for number in numbers if number in self.replies]


def make_node(owner, fails=lambda: False):
    app = build_client_app(lambda context: owner)

    def answer(message):
        return Message(Error(1, "gone"), reply_to=message) if fails() else app(message, CONTEXT)

    return answer


def make_federation(tmp_path, **fails):
    """A server, its messenger, and owners that fail as ``fails`` says."""
    everyone = wards(tmp_path)
    nodes = {
        10 + number: make_node(ward, fails.get(f"ward{number}", lambda: False))
        for number, ward in enumerate(everyone.values())
    }
    grid = Grid(nodes)
    messenger = ClientMessenger(grid, dict(zip(everyone, nodes, strict=True)))
    return serving(terms(owners=len(everyone)), everyone, tmp_path), messenger, grid, everyone


def run(server, messenger, **more):
    return run_federation(server, messenger, **({"join_timeout": 5.0, "round_timeout": 5.0} | more))


def exchange(messenger, names, *seconds, **more):
    return list(messenger.exchange_messages(dict.fromkeys(names, b"x"), *seconds, **more))


# Polling


class Clock:
    """Time that passes only when somebody sleeps, or polls for replies."""

    def __init__(self, grid, poll_seconds):
        self.now = 0.0
        self.slept = []
        pull = grid.pull_messages

        def pull_slowly(numbers):
            self.now += poll_seconds
            return pull(numbers)

        grid.pull_messages = pull_slowly

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)


@pytest.mark.parametrize(("poll_seconds", "rest"), [(0.001, 0.1), (1.0, 4.0)])
def test_polling_takes_a_fifth_of_the_time_at_most(poll_seconds, rest, monkeypatch):
    grid = Grid({1: lambda message: None})
    monkeypatch.setattr(server_app, "time", clock := Clock(grid, poll_seconds))
    monkeypatch.setattr(server_app, "MIN_POLL_SECONDS", 0.1)
    assert exchange(ClientMessenger(grid, {"silent": 1}), ["silent"], 20.0) == []
    assert set(clock.slept) == {rest}


@pytest.mark.parametrize(("poll_seconds", "is_counted"), [(0.0, False), (6.0, True)])
def test_a_round_that_lasts_counts_its_answers(tmp_path, monkeypatch, poll_seconds, is_counted):
    server, messenger, grid, everyone = make_federation(tmp_path)
    monkeypatch.setattr(server_app, "time", Clock(grid, poll_seconds))
    steps = []
    run(
        server,
        messenger,
        join_timeout=60.0,
        round_timeout=60.0,
        progress=lambda *step, **facts: steps.append(step),
    )
    assert sum(stage == "rounds" for stage, *_ in steps) == server.terms.settings.rounds
    assert (("answers in this round", 1, len(everyone)) in steps) is is_counted


# What Flower carries


def make_record(**fields):
    return RecordDict({"privot": ConfigRecord(fields)})


def test_anything_but_one_field_of_bytes_is_no_message():
    assert unwrap_message(wrap_message(b"x")) == b"x"
    field = ConfigRecord({"message": b"x"})
    for content in (
        RecordDict(),
        RecordDict({"other": field}),
        make_record(message="text"),
        make_record(message=b"x", more=1),
        make_record(message=[b"x"]),
        RecordDict({"privot": field, "beside": ConfigRecord({"count": 3})}),
        RecordDict({"privot": ArrayRecord([np.zeros(3)])}),
    ):
        assert unwrap_message(content) == b""


def test_an_owner_who_cannot_answer_says_only_that():
    warnings = []

    def fail(context):
        raise DataError("patient 17 has a bad scan")

    app = build_client_app(fail, warnings.append)
    reply = app(Message(wrap_message(b"x"), 5, "query"), CONTEXT)
    assert reply.has_error()
    assert "patient" not in reply.error.reason
    assert "patient 17" in str(warnings[0])


def test_flower_sends_no_telemetry(monkeypatch):
    monkeypatch.setattr(
        telemetry.urllib.request, "urlopen", lambda *_, **__: pytest.fail("telemetry")
    )
    monkeypatch.setattr(update_check.requests, "post", lambda *_, **__: pytest.fail("update check"))
    assert telemetry.create_event(telemetry.EventType.PING, None) == "disabled"
    update_check.warn_if_flwr_update_available("privot")


def test_the_rest_runs_without_flower(tmp_path):
    """In a Python where Flower and Ray cannot be imported."""
    script = (
        "import sys; sys.modules['flwr'] = sys.modules['ray'] = None\n"
        "import privot, privot.federated, privot.cli\n"
        "sys.argv = ['privot', 'federate', 'keys', '--out', 'keys']\n"
        "privot.cli.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "pip install 'privot[federated]'" in ended.stderr
    assert not (tmp_path / "keys").exists()


# A run


@pytest.mark.usefixtures("one_thread")
def test_a_run_over_the_grid(tmp_path):
    server, messenger, grid, everyone = make_federation(tmp_path)
    steps = []
    traffic = run(server, messenger, progress=lambda *step, **facts: steps.append(step))
    assert (server.is_finished, server.num_answers, server.offenses) == (True, 9, [])
    assert steps[-1] == ("rounds", 3, 3)
    assert server.build_release().guarantee.epsilon == pytest.approx(everyone["ward 0"].spent())
    assert len({message.metadata.group_id for message in grid.sent}) == len(grid.sent)
    assert {tuple(message.content) for message in grid.sent} == {("privot",)}
    num_bytes = sum(len(unwrap_message(message.content)) for message in grid.sent[3:])
    assert (traffic.bytes_sent, traffic.num_answers) == (num_bytes, 9)


@pytest.mark.usefixtures("one_thread")
def test_who_fails_is_passed_over_and_may_come_back(tmp_path):
    calls = []

    def fails():
        calls.append(1)
        return len(calls) == 3  # its consent, then a round, then this

    server, messenger, _, everyone = make_federation(tmp_path, ward1=fails)
    run(server, messenger)
    assert (server.is_finished, server.num_answers) == (True, 8)
    assert [(off.client_name, off.round, off.disqualifying) for off in server.offenses] == [
        ("ward 1", 1, False)
    ]
    assert len({round(ward.spent(), 9) for ward in everyone.values()}) == 1


def test_when_all_fail_or_refuse_the_run_ends_in_an_error(tmp_path):
    failing = {f"ward{number}": lambda: True for number in range(3)}
    server, messenger, _, everyone = make_federation(tmp_path / "failing", **failing)
    with pytest.raises(ReleaseError, match="No client agreed"):
        run(server, messenger)
    assert not any(ward.spent() for ward in everyone.values())
    server, messenger, _, everyone = make_federation(tmp_path / "poor")
    for number, ward in enumerate(everyone.values()):
        poor = Ward(tmp_path / f"poor{number}", number, budget=Budget(0.1, 1e-5))
        ward.owner = poor.owner
    with pytest.raises(ReleaseError, match=r"No client agreed.*ward 0: .*budget"):
        run(server, messenger)


@pytest.mark.usefixtures("one_thread")
def test_a_round_that_nobody_answers_stops_the_run_and_costs_none_of_it(tmp_path):
    away = []
    fails = {f"ward{number}": lambda: bool(away) for number in range(3)}
    server, messenger, _, _ = make_federation(tmp_path, **fails)

    def leave(stage, step, of, **facts):
        if (stage, step) == ("rounds", 1):
            away.append(True)

    with pytest.raises(ReleaseError, match="No client answered in round 1"):
        run(server, messenger, progress=leave)
    away.clear()
    again = serving(server.terms, server.client_names, tmp_path)
    assert again.round == 1
    run(again, messenger)
    assert (again.is_finished, again.num_answers) == (True, 9)


def test_silent_nodes_are_waited_for_only_so_long_or_until_a_stop():
    here = {1: lambda message: Message(wrap_message(b"here"), reply_to=message)}
    grid = Grid({**here, 2: lambda message: None})
    grid.online = {1}
    messenger = ClientMessenger(grid, {"near": 1, "far": 2})
    names = ("near", "far")
    assert exchange(messenger, names, 60.0, offline_timeout=0.0) == [("near", b"here")]
    grid.online = {1, 2}  # connected, and silent
    assert exchange(messenger, names, 0.05) == [("near", b"here")]
    messenger = ClientMessenger(grid, {"far": 2}, should_stop=lambda: True)
    with pytest.raises(ReleaseError, match="--resume"):
        exchange(messenger, ["far"], 60.0)


@pytest.mark.usefixtures("one_thread")
def test_when_a_simulation_is_over_no_critic_is_left(tmp_path):
    """One that missed its last turn, say."""
    folders = (tmp_path / "run", tmp_path / "ledgers")
    cast = simulation.ClientSimulation("digits", 3, ROOMY, *folders, "cpu", "client")
    for number in range(2):
        cast.build_client(number).reply(pack_message(TERMS))
    assert is_answer(cast.build_client(0).reply(pack_request(0)))
    ledger = Ledger(tmp_path / "ledgers" / "client-0.jsonl")
    assert list_shard_checkpoints(ledger)
    cast.end_unfinished_clients()
    assert list_shard_checkpoints(ledger) == {}
    assert not (tmp_path / "ledgers" / "client-1.jsonl").exists()  # nothing is charged for it


@pytest.mark.parametrize(
    ("owners", "bytes_per_owner", "cores", "gigabytes", "count"),
    [
        (3, 0, 8, 64, 1),
        (20, 0, 8, 64, 5),
        (300, 0, 64, 64, 64),
        (300, 1.5e9, 64, 64, 16),
        (300, 0, 64, 4, 4),
        (300, 1e12, 2, 4, 1),
    ],
)
def test_as_many_workers_as_the_machine_can_hold(
    monkeypatch, owners, bytes_per_owner, cores, gigabytes, count
):
    pages = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": gigabytes * 10**6}
    monkeypatch.setattr(simulation.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(simulation.os, "sysconf", pages.get)
    assert simulation._choose_num_workers(owners, bytes_per_owner) == count


# The firewall of the SuperLink


async def respond(scope, receive, send):
    await send({"status": 200})


def call(app, path, headers=(), kind="http", body=()):
    """The status that a call gets."""
    statuses = []
    parts = iter(body)

    async def receive():
        part = next(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def send(message):
        statuses.append(message.get("status"))

    asyncio.run(app({"type": kind, "path": path, "headers": list(headers)}, receive, send))
    return statuses[0] if statuses else None


def test_only_nodes_and_those_who_know_the_secret_come_in():
    app = SuperLinkFirewall(respond, "word", 0)
    right, wrong, empty = ([(SECRET_HEADER.encode(), word)] for word in (b"word", b"wor", b""))
    assert call(app, "/v1/fleet/pull-messages") == 200
    control = "/v1/control/start-run"
    for path in (
        "/v1/control/register-node",
        control,
        "/v1/runtime/acquire-task",
        "/docs",
        "/health",
        "/v1/fleet",
    ):
        statuses = [call(app, path), call(app, path, wrong), call(app, path, right)]
        assert statuses == [404, 404, 200]
    assert call(app, "/v1/fleet/x", kind="websocket") is None
    assert call(app, "", kind="lifespan") == 200
    for headers in ((), empty, wrong):  # a server without a secret lets nobody in
        assert call(SuperLinkFirewall(respond, "", 0), control, headers) == 404


def test_a_long_call_is_not_read_to_its_end():
    """Flower would read 2 GiB of it before it asks who is calling."""
    bodies = []
    parts_read = []
    limit = 3 << 20

    async def read_body(scope, receive, send):
        bodies.append((await receive())["body"])
        await send({"status": 200})

    def send_parts():
        for number in range(100):
            parts_read.append(number)
            yield bytes(1 << 20)

    app = SuperLinkFirewall(read_body, "word", limit)
    for path, count in (
        ("push-object", 4),
        ("push-messages", 1),
        ("activate-node", 1),
        ("pull-messages", 1),
    ):
        parts_read.clear()
        assert call(app, f"/v1/fleet/{path}", body=send_parts()) == 413
        assert (len(parts_read), bodies) == (count, [])
    assert call(app, "/v1/fleet/push-object", body=[bytes(limit), b"end"]) == 200
    assert bodies == [bytes(limit) + b"end"]


@pytest.mark.parametrize(
    ("replies", "parts", "status"),
    [(["x"], 3, 200), (["x"], 1, 200), (["x"], 4, 413), ([""], 1, 413), (["x", ""], 2, 413)],
)
def test_a_node_announces_replies_of_few_parts(replies, parts, status):
    """What is announced is what Flower would store; and a message that answers none would go to other owners."""
    tree = ObjectTree(object_id="0" * 64)
    for number in range(1, parts):
        tree.children.append(ObjectTree(object_id=f"{number:064x}"))
    pushed = PushMessagesRequest(message_object_trees=[tree])
    for reply in replies:
        pushed.messages_list.add().metadata.reply_to_message_id = reply
    app = SuperLinkFirewall(respond, "word", 0)
    path = "/v1/fleet/push-messages"
    assert call(app, path, body=[pushed.SerializeToString()]) == status
    assert call(app, path, body=[b"\xff" * 100]) == 413


# The SuperNode


SUPERNODE = """
import httpx, json, os
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from privot.federated.flower import supernode_patches
supernode_patches.patch_supernode()

class Server(httpx.BaseTransport):
    asked = []
    def handle_request(self, request):
        self.asked.append(request)
        kind = request.url.path.rpartition("/")[2]
        if kind == "elsewhere":
            return httpx.Response(302, headers={"location": "http://intranet/device"})
        if kind == "packed":
            return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Long(1))
        return httpx.Response(200, stream=Long(int(request.headers["x-size"])))

class Long(httpx.SyncByteStream):
    def __init__(self, size): self.size, self.read = size, 0
    def __iter__(self):
        while self.read < self.size:
            self.read += (step := min(1 << 16, self.size - self.read))
            yield bytes(step)

client = ProtobufClient("http://server")._client
client._transport, client._mounts = Server(), {}
def request(path, size=0):
    try:
        response = client.send(client.build_request("POST", f"http://server/v1/fleet/{path}", headers={"x-size": str(size)}))
        return [response.status_code, len(response.content)]
    except ValueError as error:
        return [type(error).__name__, 0]
most, little = supernode_patches.MAX_PACKED_MESSAGE_BYTES, supernode_patches.RESPONSE_OVERHEAD_BYTES
results = {"asked": [request("elsewhere"), len(Server.asked)], "packed": request("packed"), "short": request("get-run", little),
         "long": request("get-fab", little + 1), "part": request("pull-object", most), "too long": request("pull-object", most + little + 1),
         "wants": Server.asked[0].headers["accept-encoding"]}
try:
    start_client_internal.pull_objects(list("abcd"), pull_object_fn=lambda name: b"")
except supernode_patches.OversizedResponseError as error:
    results["parts"] = str(error)
results["few"] = sorted(start_client_internal.pull_objects(list("abc"), pull_object_fn=lambda name: b"x"))
results["bundle"] = start_client_internal.get_fused_config_from_fab(b"no zip", None)
results["seconds"] = InMemoryNodeState.get_message_processing_duration(None, message_id="x")
results["no_proxy"] = os.environ["no_proxy"]
plain = httpx.Client()
results["direct"] = [
    plain._transport_for_url(httpx.URL(url)) is plain._transport
    for url in ("http://127.0.0.1:9", "http://[::1]:9", "http://far:9")
]
print(json.dumps(results))
"""


def test_a_supernode_takes_little_and_tells_nothing_else():
    """It goes nowhere else at the server's word, reads no endless answer, opens no bundle, does not say how long the owner took, and
    uses no proxy within this machine."""
    proxies = {"http_proxy": "http://proxy:1", "no_proxy": "intranet"}
    done = subprocess.run(
        [sys.executable, "-c", SUPERNODE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], **proxies},
    )
    most = 1 << 26
    little = 1 << 18
    assert json.loads(done.stdout) == {
        "asked": [[302, 0], 1],
        "packed": ["OversizedResponseError", 0],
        "short": [200, little],
        "long": ["OversizedResponseError", 0],
        "part": [200, most],
        "too long": ["OversizedResponseError", 0],
        "wants": "identity",
        "parts": "The message has 4 parts.",
        "few": ["a", "b", "c"],
        "bundle": {},
        "seconds": 0.0,
        "no_proxy": "intranet,127.0.0.1,localhost,::1",
        "direct": [True, True, False],
    }


@pytest.mark.parametrize("kind", ["train", "query.other", "evaluate"])
def test_a_message_of_another_kind_gets_no_reply_and_ends_nobody(monkeypatch, kind):
    """Flower raises where no function is registered: in our loop this would end the client's process."""
    sent = []
    task = (Message(wrap_message(b"x"), 5, kind), CONTEXT, None, None)
    heartbeat = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(supernode, "pull_task_input", lambda client: task)
    monkeypatch.setattr(supernode, "push_message", lambda client, *message: sent.append(message))
    monkeypatch.setattr(supernode, "push_task_output", lambda *_: sent.append(None))
    monkeypatch.setattr(supernode, "HeartbeatSender", lambda beat: heartbeat)
    app = build_client_app(lambda context: pytest.fail("the owner was asked"))
    supernode._answer_message(app, "127.0.0.1:1", "secret", "token")
    assert sent == []


class Link:
    """A SuperLink, by Flower's own names: announced replies by the message they answer, and those of their parts that came."""

    def __init__(self):
        self.replies = {}
        self.parts = {}

    def announce(self, number, message, whole=True):
        message.metadata.__dict__["_message_id"] = message.object_id
        announcement = message_to_proto(remove_content_from_message(message))
        announcement.metadata.reply_to_message_id = number  # what comes later may say otherwise
        self.replies[number] = announcement, get_object_tree(message)
        parts = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
        self.parts |= parts if whole else {}
        return parts

    def PullMessages(self, request):
        pulled = [
            self.replies.pop(number)
            for number in list(request.message_ids)
            if number in self.replies
        ]
        return SimpleNamespace(
            messages_list=[message for message, _ in pulled],
            message_object_trees=[tree for _, tree in pulled],
        )

    def PullObject(self, request):
        content = self.parts.get(request.object_id, b"")
        return SimpleNamespace(
            object_found=True, object_available=bool(content), object_content=content
        )

    def ConfirmMessageReceived(self, request):
        pass


def test_the_grid_waits_for_no_node():
    """One announces a reply and never sends it, one sends parts that are no message, one says that it answers somebody else."""
    grid = NonBlockingGrid("127.0.0.1:1", b"", "token")
    link = Link()
    grid._client = link
    grid.set_run(Run.create_empty(1))
    queries = [Message(wrap_message(b"?"), 7, "query", group_id=str(number)) for number in range(4)]
    for query in queries:
        query.metadata.__dict__["_message_id"] = query.object_id
    numbers = [query.object_id for query in queries]

    def announce(index, content, answers=None, **more):
        reply = Message(wrap_message(content), reply_to=queries[index if answers is None else 0])
        return link.announce(numbers[index], reply, **more)

    announce(0, b"honest")
    rest = announce(1, b"slow", whole=False)
    link.parts |= dict.fromkeys(announce(2, b"odd"), b"ConfigRecord  4\0junk")
    announce(3, b"in her name", answers=0)
    replies = {
        reply.metadata.reply_to_message_id: unwrap_message(reply.content)
        for reply in grid.pull_messages(numbers)
    }
    assert replies == {numbers[0]: b"honest", numbers[2]: b"", numbers[3]: b""}
    assert grid.pull_messages(numbers[1:2]) == []
    link.parts |= rest
    assert [unwrap_message(reply.content) for reply in grid.pull_messages(numbers[1:2])] == [
        b"slow"
    ]


# Keys


def test_keys_for_a_trial(tmp_path, privot):
    code, out, err = privot("federate", "keys", "--out", "keys", "--json")
    assert code == 0, err
    folder = tmp_path / "keys"
    hospitals = [f"hospital-{number}" for number in range(1, 6)]
    assert sorted(json.loads(out)) == sorted(
        ["ca.crt", "server.crt", "server.key", "nodes", *(f"{name}.key" for name in hospitals)]
    )
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert list(read_node_keys(folder / "nodes")) == hospitals
    for name in hospitals:
        check_private_key(folder / f"{name}.key")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=folder / "ca.crt")
    assert shake_hands(server, client, "127.0.0.1")
    assert shake_hands(server, client, "localhost")
    assert not shake_hands(server, client, "elsewhere.org")
    code, _, err = privot("federate", "keys", "--out", "keys")
    assert (code, "already exists" in err) == (2, True)


def shake_hands(server_context, client_context, host):
    """Whether a client that wants this host accepts the server's certificate."""
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    server = server_context.wrap_bio(pipes[0], pipes[1], server_side=True)
    client = client_context.wrap_bio(pipes[2], pipes[3], server_hostname=host)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
            pipes[0].write(pipes[3].read())
            pipes[2].write(pipes[1].read())
    return client.version() is not None


def test_lists_of_nodes_and_keys_that_are_none_are_refused(tmp_path):
    make_keys(tmp_path / "keys", ["one", "two"], ["localhost"])
    good = (tmp_path / "keys" / "nodes").read_text().splitlines()[0]
    kind, key, _ = good.split()
    file = tmp_path / "list"
    for text in (
        "",
        "# nobody\n",
        "hello\n",
        f"{kind} {key}\n",
        f"{kind} AAAA one\n",
        f"{kind} {key} a/b\n",
        f"{good}\n{good}\n",
        f"{good}\n{kind} {key} another\n",
        f"{good} more\n",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== x\n",
    ):
        file.write_text(text)
        with pytest.raises(SettingError, match=r"list"):
            read_node_keys(file)
    keys = tmp_path / "keys"
    for path in (keys / "server.crt", keys / "nodes", tmp_path / "nowhere", tmp_path):
        with pytest.raises(SettingError):
            check_private_key(path)
    for names in ([], ["a", "a"], ["../x"], ["server"]):
        with pytest.raises(SettingError):
            make_keys(tmp_path / "other", names, ["localhost"])
    with pytest.raises(SettingError, match="host"):
        make_keys(tmp_path / "other", ["a"], ["no host"])
    assert not (tmp_path / "other").exists()
    for address in ("", "host", ":80", "host:", "host:0", "host:70000", "host:x"):
        with pytest.raises(SettingError, match="HOST:PORT"):
            split_address(address)


# The command line


SERVER = "server --epsilon 5 --client-keys keys/nodes --address localhost:1 --tls keys"
SIMULATE = "simulate --data digits --epsilon 5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate --data digits --clients 3", "no budget"),
        ("simulate --data digitz --clients 3 --epsilon 5", "did you mean 'digits'"),
        (f"{SIMULATE} --clients 0", "--clients"),
        (f"{SIMULATE} --set round=3", "did you mean"),
        (f"{SIMULATE} --rounds 3 --set rounds=4", "not both"),
        (f"{SIMULATE} --set noise_multiplier=1", "not both"),
        (f"{SERVER} --spec-from digits --address x --client-keys nowhere", "nowhere"),
        (f"{SERVER} --spec-from digits --address localhost", "HOST:PORT"),
        (f"{SERVER} --spec-from digits --tls other", "missing"),
        (SERVER, "--shape"),
        (f"{SERVER} --spec-from x", "built-in"),
    ],
)
def test_wrong_arguments_are_refused(privot, tmp_path, words, message):
    make_keys(tmp_path / "keys", ["one", "two"], ["localhost"])
    code, out, err = privot("federate", *words.split(), "--out", "release")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.glob("release*"))


def test_a_client_that_cannot_begin_says_why(privot, tmp_path):
    make_keys(tmp_path / "keys", ["one"], ["localhost"])
    good = {
        "--data": "digits",
        "--partition": "0/5",
        "--server": "localhost:1",
        "--ca": "keys/ca.crt",
        "--key": "keys/one.key",
        "--epsilon": 5,
    }
    for option, value, message in (
        ("--key", "nowhere", "nowhere"),
        ("--ca", "nowhere", "nowhere"),
        ("--data", "nowhere", "nowhere"),
        ("--server", "localhost", "HOST:PORT"),
        ("--partition", "5/5", "I/N"),
        ("--partition", "x", "I/N"),
        ("--epsilon", 0, "epsilon=0"),
        ("--unit", "house", "client or record"),
    ):
        words = [word for pair in (good | {option: value}).items() for word in pair]
        code, out, err = privot("federate", "client", *words, "--ledger", "own.jsonl")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        assert not (tmp_path / "own.jsonl").exists()


def test_a_client_ends_when_no_turn_of_its_own_is_left():
    """Five owners, two a round, four rounds: who was asked in the second is not asked again."""
    few = terms(owners=5, clients_per_round=2, rounds=4)
    client = SimpleNamespace(agreed_terms=few, last_round=-1, has_left=False)
    monitor = ClientMonitor(client, ignore_progress, 1e-5)
    for last, is_needed in ((-1, True), (0, True), (1, False), (2, False), (3, False)):
        monitor.last_round = last
        assert monitor.is_needed() is is_needed


@pytest.mark.usefixtures("one_thread")
def test_a_client_that_comes_back_after_its_last_answer_waits_to_send_it_again(tmp_path):
    own = terms(owners=1, rounds=1)
    ward = Ward(tmp_path, owners=1)
    offer, request = pack_message(own), pack_request(0, agreed=own)
    for message in (offer, request):
        ward.reply(message)
    monitor = ClientMonitor(ward.again().owner, ignore_progress, 1e-5)
    assert (monitor.awaits_resend, monitor.is_needed()) == (True, True)
    monitor.reply(offer)
    assert monitor.is_needed()
    monitor.reply(request)
    assert (monitor.is_needed(), monitor.end_reason) == (False, "")


@pytest.mark.usefixtures("one_thread")
def test_a_client_whose_part_is_over_says_why(tmp_path):
    poor = Ward(tmp_path, budget=Budget(0.01, 1e-5)).owner
    monitor = ClientMonitor(poor, ignore_progress, 1e-5)
    for message in (b"noise", pack_request(0)):  # neither is an offer
        monitor.reply(message)
        assert (monitor.is_needed(), monitor.end_reason) == (True, "")
    monitor.reply(pack_message(TERMS))
    assert not monitor.is_needed()
    for words in (f"The terms of run {RUN[:8]} were refused", "budget of this client"):
        assert words in monitor.end_reason
    monitor.client.leave()
    assert ClientMonitor(poor, ignore_progress, 1e-5).end_reason == CLIENT_STOPPED_MESSAGE


def stop_simulation(app, *_, **__):
    def stop():
        raise ReleaseError("stopped")

    app._main(SimpleNamespace(get_node_ids=stop), None)


def test_files_of_another_run_are_not_written_over(privot, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "run_simulation", lambda *_, **__: pytest.fail("it began"))

    def simulate(*more):
        words = "federate simulate --data digits --clients 3 --set noise_multiplier=8 --rounds 2"
        return privot(*words.split(), "--out", "release", *more)[2]

    (tmp_path / "release.run").mkdir()
    (tmp_path / "release.run" / "x").touch()
    assert "files of another run" in simulate()
    (tmp_path / "release").mkdir()
    assert "already exists" in simulate()
    (tmp_path / "release.run" / "x").unlink()
    for folder in ("release.run", "release"):
        (tmp_path / folder).rmdir()
    (tmp_path / "wire").touch()
    assert "for the transcript" in simulate("--transcript", "wire")
    monkeypatch.setattr(simulation, "run_simulation", stop_simulation)
    assert "stopped" in simulate()
    assert "--resume" in simulate()
    assert "other settings" in simulate("--resume", "--set", "critic_channels=4")
    assert "other settings" in simulate("--resume", "--seed", 3)
    assert "stopped" in simulate("--resume")


def test_a_simulation_respects_the_limit_of_the_whole_data(privot, tmp_path):
    """Parts have ledgers of their own, but the run is charged to the whole. Of clients see tests/privacy/test_boundary_ledger.py."""
    assert privot("ledger", "digits", "--limit", 1)[0] == 0
    code, _, err = privot("federate", *SIMULATE.split(), "--clients", 3, "--out", "release")
    assert (code, "does not allow this run: the total would come to 5" in err) == (2, True)
    assert not list(tmp_path.glob("release*"))
