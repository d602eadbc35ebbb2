"""The server: rounds, equal weights, going on after a crash, the record of the wire, and a release that proves its claim."""

import pytest
import torch
from federation import consent, plausible, play, serving, terms, wards

from privot.errors import PlanError, ReleaseError, SettingError
from privot.federated import Refusal, pack, unpack
from privot.federated.transcript import SEEN, SENT, read
from privot.privacy.gate import Gate
from privot.release import Release, verify

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ward 0", "ward 1", "ward 2")
TERMS = terms(owners=3)


def agreed(tmp_path=None, names=NAMES, own=TERMS, **more):
    made = serving(own, names, tmp_path, **more)
    for name, offer in made.offers().items():
        made.accept(name, offer)
    return made


def answer(server, *names):
    for name in names:
        assert (
            server.take(name, pack(plausible(server.terms, server.round, seed=NAMES.index(name))))
            is None
        )


def whole(server):
    while not server.done:
        answer(server, *server.ask())
        server.close()
    return server.finish().product.tensors


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
    assert release.facts["answers"] == 9


def test_nobody_is_asked_before_they_agreed():
    made = serving(TERMS, NAMES)
    made.offers()
    assert made.ask() == {}
    made.close()
    assert made.round == 1


def test_who_refuses_the_terms_is_left_in_peace():
    made = serving(TERMS, NAMES)
    made.accept(
        "ward 0", pack(Refusal(TERMS.run, -1, "the budget of this owner does not cover it"))
    )
    for name in NAMES[1:]:
        made.accept(name, pack(TERMS))
    assert set(made.ask()) == set(NAMES[1:])
    assert set(made.offers()) == set()
    assert [(each.name, each.round, each.lie) for each in made.offences] == [("ward 0", -1, False)]
    assert "budget" in made.offences[0].reason


def test_who_refuses_three_times_is_not_asked_again():
    made = agreed(own=terms(owners=3, rounds=5))
    for number in range(5):
        asked = made.ask()
        assert ("ward 0" in asked) == (number < 3)
        if "ward 0" in asked:
            made.take("ward 0", pack(Refusal(TERMS.run, number, "this owner cannot answer")))
        answer(made, *NAMES[1:])
        made.close()
    assert (
        len([each for each in made.offences if each.name == "ward 0" and "refused" in each.reason])
        == 3
    )


def test_everybody_gets_rows_of_their_own():
    asked = agreed().ask()
    drawn = [unpack(raw).images for raw in asked.values()]
    assert drawn[0].shape == (10, 1, 1, 8, 8)
    assert not torch.equal(drawn[0], drawn[1])


def test_asking_again_gives_the_same_bytes_to_those_who_have_not_answered():
    made = agreed()
    first = made.ask()
    answer(made, "ward 1")
    assert made.ask() == {name: raw for name, raw in first.items() if name != "ward 1"}


def test_a_cohort_goes_round():
    made = agreed(own=terms(owners=3, cohort=1, rounds=6))
    seen = []
    while not made.done:
        asked = list(made.ask())
        seen += asked
        answer(made, *asked)
        made.close()
    assert sorted(seen) == sorted(NAMES * 2)


def test_a_round_without_answers_changes_nothing_and_passes():
    made = agreed()
    before = {
        key: value.clone() for key, value in made._drawing.kept().items() if key.startswith("mean")
    }
    made.ask()
    made.close()
    after = made._drawing.kept()
    assert same(before, after)
    assert made.round == 1


def test_a_release_needs_an_answer_and_the_end(tmp_path):
    made = agreed()
    with pytest.raises(PlanError, match="round 0 of 3"):
        made.finish()
    for _ in range(3):
        made.ask()
        made.close()
    with pytest.raises(ReleaseError, match="no owner has answered"):
        made.finish()
    with pytest.raises(PlanError, match="over"):
        made.ask()


@pytest.mark.parametrize("names", [NAMES[:2], (*NAMES, "ward 3"), ("ward 0", "ward 0", "ward 1")])
def test_names_must_fit_the_terms(names):
    with pytest.raises(SettingError):
        serving(TERMS, names)


def test_a_generator_may_begin_with_characters_of_public_fonts(tmp_path):
    own = terms(owners=3, start="glyphs", practice=2)
    made = agreed(tmp_path, own=own)
    again = agreed(tmp_path, own=own)
    assert made.ask() == again.ask()
    plain = agreed(own=TERMS)
    assert (
        unpack(plain.ask()["ward 0"]).images.tolist()
        != unpack(made.ask()["ward 0"]).images.tolist()
    )


# A crash of the server


