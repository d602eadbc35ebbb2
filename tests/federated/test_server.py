"""The server: rounds, equal weights, going on after a crash, the record of the wire, and a release that proves its claim."""

import pytest
import torch
from support.federation import consent, plausible, play, serving, terms, wards

from privot.errors import PlanError, ReleaseError, SettingError
from privot.federated import Refusal, pack_message, unpack_message
from privot.federated.transcript import RECEIVED_FROM_CLIENT, SENT_TO_CLIENT, read_transcript
from privot.privacy.gate import Gate
from privot.release import Release
from privot.release.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ward 0", "ward 1", "ward 2")
TERMS = terms(owners=3)


def agreed(tmp_path=None, names=NAMES, own=TERMS, **more):
    made = serving(own, names, tmp_path, **more)
    for name, offer in made.pack_offers().items():
        made.receive_consent(name, offer)
    return made


def answer(server, *names):
    for name in names:
        assert (
            server.receive(
                name, pack_message(plausible(server.terms, server.round, seed=NAMES.index(name)))
            )
            is None
        )


def whole(server):
    while not server.is_finished:
        answer(server, *server.pack_requests())
        server.end_round()
    return server.build_release().artifact.tensors


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_ends_in_a_release_that_proves_its_claim(tmp_path):
    everyone = wards(tmp_path, 3)
    release = play(serving(TERMS, everyone), everyone)
    release.save(tmp_path / "out")
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(
        float(TERMS.plan().cost().epsilon(1e-5))
    )
    assert release.guarantee.neighbours == "client"
    images, _ = Release.load(tmp_path / "out").sample(20)
    assert images.shape == (20, 1, 8, 8)
    assert release.metadata["num_answers"] == 9


def test_nobody_is_asked_before_they_agreed():
    made = serving(TERMS, NAMES)
    made.pack_offers()
    assert made.pack_requests() == {}
    made.end_round()
    assert made.round == 1


def test_who_refuses_the_terms_is_left_in_peace():
    made = serving(TERMS, NAMES)
    made.receive_consent(
        "ward 0",
        pack_message(Refusal(TERMS.run_id, -1, "the budget of this owner does not cover it")),
    )
    for name in NAMES[1:]:
        made.receive_consent(name, pack_message(TERMS))
    assert set(made.pack_requests()) == set(NAMES[1:])
    assert set(made.pack_offers()) == set()
    assert [(each.client_name, each.round, each.disqualifying) for each in made.offenses] == [
        ("ward 0", -1, False)
    ]
    assert "budget" in made.offenses[0].reason


def test_who_refuses_three_times_is_not_asked_again():
    made = agreed(own=terms(owners=3, rounds=5))
    for number in range(5):
        asked = made.pack_requests()
        assert ("ward 0" in asked) == (number < 3)
        if "ward 0" in asked:
            made.receive(
                "ward 0", pack_message(Refusal(TERMS.run_id, number, "this owner cannot answer"))
            )
        answer(made, *NAMES[1:])
        made.end_round()
    assert (
        len(
            [
                each
                for each in made.offenses
                if each.client_name == "ward 0" and "refused" in each.reason
            ]
        )
        == 3
    )


def test_everybody_gets_rows_of_their_own():
    asked = agreed().pack_requests()
    drawn = [unpack_message(raw).images for raw in asked.values()]
    assert drawn[0].shape == (10, 1, 1, 8, 8)
    assert not torch.equal(drawn[0], drawn[1])


def test_asking_again_gives_the_same_bytes_to_those_who_have_not_answered():
    made = agreed()
    first = made.pack_requests()
    answer(made, "ward 1")
    assert made.pack_requests() == {name: raw for name, raw in first.items() if name != "ward 1"}


def test_a_cohort_goes_round():
    made = agreed(own=terms(owners=3, clients_per_round=1, rounds=6))
    seen = []
    while not made.is_finished:
        asked = list(made.pack_requests())
        seen += asked
        answer(made, *asked)
        made.end_round()
    assert sorted(seen) == sorted(NAMES * 2)


