"""Hostile owners: whatever one of them sends, in any round, the server goes on, names the offender and nobody else, and ends its run."""

import pytest
import torch
from support.federation import Ward, plausible, refusal, serve_consenting, serving, terms
from support.hostile_payloads import HOSTILE_PAYLOADS

from privot.errors import ReleaseError
from privot.federated import messages, pack_message
from privot.federated.transcript import read_transcript
from privot.federated.validation import compute_max_message_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ward 0", "ward 1", "mallory")
TERMS = terms(owners=3)
LIE = (b"lie",)


def play_rounds(server, hostile):
    """All rounds, in which mallory sends what ``hostile(round)`` says and the others answer plausibly."""
    while not server.is_finished:
        asked = server.pack_requests()
        for index, name in enumerate(name for name in asked if name != "mallory"):
            honest = pack_message(plausible(TERMS, server.round, seed=index))
            assert server.receive(name, honest) is None
        for raw in hostile(server.round) if "mallory" in asked else ():
            server.receive("mallory", raw)
        server.end_round()
    return server._server_generator.state_dict()


def answers(number):
    return (pack_message(plausible(TERMS, number, seed=7)),)


def payloads(name, number):
    payload = HOSTILE_PAYLOADS[name][0](TERMS, number)
    return payload if isinstance(payload, tuple) else (payload,)


@pytest.mark.parametrize(
    "when", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", HOSTILE_PAYLOADS)
def test_the_offender_is_named_and_the_run_ends(trust, name, when):
    assert len(HOSTILE_PAYLOADS) >= 25
    _, words, lie = HOSTILE_PAYLOADS[name]
    server = serve_consenting(TERMS, NAMES)
    state = play_rounds(
        server, lambda number: payloads(name, number) if number == when else answers(number)
    )
    (offense,) = server.offenses
    assert (offense.client_name, offense.round, offense.disqualifying) == ("mallory", when, lie)
    assert words in offense.reason
    assert ("mallory" in server.active) != lie
    assert server.num_answers == (9 if name == "answers twice" else 8 if not lie else 6 + when)
    assert all(value.isfinite().all() for value in state.values())
    trust("F1", "hostile payloads in a round: offender named, run ended, model finite", 1, of=1)


LATE = (0, False, "did not answer in time"), (1, False, "answered round 0 too late")


@pytest.mark.parametrize(
    ("sent", "offenses", "count"),
    [
        ({0: answers(0), 1: answers(0)}, [(1, True, "")], 7),
        ({0: answers(0), 1: answers(1), 2: answers(0)}, [(2, True, "")], 8),
        ({0: (), 1: (*answers(0), *answers(1)), 2: answers(2)}, LATE, 8),
        ({0: (), 1: answers(0) * 2}, (*LATE, (1, True, "")), 6),
        ({0: LIE + answers(0) * 50}, [(0, True, "")], 6),
        ({0: (*answers(0), *LIE)}, [(0, True, "")], 6),
    ],
    ids=["replay", "older replay", "late", "late twice", "many after a lie", "a lie afterwards"],
)
def test_replays_are_lies_and_late_answers_are_not(sent, offenses, count):
    server = serve_consenting(TERMS, NAMES)
    play_rounds(server, lambda number: sent[number])
    assert [(offense.round, offense.disqualifying) for offense in server.offenses] == [
        (number, lie) for number, lie, _ in offenses
    ]
    for offense, (*_, words) in zip(server.offenses, offenses, strict=True):
        assert words in offense.reason
    assert ("mallory" in server.active) != any(lie for _, lie, _ in offenses)
    assert server.num_answers == server.build_release().metadata["num_answers"] == count


def test_a_message_of_100_mb_is_neither_parsed_nor_stored(tmp_path, monkeypatch):
    server = serve_consenting(TERMS, NAMES, transcript_path=tmp_path / "wire")
    server.pack_requests()
    monkeypatch.setattr(messages, "_load_json", lambda *_: pytest.fail("it was parsed"))
    offense = server.receive("mallory", bytes(100 << 20))
    assert (offense.client_name, offense.round, offense.disqualifying) == ("mallory", 0, True)
    for number in (100 << 20, compute_max_message_bytes(TERMS)):
        assert str(number) in offense.reason
    assert server.receive("mallory", bytes(100 << 20)).reason == "takes no part in this run"
    assert (tmp_path / "wire").stat().st_size < 1 << 17  # of the transcript, too
    assert [entry.message for entry in read_transcript(tmp_path / "wire")][-2:] == [b"", b""]


def test_strangers_and_those_who_were_not_asked_have_no_answer():
    server = serve_consenting(terms(owners=3, clients_per_round=1), NAMES)
    (asked,) = server.pack_requests()
    assert server.receive("nobody", answers(0)[0]).reason == "takes no part in this run"
    assert server.offenses == []
    other = next(name for name in NAMES if name != asked)
    answer = pack_message(plausible(server.terms, 0))
    assert "without a request" in server.receive(other, answer).reason


def test_consent_in_other_words_is_none():
    weaker = terms(owners=3, noise_multiplier=TERMS.settings.noise_multiplier / 2)
    payloads_by_name = {
        name: payload(TERMS, 0)
        for name, (payload, _, lie) in HOSTILE_PAYLOADS.items()
        if lie and name not in ("the terms", "answers twice, otherwise")
    }
    for raw in (*payloads_by_name.values(), pack_message(weaker)):
        server = serving(TERMS, NAMES)
        server.pack_offers()
        offense = server.receive_consent("mallory", raw)
        assert (offense.client_name, offense.round, offense.disqualifying) == ("mallory", -1, True)
        assert server.active == []


def test_a_run_of_liars_alone_ends_without_a_release():
    server = serve_consenting(TERMS, NAMES)
    for name in server.pack_requests():
        server.receive(name, b"")
    server.end_round()
    assert server.is_finished
    with pytest.raises(ReleaseError, match="No client answered"):
        server.build_release()


def test_what_a_liar_says_moves_nothing_and_an_honest_answer_does():
    """The generator is the same to the bit, whatever the lie was."""
    honest, empty, *others = (
        play_rounds(serve_consenting(TERMS, NAMES), hostile)
        for hostile in (
            answers,
            lambda number: (b"",),
            lambda number: payloads("huge norm", number),
            lambda number: payloads("NaN", number),
            lambda number: payloads("lies about its count", number),
            lambda number: payloads("answers twice, otherwise", number),
        )
    )
    for state in others:
        assert all(torch.equal(state[key], empty[key]) for key in empty)
    assert not all(torch.equal(honest[key], empty[key]) for key in empty)


def test_an_owner_answers_any_bytes_with_a_refusal(tmp_path):
    ward = Ward(tmp_path)
    for name in HOSTILE_PAYLOADS:
        for raw in payloads(name, 1) if name != "the terms" else ():
            assert refusal(ward.reply(raw))
    assert ward.ledger.entries() == []
