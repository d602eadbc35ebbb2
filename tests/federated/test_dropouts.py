"""Owners that die, at each kind of message: the run ends, and what the others have spent is what it would have been."""

import pytest
from support.federation import compute_price, consent, serving, terms, wards

from privot.errors import ReleaseError

pytestmark = pytest.mark.usefixtures("one_thread")
TERMS = terms(owners=5, rounds=2, warmup_rounds=0)
PRICE = compute_price(TERMS)
MOMENTS = ("terms come", "terms are sent back", "request comes", "answer is sent", "answer is lost")
FAST = ((1, "terms come"), (3, "answer is lost"))


class Mortal:
    """A ward that dies at a moment of the first round, or of the consent."""

    def __init__(self, ward, moment):
        self.ward = ward
        self.moment = moment
        self.is_dead = False

    def reply(self, raw, number):
        """Its reply, or None if it died before, or the message was lost with it."""
        if self.is_dead:
            return None
        self.is_dead = bool(self.moment) and number == (-1 if "terms" in self.moment else 0)
        if self.is_dead and "come" in self.moment:
            return None
        reply = self.ward.reply(raw)
        return None if self.is_dead and self.moment == "answer is lost" else reply


@pytest.mark.parametrize(
    ("killed", "moment"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in ((0, ""), *((killed, moment) for killed in range(1, 5) for moment in MOMENTS))
    ],
)
def test_the_others_go_on(tmp_path, trust, killed, moment):
    everyone = wards(tmp_path, 5)
    mortals = {
        name: Mortal(ward, moment if number < killed else "")
        for number, (name, ward) in enumerate(everyone.items())
    }
    server = serving(TERMS, everyone)
    for name, offer in server.pack_offers().items():
        if (reply := mortals[name].reply(offer, -1)) is not None:
            assert server.receive_consent(name, reply) is None
    while not server.is_finished:
        for name, request in server.pack_requests().items():
            if (reply := mortals[name].reply(request, server.round)) is not None:
                assert server.receive(name, reply) is None
        server.end_round()
    assert server.round == 2
    assert server.build_release().guarantee.epsilon == pytest.approx(PRICE)
    assert not any(offense.disqualifying for offense in server.offenses)
    dead, survivors = list(everyone.values())[:killed], list(everyone.values())[killed:]
    assert [ward.spent() for ward in survivors] == [pytest.approx(PRICE)] * len(survivors)
    assert [ward.rows() for ward in survivors] == [TERMS.plan().stages[0].steps] * len(survivors)
    # The dead have spent the plan if they were asked at all, and nothing if they died before.
    paid = 0.0 if "terms" in moment or moment == "request comes" else PRICE
    assert [ward.spent() for ward in dead] == [pytest.approx(paid)] * killed
    trust(
        "F2",
        "0 to 4 of 5 owners dead at a kind of message: the others' epsilon as planned, the run ended",
        1,
        of=1,
    )


def test_all_dead_ends_without_a_release(tmp_path):
    everyone = wards(tmp_path, 5)
    server = serving(TERMS, everyone)
    consent(server, everyone)
    while not server.is_finished:
        server.pack_requests()
        server.end_round()
    assert server.round == 2
    with pytest.raises(ReleaseError, match="No client answered"):
        server.build_release()


def test_one_that_comes_back_goes_on(tmp_path):
    """It misses a round, as another process, and pays for no more than the plan."""
    everyone = wards(tmp_path, 3)
    server = serving(terms(owners=3), everyone)
    consent(server, everyone)
    for number in range(3):
        for name, request in server.pack_requests().items():
            if (name, number) != ("ward 1", 1):
                assert server.receive(name, everyone[name].again().reply(request)) is None
        server.end_round()
    assert server.num_answers == 8
    assert everyone["ward 1"].spent() == everyone["ward 0"].spent()
    assert [(offense.client_name, offense.round) for offense in server.offenses] == [("ward 1", 1)]
