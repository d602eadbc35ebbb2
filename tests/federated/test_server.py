"""The server: rounds, equal weights, going on after a crash, the transcript, and a release that proves its claim."""

import pytest
import torch
from support.federation import (
    compute_price,
    consent,
    plausible,
    play,
    serve_consenting,
    serving,
    terms,
    wards,
)

from privot.errors import PlanError, ReleaseError, SettingError
from privot.federated import Refusal, pack_message, unpack_message
from privot.federated.transcript import RECEIVED_FROM_CLIENT, SENT_TO_CLIENT, read_transcript
from privot.privacy.gate import Gate
from privot.release import Release
from privot.release.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ward 0", "ward 1", "ward 2")
TERMS = terms(owners=3)


def answer(server, *names):
    for name in names:
        honest = plausible(server.terms, server.round, seed=NAMES.index(name))
        assert server.receive(name, pack_message(honest)) is None


def finish(server):
    while not server.is_finished:
        answer(server, *server.pack_requests())
        server.end_round()
    return server.build_release().artifact.tensors


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


class Listener:
    """Passes messages on to an owner, and notes them."""

    def __init__(self, name, ward, messages):
        self.name = name
        self.ward = ward
        self.messages = messages

    def reply(self, raw):
        reply = self.ward.reply(raw)
        self.messages.append((SENT_TO_CLIENT, self.name, raw))
        self.messages.append((RECEIVED_FROM_CLIENT, self.name, reply))
        return reply


def test_a_run_ends_in_a_release_that_proves_its_claim_and_its_transcript_holds_every_message(
    tmp_path, monkeypatch
):
    released = []
    heard = []
    query = Gate.query_clients
    monkeypatch.setattr(
        Gate,
        "query_clients",
        lambda *args, **more: released.append(query(*args, **more)) or released[-1],
    )
    everyone = {
        name: Listener(name, ward, heard) for name, ward in wards(tmp_path, len(NAMES)).items()
    }
    release = play(serving(TERMS, everyone, transcript_path=tmp_path / "wire"), everyone)
    release.save(tmp_path / "out")
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(compute_price(TERMS))
    assert release.guarantee.neighbours == "client"
    assert release.metadata["num_answers"] == 9
    assert Release.load(tmp_path / "out").sample(20)[0].shape == (20, 1, 8, 8)
    entries = list(read_transcript(tmp_path / "wire"))
    assert len(entries) == 2 * 3 * 4
    assert sorted(
        (entry.direction, entry.client_name, entry.message) for entry in entries
    ) == sorted(heard)
    received = [
        unpack_message(entry.message)
        for entry in entries
        if entry.direction == RECEIVED_FROM_CLIENT
    ]
    assert [
        message.gradients.numpy().tobytes() for message in received if message.kind == "answer"
    ] == [value.float().numpy().tobytes() for value in released]


def test_nobody_is_asked_before_they_agreed_nor_after_a_refusal():
    server = serving(TERMS, NAMES)
    server.pack_offers()
    assert server.pack_requests() == {}
    server.end_round()
    assert server.round == 1
    reason = "the budget of this owner does not cover it"
    server.receive_consent("ward 0", pack_message(Refusal(TERMS.run_id, -1, reason)))
    for name in NAMES[1:]:
        server.receive_consent(name, pack_message(TERMS))
    assert set(server.pack_requests()) == set(NAMES[1:])
    assert set(server.pack_offers()) == set()
    (offense,) = server.offenses
    assert (offense.client_name, offense.round, offense.disqualifying) == ("ward 0", -1, False)
    assert "budget" in offense.reason


def test_who_refuses_three_times_is_not_asked_again():
    server = serve_consenting(terms(owners=3, rounds=5), NAMES)
    for number in range(5):
        asked = server.pack_requests()
        assert ("ward 0" in asked) == (number < 3)
        if "ward 0" in asked:
            refusal = Refusal(TERMS.run_id, number, "this owner cannot answer")
            server.receive("ward 0", pack_message(refusal))
        answer(server, *NAMES[1:])
        server.end_round()
    reasons = [offense.reason for offense in server.offenses if offense.client_name == "ward 0"]
    assert sum("refused" in reason for reason in reasons) == 3


def test_everybody_gets_rows_of_their_own_and_the_same_bytes_when_asked_again():
    server = serve_consenting(TERMS, NAMES)
    first = server.pack_requests()
    one, two, _ = (unpack_message(raw).images for raw in first.values())
    assert one.shape == (10, 1, 1, 8, 8)
    assert not torch.equal(one, two)
    answer(server, "ward 1")
    assert server.pack_requests() == {name: first[name] for name in ("ward 0", "ward 2")}


def test_a_cohort_goes_round():
    server = serve_consenting(terms(owners=3, clients_per_round=1, rounds=6), NAMES)
    asked = []
    while not server.is_finished:
        names = list(server.pack_requests())
        asked += names
        answer(server, *names)
        server.end_round()
    assert sorted(asked) == sorted(NAMES * 2)


def test_rounds_without_answers_change_nothing_and_give_no_release():
    server = serve_consenting(TERMS, NAMES)
    with pytest.raises(PlanError, match="round 0 of 3"):
        server.build_release()
    state = server._server_generator.state_dict()
    before = {key: value.clone() for key, value in state.items() if key.startswith("mean")}
    for number in range(3):
        server.pack_requests()
        server.end_round()
        assert server.round == number + 1
    assert same(before, server._server_generator.state_dict())
    with pytest.raises(ReleaseError, match="No client answered"):
        server.build_release()
    with pytest.raises(PlanError, match="The run is over"):
        server.pack_requests()


