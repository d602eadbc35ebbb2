"""Our end of Flower, without its processes: what it carries, whom it asks, what it says of failures, and which doors stay shut."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
import types

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra federated is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from support.federation import ROOMY, RUN, Ward, images, serving, terms, wards

from privot.errors import DataError, ReleaseError, SettingError
from privot.federated import Request, pack_message, unpack_message
from privot.federated.flower import server_app
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


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Flower's messages want to know in which run they are made."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
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


def node(owner, fails=lambda message: False):
    app = build_client_app(lambda context: owner)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})

    def answer(message):
        return (
            Message(Error(1, "gone"), reply_to=message) if fails(message) else app(message, context)
        )

    return answer


def federation(tmp_path, **fails):
    """A server, its post, and owners who fail as told."""
    everyone = wards(tmp_path)
    agreed = terms(owners=len(everyone))
    grid = Grid(
        {
            10 + place: node(ward, fails.get(f"ward{place}", lambda message: False))
            for place, ward in enumerate(everyone.values())
        }
    )
    post = ClientMessenger(grid, {name: 10 + place for place, name in enumerate(everyone)})
    return serving(agreed, everyone, tmp_path), post, grid, everyone


def run(server, post, **more):
    return run_federation(server, post, **({"join_timeout": 5.0, "round_timeout": 5.0} | more))


# Looking for replies


class Clock:
    """Time that passes only when somebody sleeps, or looks for replies."""

    def __init__(self, grid, look):
        self.now = 0.0
        self.slept = []
        self.pull = grid.pull_messages
        grid.pull_messages = lambda numbers: self.sleep(look, looking=True) or self.pull(numbers)

    def monotonic(self):
        return self.now

    def sleep(self, seconds, looking=False):
        self.now += seconds
        if not looking:
            self.slept.append(seconds)


@pytest.mark.parametrize(("look", "rest"), [(0.001, 0.1), (1.0, 4.0)])
def test_looking_takes_a_fifth_of_the_time_at_most(look, rest, monkeypatch):
    grid = Grid({1: lambda message: None})
    monkeypatch.setattr(server_app, "time", clock := Clock(grid, look))
    monkeypatch.setattr(server_app, "MIN_POLL_SECONDS", 0.1)
    assert (
        list(ClientMessenger(grid, {"silent": 1}).exchange_messages({"silent": b"x"}, 20.0)) == []
    )
    assert set(clock.slept) == {rest}


@pytest.mark.parametrize(("look", "told"), [(0.0, False), (6.0, True)])
def test_a_round_that_lasts_counts_its_answers(tmp_path, monkeypatch, look, told):
    server, post, grid, everyone = federation(tmp_path)
    monkeypatch.setattr(server_app, "time", Clock(grid, look))
    words = []
    run(
        server,
        post,
        join_timeout=60.0,
        round_timeout=60.0,
        progress=lambda *word, **facts: words.append(word),
    )
    assert sum(stage == "rounds" for stage, *_ in words) == server.terms.settings.rounds
    assert (("answers in this round", 1, len(everyone)) in words) is told


# What Flower carries


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"message": b"x"})}),
        RecordDict({"privot": ConfigRecord({"message": "text"})}),
        RecordDict({"privot": ConfigRecord({"message": b"x", "more": 1})}),
        RecordDict({"privot": ConfigRecord({"message": [b"x"]})}),
        RecordDict(
            {"privot": ConfigRecord({"message": b"x"}), "beside": ConfigRecord({"count": 3})}
        ),
        RecordDict({"privot": ArrayRecord([np.zeros(3)])}),
    ],
)
def test_anything_but_one_field_of_bytes_is_no_message(content):
    assert unwrap_message(wrap_message(b"x")) == b"x"
    assert unwrap_message(content) == b""


def test_an_owner_who_cannot_answer_says_only_that():
    heard = []

    def broken(context):
        raise DataError("patient 17 has a bad scan")

    app = build_client_app(broken, heard.append)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = app(Message(wrap_message(b"x"), 5, "query"), context)
    assert reply.has_error()
    assert "patient" not in reply.error.reason
    assert "patient 17" in str(heard[0])


def test_flower_tells_nobody(monkeypatch):
    from flwr.supercore import telemetry, update_check

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
    server, post, grid, everyone = federation(tmp_path)
    seen = []
    traffic = run(
        server, post, progress=lambda stage, step, of, **facts: seen.append((stage, step, of))
    )
    assert (server.is_finished, server.num_answers, server.offenses) == (True, 9, [])
    assert seen[-1] == ("rounds", 3, 3)
    assert server.build_release().guarantee.epsilon == pytest.approx(everyone["ward 0"].spent())
    assert len({message.metadata.group_id for message in grid.sent}) == len(
        grid.sent
    )  # no number can be guessed from another's
    assert {tuple(message.content) for message in grid.sent} == {("privot",)}
    sent = sum(len(unwrap_message(message.content)) for message in grid.sent[3:])
    assert (traffic.bytes_sent, traffic.num_answers) == (sent, 9)


@pytest.mark.usefixtures("one_thread")
def test_who_fails_is_passed_over_and_may_come_back(tmp_path):
    calls = []

    def second_time(message):
        calls.append(message)
        return len(calls) == 3  # its consent, then a round, then this

    server, post, _, everyone = federation(tmp_path, ward1=second_time)
    run(server, post)
    assert (server.is_finished, server.num_answers) == (True, 8)
    assert [(each.client_name, each.round, each.disqualifying) for each in server.offenses] == [
        ("ward 1", 1, False)
    ]
    assert len({round(each.spent(), 9) for each in everyone.values()}) == 1


def test_when_all_fail_the_run_does_not_end_well(tmp_path):
    server, post, _, everyone = federation(
        tmp_path, **{f"ward{place}": lambda message: True for place in range(3)}
    )
    with pytest.raises(ReleaseError, match="No client agreed"):
        run(server, post)
    assert not any(each.spent() for each in everyone.values())


@pytest.mark.usefixtures("one_thread")
def test_a_round_that_nobody_answers_stops_the_run_and_costs_none_of_it(tmp_path):
    away = []
    fails = {f"ward{place}": lambda message: bool(away) for place in range(3)}
    server, post, _, _ = federation(tmp_path, **fails)

    def leave(stage, step, of, **facts):
        if (stage, step) == ("rounds", 1):
            away.append(True)

    with pytest.raises(ReleaseError, match="No client answered in round 1"):
        run(server, post, progress=leave)
    away.clear()
    again = serving(server.terms, server.client_names, tmp_path)
    assert again.round == 1
    run(again, post)
    assert (again.is_finished, again.num_answers) == (True, 9)


def test_terms_that_all_refuse_are_named(tmp_path):
    server, post, _, everyone = federation(tmp_path)
    for place, ward in enumerate(everyone.values()):
        ward.owner = Ward(
            tmp_path / f"poor{place}", place, wall=type(ward.owner._budget)(0.1, 1e-5)
        ).owner
    with pytest.raises(ReleaseError, match=r"No client agreed.*ward 0: .*budget"):
        run(server, post)


def test_nodes_that_are_away_are_waited_for_only_so_long(tmp_path):
    grid = Grid(
        {
            1: lambda message: Message(wrap_message(b"here"), reply_to=message),
            2: lambda message: None,
        }
    )
    grid.online = {1}
    post = ClientMessenger(grid, {"near": 1, "far": 2})
    assert list(post.exchange_messages({"near": b"x", "far": b"x"}, 60.0, offline_timeout=0.0)) == [
        ("near", b"here")
    ]
    grid.online = {1, 2}  # on the line, and silent
    assert list(post.exchange_messages({"near": b"x", "far": b"x"}, 0.05)) == [("near", b"here")]


def test_a_stop_is_heard_between_two_looks():
    post = ClientMessenger(Grid({1: lambda message: None}), {"one": 1}, should_stop=lambda: True)
    with pytest.raises(ReleaseError, match="--resume"):
        list(post.exchange_messages({"one": b"x"}, 60.0))


@pytest.mark.usefixtures("one_thread")
def test_when_a_simulation_is_over_no_critic_is_left(tmp_path):
    """One that missed its last turn, say."""
    from privot.federated.flower.simulation import ClientSimulation

    cast = ClientSimulation(
        "digits", 3, ROOMY, tmp_path / "run", tmp_path / "ledgers", "cpu", "client"
    )
    for number in range(2):
        cast.build_client(number).reply(pack_message(TERMS))
    asked = Request(RUN, 0, images(TERMS))
    assert unpack_message(cast.build_client(0).reply(pack_message(asked))).kind == "answer"
    book = Ledger(tmp_path / "ledgers" / "client-0.jsonl")
    assert list_shard_checkpoints(book)
    cast.end_unfinished_clients()
    assert list_shard_checkpoints(book) == {}
    assert not (tmp_path / "ledgers" / "client-1.jsonl").exists()  # nothing is charged for it


@pytest.mark.parametrize(
    ("owners", "each", "cores", "gigabytes", "count"),
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
    monkeypatch, owners, each, cores, gigabytes, count
):
    from privot.federated.flower import simulation

    monkeypatch.setattr(simulation.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(
        simulation.os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": gigabytes * 10**6}.get
    )
    assert simulation._choose_num_workers(owners, each) == count


# Doors and keys


def asked(app, path, headers=(), kind="http", body=()):
    """The status that a call gets."""
    said = []
    parts = iter(body)

    async def receive():
        part = next(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def send(message):
        said.append(message.get("status"))

    asyncio.run(app({"type": kind, "path": path, "headers": list(headers)}, receive, send))
    return said[0] if said else None


def test_only_nodes_and_those_who_know_the_secret_come_in():
    async def inner(scope, receive, send):
        await send({"status": 200})

    app = SuperLinkFirewall(inner, "word", 0)
    right = [(SECRET_HEADER.encode(), b"word")]
    wrong = [(SECRET_HEADER.encode(), b"wor")]
    assert asked(app, "/v1/fleet/pull-messages") == 200
    for path in (
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/health",
        "/v1/fleet",
    ):
        assert (asked(app, path), asked(app, path, wrong), asked(app, path, right)) == (
            404,
            404,
            200,
        )
    assert asked(app, "/v1/fleet/x", kind="websocket") is None
    assert asked(app, "", kind="lifespan") == 200
    for word in (
        b"",
        b"x",
    ):  # a server without a secret opens nothing, to those who show none either
        assert (
            asked(
                SuperLinkFirewall(inner, "", 0),
                "/v1/control/start-run",
                [(SECRET_HEADER.encode(), word)],
            )
            == 404
        )
    assert asked(SuperLinkFirewall(inner, "", 0), "/v1/control/start-run") == 404


def test_a_long_call_is_not_read_to_its_end():
    """Flower would read 2 GiB of it before it asks who is there."""
    heard = []
    read = []

    async def inner(scope, receive, send):
        heard.append((await receive())["body"])
        await send({"status": 200})

    def long():
        for number in range(100):
            read.append(number)
            yield bytes(1 << 20)

    app = SuperLinkFirewall(inner, "word", 3 << 20)
    room = 3 << 20
    for path, parts in (
        ("push-object", 4),
        ("push-messages", 1),
        ("activate-node", 1),
        ("pull-messages", 1),
    ):
        read.clear()
        assert (asked(app, f"/v1/fleet/{path}", body=long()), len(read), heard) == (413, parts, [])
    assert asked(app, "/v1/fleet/push-object", body=[bytes(room), b"end"]) == 200
    assert heard == [bytes(room) + b"end"]


SUPERNODE = """
import httpx, json
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
def told(path, size=0):
    try:
        found = client.send(client.build_request("POST", f"http://server/v1/fleet/{path}", headers={"x-size": str(size)}))
        return [found.status_code, len(found.content)]
    except ValueError as error:
        return [type(error).__name__, 0]
