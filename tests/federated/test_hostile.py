"""Hostile owners: whatever one of them sends, in any round, the server goes on, names the offender and nobody else, and ends its run."""

import pytest
import torch
from support.federation import Ward, plausible, refusal, serving, terms
from support.hostile_payloads import HOSTILE_PAYLOADS

from privot.federated import messages, pack_message
from privot.federated.transcript import read_transcript
from privot.federated.validation import compute_max_message_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ward 0", "ward 1", "mallory")
TERMS = terms(owners=3)


@pytest.fixture
def server():
    made = serving(TERMS, NAMES)
    for name, offer in made.pack_offers().items():
        assert made.receive_consent(name, offer) is None
    return made


def rounds(server, hostile):
    """All rounds, in which all but mallory answer plausibly, and mallory as ``hostile(round)`` says."""
    while not server.is_finished:
        asked = server.pack_requests()
        for place, name in enumerate(name for name in asked if name != "mallory"):
            assert (
                server.receive(name, pack_message(plausible(TERMS, server.round, seed=place)))
                is None
            )
        for raw in hostile(server.round) if "mallory" in asked else ():
            server.receive("mallory", raw)
        server.end_round()
    return server._server_generator.state_dict()


def answers(number):
    return (pack_message(plausible(TERMS, number, seed=7)),)


@pytest.mark.parametrize("when", range(3))
@pytest.mark.parametrize("name", HOSTILE_PAYLOADS)
def test_the_offender_is_named_and_the_run_ends(server, trust, name, when):
    payload, words, lie = HOSTILE_PAYLOADS[name]

    def hostile(number):
        if number != when:
            return answers(number)
        found = payload(TERMS, number)
        return found if isinstance(found, tuple) else (found,)

    made = rounds(server, hostile)
    (offence,) = server.offenses
    assert (offence.client_name, offence.round, offence.disqualifying) == ("mallory", when, lie)
    assert words in offence.reason
    assert ("mallory" in server.active) != lie
    assert server.num_answers == (9 if name == "answers twice" else 8 if not lie else 6 + when)
    assert all(value.isfinite().all() for value in made.values())
    trust("F1", "hostile payloads in a round: offender named, run ended, model finite", 1, of=1)


def test_there_are_enough_of_them():
    assert len(HOSTILE_PAYLOADS) >= 25


@pytest.mark.parametrize("back", [1, 2])
def test_a_replay_is_a_lie(server, back):
    rounds(server, lambda number: answers(number) if number < back else answers(number - back))
    assert [(each.client_name, each.round, each.disqualifying) for each in server.offenses] == [
        ("mallory", back, True)
    ]


def test_a_late_answer_is_ignored_and_its_owner_stays(server):
    late = {0: (), 1: (*answers(0), *answers(1)), 2: answers(2)}
    rounds(server, late.get)
    assert [(each.round, each.reason, each.disqualifying) for each in server.offenses] == [
        (0, "did not answer in time", False),
        (1, "answered round 0 too late", False),
    ]
    assert "mallory" in server.active
    assert server.num_answers == 8


def test_late_counts_once(server):
    """The same late answer again is a replay."""
    rounds(server, {0: (), 1: answers(0) * 2, 2: answers(2)}.get)
    assert [each.disqualifying for each in server.offenses] == [False, False, True]


def test_a_message_of_100_mb_is_neither_parsed_nor_kept(tmp_path, monkeypatch):
    made = serving(TERMS, NAMES, transcript_path=tmp_path / "wire")
    for name, offer in made.pack_offers().items():
        made.receive_consent(name, offer)
    made.pack_requests()
    monkeypatch.setattr(messages, "_load_json", lambda *_: pytest.fail("it was parsed"))
    offence = made.receive("mallory", bytes(100 << 20))
    assert (offence.client_name, offence.round, offence.disqualifying) == ("mallory", 0, True)
    assert (
        offence.reason
        == f"The message has {100 << 20} bytes; at most {compute_max_message_bytes(TERMS)} are allowed."
    )
    assert made.receive("mallory", bytes(100 << 20)).reason == "takes no part in this run"
    assert (tmp_path / "wire").stat().st_size < 1 << 17  # of the record, too
    assert [each.message for each in read_transcript(tmp_path / "wire")][-2:] == [b"", b""]