def test_a_round_without_answers_changes_nothing_and_passes():
    made = agreed()
    before = {
        key: value.clone()
        for key, value in made._server_generator.state_dict().items()
        if key.startswith("mean")
    }
    made.pack_requests()
    made.end_round()
    after = made._server_generator.state_dict()
    assert same(before, after)
    assert made.round == 1


def test_a_release_needs_an_answer_and_the_end(tmp_path):
    made = agreed()
    with pytest.raises(PlanError, match="round 0 of 3"):
        made.build_release()
    for _ in range(3):
        made.pack_requests()
        made.end_round()
    with pytest.raises(ReleaseError, match="No client answered"):
        made.build_release()
    with pytest.raises(PlanError, match="The run is over"):
        made.pack_requests()


@pytest.mark.parametrize("names", [NAMES[:2], (*NAMES, "ward 3"), ("ward 0", "ward 0", "ward 1")])
def test_names_must_fit_the_terms(names):
    with pytest.raises(SettingError):
        serving(TERMS, names)


def test_a_generator_may_begin_with_characters_of_public_fonts(tmp_path):
    own = terms(owners=3, pretrain="glyphs", pretrain_steps=2)
    made = agreed(tmp_path, own=own)
    again = agreed(tmp_path, own=own)
    assert made.pack_requests() == again.pack_requests()
    plain = agreed(own=TERMS)
    assert (
        unpack_message(plain.pack_requests()["ward 0"]).images.tolist()
        != unpack_message(made.pack_requests()["ward 0"]).images.tolist()
    )


# A crash of the server


@pytest.mark.parametrize("moment", ["offered", "asked", "some answered", "all answered", "closed"])
def test_a_server_that_crashed_goes_on(tmp_path, moment):
    straight = whole(agreed(tmp_path / "straight"))
    made = agreed(tmp_path / "crashed")
    if moment != "offered":
        sent = made.pack_requests()
        answer(
            made,
            *{"some answered": NAMES[:1], "all answered": NAMES, "closed": NAMES}.get(moment, ()),
        )
        if moment == "closed":
            made.end_round()
    made = agreed(tmp_path / "crashed")  # another process; who had agreed may say so again
    assert made.round == (moment == "closed")
    if moment in ("asked", "some answered", "all answered"):
        assert made.pack_requests() == sent  # so that owners send what they had sent, at no cost
    assert same(whole(made), straight)


def test_a_server_that_goes_on_sends_the_same_images_though_fewer_are_there(tmp_path):
    sent = agreed(tmp_path).pack_requests()
    again = serving(TERMS, NAMES, tmp_path)
    for name in NAMES[1:]:
        again.receive_consent(name, pack_message(TERMS))
    assert again.pack_requests() == {name: sent[name] for name in NAMES[1:]}


def test_real_owners_see_no_difference(tmp_path):
    """The server dies in the middle of the second round, each owner after each message: nobody pays twice."""
    everyone = wards(tmp_path, 3)
    server = serving(TERMS, everyone, tmp_path)
    consent(server, everyone)
    replies = {}
    for number in range(3):
        for name, asked in server.pack_requests().items():
            replies[name, number] = everyone[name].again().reply(asked)
            if (name, number) == ("ward 1", 1):
                break
            server.receive(name, replies[name, number])
        else:
            server.end_round()
            continue
        server = serving(TERMS, everyone, tmp_path)
        for name, asked in server.pack_requests().items():
            reply = everyone[name].again().reply(asked)
            assert replies.setdefault((name, number), reply) == reply
            server.receive(name, reply)
        server.end_round()
    assert server.num_answers == 9
    assert server.offenses == []
    assert all(ward.rows() == TERMS.plan().stages[0].steps for ward in everyone.values())