most, little = supernode_patches.MAX_PACKED_MESSAGE_BYTES, supernode_patches.RESPONSE_OVERHEAD_BYTES
found = {"asked": [told("elsewhere"), len(Server.asked)], "packed": told("packed"), "short": told("get-run", little),
         "long": told("get-fab", little + 1), "part": told("pull-object", most), "too long": told("pull-object", most + little + 1),
         "wants": Server.asked[0].headers["accept-encoding"]}
try:
    start_client_internal.pull_objects(list("abcd"), pull_object_fn=lambda name: b"")
except supernode_patches.OversizedResponseError as error:
    found["parts"] = str(error)
found["few"] = sorted(start_client_internal.pull_objects(list("abc"), pull_object_fn=lambda name: b"x"))
found["bundle"] = start_client_internal.get_fused_config_from_fab(b"no zip", None)
found["seconds"] = InMemoryNodeState.get_message_processing_duration(None, message_id="x")
print(json.dumps(found))
"""


def test_a_supernode_takes_little_and_tells_nothing_else():
    """It goes nowhere else at the server's word, reads no endless answer, opens no bundle, and does not say how long the owner took."""
    done = subprocess.run(
        [sys.executable, "-c", SUPERNODE], capture_output=True, text=True, check=True, timeout=120
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
    }