@pytest.mark.parametrize("moment", ["offered", "asked", "some answered", "all answered", "closed"])
def test_a_server_that_crashed_goes_on(tmp_path, moment):
    straight = whole(agreed(tmp_path / "straight"))
    made = agreed(tmp_path / "crashed")
    if moment != "offered":
        sent = made.ask()
        answer(
            made,
            *{"some answered": NAMES[:1], "all answered": NAMES, "closed": NAMES}.get(moment, ()),
        )
        if moment == "closed":
            made.close()
    made = agreed(tmp_path / "crashed")  # another process; who had agreed may say so again
    assert made.round == (moment == "closed")
    if moment in ("asked", "some answered", "all answered"):
        assert made.ask() == sent  # so that owners send what they had sent, at no cost
    assert same(whole(made), straight)


def test_a_server_that_goes_on_sends_the_same_images_though_fewer_are_there(tmp_path):
    sent = agreed(tmp_path).ask()
    again = serving(TERMS, NAMES, tmp_path)
    for name in NAMES[1:]:
        again.accept(name, pack(TERMS))
    assert again.ask() == {name: sent[name] for name in NAMES[1:]}


def test_real_owners_see_no_difference(tmp_path):
    """The server dies in the middle of the second round, each owner after each message: nobody pays twice."""
    everyone = wards(tmp_path, 3)
    server = serving(TERMS, everyone, tmp_path)
    consent(server, everyone)
    replies = {}
    for number in range(3):
        for name, asked in server.ask().items():
            replies[name, number] = everyone[name].again().reply(asked)
            if (name, number) == ("ward 1", 1):
                break
            server.take(name, replies[name, number])
        else:
            server.close()
            continue
        server = serving(TERMS, everyone, tmp_path)
        for name, asked in server.ask().items():
            reply = everyone[name].again().reply(asked)
            assert replies.setdefault((name, number), reply) == reply
            server.take(name, reply)
        server.close()
    assert server.taken == 9
    assert server.offences == []
    assert all(ward.rows() == TERMS.plan().stages[0].steps for ward in everyone.values())


def test_what_was_said_of_whom_outlives_a_crash(tmp_path):
    made = agreed(tmp_path)
    made.ask()
    made.take("ward 0", b"lie")
    answer(made, "ward 1", "ward 2")
    made.close()
    again = serving(TERMS, NAMES, tmp_path)
    assert again.offences == made.offences
    assert again.living == ["ward 1", "ward 2"]
    assert again.take("ward 0", pack(plausible(TERMS, 1))).reason == "takes no part in this run"


def test_a_liar_is_not_asked_again_by_a_server_that_crashed_in_that_round(tmp_path):
    made = agreed(tmp_path)
    made.ask()
    made.take("ward 0", b"lie")
    again = serving(TERMS, NAMES, tmp_path)
    assert (again.round, again.living) == (0, ["ward 1", "ward 2"])
    assert [each.name for each in again.offences] == ["ward 0"]
    assert "ward 0" not in again.ask()


@pytest.mark.parametrize(
    "change", [{"own": terms(owners=3, noise=9.0)}, {"names": NAMES[::-1]}], ids=["terms", "names"]
)
def test_a_folder_is_of_one_run(tmp_path, change):
    agreed(tmp_path)
    with pytest.raises(ReleaseError, match="other terms or other owners"):
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
            wire.append((SENT, self.name, raw))
            wire.append((SEEN, self.name, answer := everyone[self.name].reply(raw)))
            return answer

    server = serving(TERMS, everyone, record=tmp_path / "wire")
    play(server, {name: Heard(name) for name in everyone})
    assert sorted(
        (each.way, each.name, each.message) for each in read(tmp_path / "wire")
    ) == sorted(wire)
    assert len(wire) == 2 * 3 * 4


def test_the_answers_in_the_record_are_what_the_gates_gave(tmp_path, monkeypatch):
    given = []
    deal = Gate.deal
    monkeypatch.setattr(
        Gate, "deal", lambda *args, **more: given.append(deal(*args, **more)) or given[-1]
    )
    everyone = wards(tmp_path, 3)
    play(serving(TERMS, everyone, record=tmp_path / "wire"), everyone)
    seen = [unpack(each.message) for each in read(tmp_path / "wire") if each.way == SEEN]
    values = [each.values.numpy().tobytes() for each in seen if each.kind == "answer"]
    assert values == [each.float().numpy().tobytes() for each in given]
    assert len(values) == 9


def test_a_message_after_the_end_is_heard_and_named(tmp_path):
    made = agreed(record=tmp_path / "wire")
    made.ask()
    answer(made, "ward 0", "ward 1")
    made.close()
    for _ in range(2):
        answer(made, *made.ask())
        made.close()
    release = made.finish()
    assert (
        made.take("ward 2", pack(plausible(TERMS, 0))).reason == "late with its answer to round 0"
    )
    assert made.finish() is release


def test_a_lie_is_in_the_record_too(tmp_path):
    made = agreed(record=tmp_path / "wire")
    made.ask()
    made.take("ward 0", b"lie")
    assert [each for each in read(tmp_path / "wire") if each.message == b"lie"]