@pytest.mark.parametrize("names", [NAMES[:2], (*NAMES, "ward 3"), ("ward 0", "ward 0", "ward 1")])
def test_names_must_fit_the_terms(names):
    with pytest.raises(SettingError):
        serving(TERMS, names)


def test_a_generator_may_begin_with_characters_of_public_fonts(tmp_path):
    own = terms(owners=3, pretrain="glyphs", pretrain_steps=2)
    requests = serve_consenting(own, NAMES, tmp_path).pack_requests()
    assert serve_consenting(own, NAMES, tmp_path).pack_requests() == requests
    assert serve_consenting(TERMS, NAMES).pack_requests()["ward 0"] != requests["ward 0"]


# A crash of the server


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return finish(serve_consenting(TERMS, NAMES, tmp_path_factory.mktemp("unbroken")))


@pytest.mark.parametrize("moment", ["offered", "asked", "some answered", "all answered", "closed"])
def test_a_server_that_crashed_goes_on(unbroken, tmp_path, moment):
    server = serve_consenting(TERMS, NAMES, tmp_path)
    requests = server.pack_requests() if moment != "offered" else {}
    answered = {"some answered": NAMES[:1], "all answered": NAMES, "closed": NAMES}
    answer(server, *answered.get(moment, ()))
    if moment == "closed":
        server.end_round()
    server = serve_consenting(TERMS, NAMES, tmp_path)  # they may agree again
    assert server.round == (moment == "closed")
    if moment in ("asked", "some answered", "all answered"):
        assert server.pack_requests() == requests  # owners send what they had sent, at no cost
    assert same(finish(server), unbroken)


def test_a_server_that_goes_on_sends_the_same_images_to_fewer(tmp_path):
    requests = serve_consenting(TERMS, NAMES, tmp_path).pack_requests()
    again = serving(TERMS, NAMES, tmp_path)
    for name in NAMES[1:]:
        again.receive_consent(name, pack_message(TERMS))
    assert again.pack_requests() == {name: requests[name] for name in NAMES[1:]}


def test_real_owners_see_no_difference(tmp_path):
    """The server dies in the middle of the second round, each owner after each message: nobody pays twice."""
    everyone = wards(tmp_path, 3)
    server = serving(TERMS, everyone, tmp_path)
    consent(server, everyone)
    replies = {}
    for number in range(3):
        for name, request in server.pack_requests().items():
            replies[name, number] = everyone[name].again().reply(request)
            if (name, number) == ("ward 1", 1):
                server = serving(TERMS, everyone, tmp_path)
                break
            server.receive(name, replies[name, number])
        for name, request in server.pack_requests().items():
            reply = everyone[name].again().reply(request)
            assert replies.setdefault((name, number), reply) == reply
            server.receive(name, reply)
        server.end_round()
    assert (server.num_answers, server.offenses) == (9, [])
    assert all(ward.rows() == TERMS.plan().stages[0].steps for ward in everyone.values())


@pytest.mark.parametrize("ended", [False, True], ids=["in that round", "after it"])
def test_a_liar_is_not_asked_again_by_a_server_that_crashed(tmp_path, ended):
    server = serve_consenting(TERMS, NAMES, tmp_path, transcript_path=tmp_path / "wire")
    server.pack_requests()
    server.receive("ward 0", b"lie")
    assert b"lie" in [entry.message for entry in read_transcript(tmp_path / "wire")]
    if ended:
        answer(server, "ward 1", "ward 2")
        server.end_round()
    again = serving(TERMS, NAMES, tmp_path)
    assert again.offenses == server.offenses
    assert [offense.client_name for offense in again.offenses] == ["ward 0"]
    assert (again.round, again.active) == (ended, ["ward 1", "ward 2"])
    assert "ward 0" not in again.pack_requests()
    late = pack_message(plausible(TERMS, int(ended)))
    assert again.receive("ward 0", late).reason == "takes no part in this run"


@pytest.mark.parametrize(
    ("own", "names"), [(terms(owners=3, noise_multiplier=9.0), NAMES), (TERMS, NAMES[::-1])]
)
def test_a_folder_is_of_one_run(tmp_path, own, names):
    serve_consenting(TERMS, NAMES, tmp_path)
    with pytest.raises(ReleaseError, match="other terms or other clients"):
        serving(own, names, tmp_path)


def test_a_folder_that_was_altered_is_refused(tmp_path):
    serve_consenting(TERMS, NAMES, tmp_path)
    (tmp_path / "server" / "server.json").write_text("[" * 10_000)
    with pytest.raises(ReleaseError, match="altered"):
        serving(TERMS, NAMES, tmp_path)


def test_a_message_after_the_end_is_named_and_changes_nothing(tmp_path):
    server = serve_consenting(TERMS, NAMES, transcript_path=tmp_path / "wire")
    server.pack_requests()
    answer(server, "ward 0", "ward 1")
    server.end_round()
    finish(server)
    release = server.build_release()
    late = pack_message(plausible(TERMS, 0))
    assert server.receive("ward 2", late).reason == "answered round 0 too late"
    assert server.build_release() is release