def test_calls_within_this_machine_go_through_no_proxy():
    code = """
import httpx, os, privot.federated.flower
client = httpx.Client()
near = [client._transport_for_url(httpx.URL(url)) is client._transport for url in ("http://127.0.0.1:9", "http://[::1]:9", "http://far:9")]
print(os.environ["no_proxy"], near)
"""
    environment = {
        "http_proxy": "http://proxy:1",
        "no_proxy": "intranet",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "intranet,127.0.0.1,localhost,::1 [True, True, False]\n"


@pytest.mark.parametrize(
    ("replies", "parts", "let"),
    [
        (["x"], 3, True),
        (["x"], 1, True),
        (["x"], 4, False),
        ([""], 1, False),
        (["x", ""], 2, False),
    ],
)
def test_a_node_announces_replies_of_few_parts(replies, parts, let):
    """What is announced is what Flower would keep; and a message that answers none would go to other owners."""

    async def inner(scope, receive, send):
        await send({"status": 200})

    tree = ObjectTree(object_id="0" * 64)
    for number in range(1, parts):
        tree.children.append(ObjectTree(object_id=f"{number:064x}"))
    said = PushMessagesRequest(message_object_trees=[tree])
    for each in replies:
        said.messages_list.add().metadata.reply_to_message_id = each
    status = asked(
        SuperLinkFirewall(inner, "word", 0),
        "/v1/fleet/push-messages",
        body=[said.SerializeToString()],
    )
    assert status == (200 if let else 413)
    assert (
        asked(SuperLinkFirewall(inner, "word", 0), "/v1/fleet/push-messages", body=[b"\xff" * 100])
        == 413
    )


class Link:
    """A SuperLink, by Flower's own names: announced replies by the message they answer, and those of their parts that came."""

    def __init__(self):
        self.replies = {}
        self.parts = {}
        self.confirmed = []

    def announce(self, asked, message, whole=True):
        message.metadata.__dict__["_message_id"] = message.object_id
        self.replies[asked] = (
            message_to_proto(remove_content_from_message(message)),
            get_object_tree(message),
        )
        self.replies[asked][
            0
        ].metadata.reply_to_message_id = (
            asked  # of the announcement; what comes after it may say otherwise
        )
        found = {number: each.deflate() for number, each in get_all_nested_objects(message).items()}
        self.parts |= found if whole else {}
        return found

    def PullMessages(self, request):
        found = [
            self.replies.pop(each) for each in list(request.message_ids) if each in self.replies
        ]
        return types.SimpleNamespace(
            messages_list=[each for each, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request):
        content = self.parts.get(request.object_id, b"")
        return types.SimpleNamespace(
            object_found=True, object_available=bool(content), object_content=content
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


def test_a_line_waits_for_no_node():
    """One announces a reply and never sends it, one sends parts that are no message, one says that it answers somebody else."""
    line = NonBlockingGrid("127.0.0.1:1", b"", "token")
    link = Link()
    line._client = link
    line.set_run(Run.create_empty(1))
    letters = [Message(wrap_message(b"?"), 7, "query", group_id=str(number)) for number in range(4)]
    for letter in letters:
        letter.metadata.__dict__["_message_id"] = letter.object_id
    numbers = [letter.object_id for letter in letters]
    link.announce(numbers[0], Message(wrap_message(b"honest"), reply_to=letters[0]))
    rest = link.announce(
        numbers[1], Message(wrap_message(b"slow"), reply_to=letters[1]), whole=False
    )
    odd = link.announce(numbers[2], Message(wrap_message(b"odd"), reply_to=letters[2]))
    link.parts |= dict.fromkeys(odd, b"ConfigRecord  4\0junk")
    link.announce(numbers[3], Message(wrap_message(b"in her name"), reply_to=letters[0]))
    found = {
        each.metadata.reply_to_message_id: unwrap_message(each.content)
        for each in line.pull_messages(numbers)
    }
    assert found == {numbers[0]: b"honest", numbers[2]: b"", numbers[3]: b""}
    assert line.pull_messages(numbers[1:2]) == []
    link.parts |= rest
    assert [unwrap_message(each.content) for each in line.pull_messages(numbers[1:2])] == [b"slow"]


def test_keys_for_a_trial(tmp_path, privot):
    code, out, err = privot("federate", "keys", "--out", "keys", "--json")
    assert code == 0, err
    made = json.loads(out)
    folder = tmp_path / "keys"
    assert sorted(made) == sorted(
        [
            "ca.crt",
            "server.crt",
            "server.key",
            "nodes",
            *(f"hospital-{number}.key" for number in range(1, 6)),
        ]
    )
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert list(read_node_keys(folder / "nodes")) == [
        f"hospital-{number}" for number in range(1, 6)
    ]
    for number in range(1, 6):
        check_private_key(folder / f"hospital-{number}.key")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(folder / "server.crt", folder / "server.key")
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    for host, fits in (("127.0.0.1", True), ("localhost", True), ("elsewhere.org", False)):
        assert shaken(served, trusting, host) is fits
    code, _, err = privot("federate", "keys", "--out", "keys")
    assert (code, "already exists" in err) == (2, True)


def shaken(served, trusting, host):
    """Whether a client that wants this host is content with the server's certificate."""
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    server = served.wrap_bio(pipes[0], pipes[1], server_side=True)
    client = trusting.wrap_bio(pipes[2], pipes[3], server_hostname=host)
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


def test_lists_of_nodes_and_keys_that_are_none(tmp_path):
    make_keys(tmp_path / "keys", ["one", "two"], ["localhost"])
    good = (tmp_path / "keys" / "nodes").read_text().splitlines()
    kind, key, _ = good[0].split()
    file = tmp_path / "list"
    for text in (
        "",
        "# nobody\n",
        "hello\n",
        f"{kind} {key}\n",
        f"{kind} AAAA one\n",
        f"{kind} {key} a/b\n",
        f"{good[0]}\n{good[0]}\n",
        f"{good[0]}\n{kind} {key} another\n",
        f"{good[0]} more\n",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== x\n",
    ):
        file.write_text(text)
        with pytest.raises(SettingError, match=r"list"):
            read_node_keys(file)
    for bad in (
        tmp_path / "keys" / "server.crt",
        tmp_path / "keys" / "nodes",
        tmp_path / "nowhere",
        tmp_path,
    ):
        with pytest.raises(SettingError):
            check_private_key(bad)
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "--data", "digits", "--clients", 3), "no budget"),
        (("simulate", "--data", "digitz", "--clients", 3, "--epsilon", 5), "did you mean 'digits'"),
        (("simulate", "--data", "digits", "--clients", 0, "--epsilon", 5), "--clients"),
        (("simulate", "--data", "digits", "--epsilon", 5, "--set", "round=3"), "did you mean"),
        (
            ("simulate", "--data", "digits", "--epsilon", 5, "--rounds", 3, "--set", "rounds=4"),
            "not both",
        ),
        (
            ("simulate", "--data", "digits", "--epsilon", 5, "--set", "noise_multiplier=1"),
            "not both",
        ),
        (
            (
                "server",
                "--address",
                "x",
                "--tls",
                "keys",
                "--client-keys",
                "nowhere",
                "--epsilon",
                5,
                "--spec-from",
                "digits",
            ),
            "nowhere",
        ),
        (
            (
                "server",
                "--address",
                "localhost",
                "--tls",
                "keys",
                "--client-keys",
                "keys/nodes",
                "--epsilon",
                5,
                "--spec-from",
                "digits",
            ),
            "HOST:PORT",
        ),
        (
            (
                "server",
                "--address",
                "localhost:1",
                "--tls",
                "other",
                "--client-keys",
                "keys/nodes",
                "--epsilon",
                5,
                "--spec-from",
                "digits",
            ),
            "missing",
        ),
        (
            (
                "server",
                "--address",
                "localhost:1",
                "--tls",
                "keys",
                "--client-keys",
                "keys/nodes",
                "--epsilon",
                5,
            ),
            "--shape",
        ),
        (
            (
                "server",
                "--address",
                "localhost:1",
                "--tls",
                "keys",
                "--client-keys",
                "keys/nodes",
                "--epsilon",
                5,
                "--spec-from",
                "x",
            ),
            "built-in",
        ),
    ],
)
def test_bad_words_are_refused(privot, tmp_path, words, said):
    make_keys(tmp_path / "keys", ["one", "two"], ["localhost"])
    code, out, err = privot("federate", *words, "--out", "release")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not list(tmp_path.glob("release*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--key", "nowhere"), "nowhere"),
        (("--ca", "nowhere"), "nowhere"),
        (("--data", "nowhere"), "nowhere"),
        (("--server", "localhost"), "HOST:PORT"),
        (("--partition", "5/5"), "I/N"),
        (("--partition", "x"), "I/N"),
        (("--epsilon", 0), "epsilon=0"),
        (("--unit", "house"), "client or record"),
    ],
)
def test_a_client_that_cannot_begin_says_why(privot, tmp_path, words, said):
    make_keys(tmp_path / "keys", ["one"], ["localhost"])
    good = {
        "--data": "digits",
        "--partition": "0/5",
        "--server": "localhost:1",
        "--ca": "keys/ca.crt",
        "--key": "keys/one.key",
        "--epsilon": 5,
    }
    given = [word for pair in (good | dict([words])).items() for word in pair]
    code, out, err = privot("federate", "client", *given, "--ledger", "own.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "own.jsonl").exists()


def test_a_client_ends_when_no_turn_of_its_own_is_left():
    """Five owners, two a round, four rounds: who was asked in the second is not asked again."""
    from privot.cli.client_progress import ClientMonitor

    watched = ClientMonitor(
        types.SimpleNamespace(
            agreed_terms=terms(owners=5, clients_per_round=2, rounds=4),
            last_round=-1,
            has_left=False,
        ),
        ignore_progress,
        1e-5,
    )
    for last, more in ((-1, True), (0, True), (1, False), (2, False), (3, False)):
        watched.last_round = last
        assert watched.is_needed() is more


@pytest.mark.usefixtures("one_thread")
def test_a_client_that_comes_back_after_its_last_answer_waits_to_send_it_again(tmp_path):
    from privot.cli.client_progress import ClientMonitor

    own = terms(owners=1, rounds=1)
    ward = Ward(tmp_path, owners=1)
    ask = pack_message(Request(RUN, 0, images(own, 0)))
    for message in (pack_message(own), ask):
        ward.reply(message)
    watched = ClientMonitor(ward.again().owner, ignore_progress, 1e-5)
    assert (watched.awaits_resend, watched.is_needed()) == (True, True)
    watched.reply(pack_message(own))
    assert watched.is_needed()
    watched.reply(ask)
    assert (watched.is_needed(), watched.end_reason) == (False, "")


@pytest.mark.usefixtures("one_thread")
def test_a_client_whose_part_is_over_says_why(tmp_path):
    from privot.cli.client_progress import CLIENT_STOPPED_MESSAGE, ClientMonitor

    watched = ClientMonitor(Ward(tmp_path, wall=Budget(0.01, 1e-5)).owner, ignore_progress, 1e-5)
    for message in (
        b"noise",
        pack_message(Request(RUN, 0, images(TERMS, 0))),
    ):  # neither is an offer
        watched.reply(message)
        assert (watched.is_needed(), watched.end_reason) == (True, "")
    watched.reply(pack_message(TERMS))
    assert not watched.is_needed()
    assert (
        watched.end_reason
        == f"The terms of run {RUN[:8]} were refused: The budget of this client does not cover the run."
    )
    watched.client.leave()
    assert ClientMonitor(watched.client, ignore_progress, 1e-5).end_reason == CLIENT_STOPPED_MESSAGE


def test_a_run_that_is_there_is_not_written_over(privot, tmp_path, monkeypatch):
    from privot.federated.flower import simulation

    monkeypatch.setattr(simulation, "run_simulation", lambda *_, **__: pytest.fail("it began"))
    words = (
        "federate",
        "simulate",
        "--data",
        "digits",
        "--clients",
        3,
        "--set",
        "noise_multiplier=8",
        "--rounds",
        2,
        "--out",
        "release",
    )
    (tmp_path / "release.run").mkdir()
    (tmp_path / "release.run" / "x").touch()
    assert "files of another run" in privot(*words)[2]
    (tmp_path / "release").mkdir()
    assert "already exists" in privot(*words)[2]
    for folder in ("release.run", "release"):
        for file in (tmp_path / folder).iterdir():
            file.unlink()
        (tmp_path / folder).rmdir()
    (tmp_path / "wire").touch()
    assert "for the transcript" in privot(*words, "--transcript", "wire")[2]
    monkeypatch.setattr(simulation, "run_simulation", stopping)
    assert "stopped" in privot(*words)[2]
    assert "--resume" in privot(*words)[2]
    assert "other settings" in privot(*words, "--resume", "--set", "critic_channels=4")[2]
    assert "other settings" in privot(*words, "--resume", "--seed", 3)[2]
    assert "stopped" in privot(*words, "--resume")[2]


def stopping(app, *_, **__):
    app._main(
        types.SimpleNamespace(get_node_ids=lambda: (_ for _ in ()).throw(ReleaseError("stopped"))),
        None,
    )


def test_data_with_a_wall_is_not_dealt_past_it(privot, tmp_path):
    """Parts have ledgers of their own, but the run is charged to the whole. Of clients see tests/privacy/test_boundary_ledger.py."""
    assert privot("ledger", "digits", "--limit", 1)[0] == 0
    code, _, err = privot(
        "federate",
        "simulate",
        "--data",
        "digits",
        "--clients",
        3,
        "--epsilon",
        5,
        "--out",
        "release",
    )
    assert (code, "does not allow this run: the total would come to 5" in err) == (2, True)
    assert not list(tmp_path.glob("release*"))


@pytest.mark.parametrize("kind", ["train", "query.other", "evaluate"])
def test_a_message_of_another_kind_gets_no_reply_and_ends_nobody(monkeypatch, kind):
    """Flower raises where no function is registered: in our loop this would end the client's process."""
    from privot.federated.flower import supernode as module

    sent = []
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    monkeypatch.setattr(
        module,
        "pull_task_input",
        lambda client: (Message(wrap_message(b"x"), 5, kind), context, None, None),
    )
    monkeypatch.setattr(
        module, "push_message", lambda client, message, context: sent.append(message)
    )
    monkeypatch.setattr(module, "push_task_output", lambda *_: sent.append(None))
    monkeypatch.setattr(
        module,
        "HeartbeatSender",
        lambda beat: types.SimpleNamespace(start=lambda: None, stop=lambda: None),
    )
    module._answer_message(
        build_client_app(lambda context: pytest.fail("the owner was asked")),
        "127.0.0.1:1",
        "secret",
        "token",
    )
    assert sent == []