def test_a_liars_further_words_are_not_even_counted(server):
    rounds(server, lambda number: (b"lie",) + answers(number) * 50)
    assert len(server.offenses) == 1
    assert server.num_answers == 6


def test_an_answer_before_a_lie_in_the_same_round_does_not_count(server):
    rounds(server, lambda number: (*answers(number), b"lie"))
    assert server.num_answers == 6


def test_a_stranger_has_no_part(server):
    server.pack_requests()
    assert server.receive("nobody", answers(0)[0]).reason == "takes no part in this run"
    assert server.offenses == []


def test_whoever_was_not_asked_has_no_answer():
    made = serving(terms(owners=3, clients_per_round=1), NAMES)
    for name, offer in made.pack_offers().items():
        made.receive_consent(name, offer)
    (asked,) = made.pack_requests()
    other = next(name for name in NAMES if name != asked)
    assert "without a request" in made.receive(other, pack_message(plausible(made.terms, 0))).reason


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, _, lie) in HOSTILE_PAYLOADS.items()
        if lie and name not in ("the terms", "answers twice, otherwise")
    ],
)
def test_consent_in_other_words_is_none(name):
    made = serving(TERMS, NAMES)
    made.pack_offers()
    offence = made.receive_consent("mallory", HOSTILE_PAYLOADS[name][0](TERMS, 0))
    assert (offence.client_name, offence.round, offence.disqualifying) == ("mallory", -1, True)
    assert made.active == []


def test_consent_to_other_terms_is_none():
    made = serving(TERMS, NAMES)
    made.pack_offers()
    assert made.receive_consent(
        "mallory",
        pack_message(terms(owners=3, noise_multiplier=TERMS.settings.noise_multiplier / 2)),
    ).disqualifying


def test_a_run_with_a_liar_ends_in_a_release(server):
    rounds(server, lambda number: (b"lie",))
    assert server.build_release().metadata["num_answers"] == 6


def test_all_hostile_ends_too():
    made = serving(TERMS, NAMES)
    for name, offer in made.pack_offers().items():
        made.receive_consent(name, offer)
    for name in made.pack_requests():
        made.receive(name, b"")
    made.end_round()
    assert made.is_finished
    with pytest.raises(Exception, match="No client answered"):
        made.build_release()


@pytest.mark.parametrize(
    "lie", ["huge norm", "NaN", "lies about its count", "answers twice, otherwise"]
)
def test_what_a_liar_says_moves_nothing(server, lie):
    """The generator is the same to the bit, whatever the lie was."""

    def hostile(number):
        found = HOSTILE_PAYLOADS[lie][0](TERMS, number)
        return found if isinstance(found, tuple) else (found,)

    other = serving(TERMS, NAMES)
    for name, offer in other.pack_offers().items():
        other.receive_consent(name, offer)
    one = rounds(server, hostile)
    two = rounds(other, lambda number: (b"",))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_an_honest_answer_does(server):
    other = serving(TERMS, NAMES)
    for name, offer in other.pack_offers().items():
        other.receive_consent(name, offer)
    one = rounds(server, answers)
    two = rounds(other, lambda number: (b"",))
    assert not all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", HOSTILE_PAYLOADS)
def test_an_owner_answers_any_bytes_with_a_refusal(tmp_path, name):
    payload = HOSTILE_PAYLOADS[name][0](TERMS, 1)
    ward = Ward(tmp_path)
    for raw in payload if isinstance(payload, tuple) else (payload,):
        if name != "the terms":
            assert refusal(ward.reply(raw))
    assert ward.ledger.entries() == []