def test_what_was_said_of_whom_outlives_a_crash(tmp_path):
    made = agreed(tmp_path)
    made.pack_requests()
    made.receive("ward 0", b"lie")
    answer(made, "ward 1", "ward 2")
    made.end_round()
    again = serving(TERMS, NAMES, tmp_path)
    assert again.offenses == made.offenses
    assert again.active == ["ward 1", "ward 2"]
    assert (
        again.receive("ward 0", pack_message(plausible(TERMS, 1))).reason
        == "takes no part in this run"
    )


def test_a_liar_is_not_asked_again_by_a_server_that_crashed_in_that_round(tmp_path):
    made = agreed(tmp_path)
    made.pack_requests()
    made.receive("ward 0", b"lie")
    again = serving(TERMS, NAMES, tmp_path)
    assert (again.round, again.active) == (0, ["ward 1", "ward 2"])
    assert [each.client_name for each in again.offenses] == ["ward 0"]
    assert "ward 0" not in again.pack_requests()


@pytest.mark.parametrize(
    "change",
    [{"own": terms(owners=3, noise_multiplier=9.0)}, {"names": NAMES[::-1]}],
    ids=["terms", "names"],
)
def test_a_folder_is_of_one_run(tmp_path, change):
    agreed(tmp_path)
    with pytest.raises(ReleaseError, match="other terms or other clients"):
        serving(change.get("own", TERMS), change.get("names", NAMES), tmp_path)


def test_a_folder_that_was_altered_is_refused(tmp_path):
    agreed(tmp_path)
    (tmp_path / "server" / "server.json").write_text("[" * 10_000)
    with pytest.raises(ReleaseError, match="altered"):
        serving(TERMS, NAMES, tmp_path)


# The record of the wire


def test_the_record_holds_every_message_whole(tmp_path):
    everyone = wards(tmp_path, 3)
    wire = []

    class Heard:
        def __init__(self, name):
            self.name = name

        def reply(self, raw):
            wire.append((SENT_TO_CLIENT, self.name, raw))
            wire.append((RECEIVED_FROM_CLIENT, self.name, answer := everyone[self.name].reply(raw)))
            return answer

    server = serving(TERMS, everyone, transcript_path=tmp_path / "wire")
    play(server, {name: Heard(name) for name in everyone})
    assert sorted(
        (each.direction, each.client_name, each.message)
        for each in read_transcript(tmp_path / "wire")
    ) == sorted(wire)
    assert len(wire) == 2 * 3 * 4


def test_the_answers_in_the_record_are_what_the_gates_gave(tmp_path, monkeypatch):
    given = []
    deal = Gate.query_clients
    monkeypatch.setattr(
        Gate, "query_clients", lambda *args, **more: given.append(deal(*args, **more)) or given[-1]
    )
    everyone = wards(tmp_path, 3)
    play(serving(TERMS, everyone, transcript_path=tmp_path / "wire"), everyone)
    seen = [
        unpack_message(each.message)
        for each in read_transcript(tmp_path / "wire")
        if each.direction == RECEIVED_FROM_CLIENT
    ]
    values = [each.gradients.numpy().tobytes() for each in seen if each.kind == "answer"]
    assert values == [each.float().numpy().tobytes() for each in given]
    assert len(values) == 9


def test_a_message_after_the_end_is_heard_and_named(tmp_path):
    made = agreed(transcript_path=tmp_path / "wire")
    made.pack_requests()
    answer(made, "ward 0", "ward 1")
    made.end_round()
    for _ in range(2):
        answer(made, *made.pack_requests())
        made.end_round()
    release = made.build_release()
    assert (
        made.receive("ward 2", pack_message(plausible(TERMS, 0))).reason
        == "answered round 0 too late"
    )
    assert made.build_release() is release


def test_a_lie_is_in_the_record_too(tmp_path):
    made = agreed(transcript_path=tmp_path / "wire")
    made.pack_requests()
    made.receive("ward 0", b"lie")
    assert [each for each in read_transcript(tmp_path / "wire") if each.message == b"lie"]
