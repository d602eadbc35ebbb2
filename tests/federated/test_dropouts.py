"""Owners that die, at each kind of message: the run ends, and what the others have spent is what it would have been."""

import pytest
from support.federation import consent, serving, terms, wards

pytestmark = pytest.mark.usefixtures("one_thread")
TERMS = terms(owners=5, rounds=2, warmup_rounds=0)
PRICE = float(TERMS.plan().cost().epsilon(1e-5))
MOMENTS = ("terms come", "terms are sent back", "request comes", "answer is sent", "answer is lost")


class Mortal:
    """A ward that dies at a moment of the second round, or of the consent."""

    def __init__(self, ward, moment, number):
        self.ward = ward
        self.moment = moment
        self.number = number
        self.dead = False

    def hears(self, raw, number):
        """Its reply, or None if it died before, or the message was lost with it."""
        if self.dead:
            return None
        now = number == self.number
        if now and self.moment in ("terms come", "request comes"):
            self.dead = True
            return None
        reply = self.ward.reply(raw)
        if now and self.moment in ("terms are sent back", "answer is sent", "answer is lost"):
            self.dead = True
        return None if now and self.moment == "answer is lost" else reply


@pytest.mark.parametrize(
    ("killed", "moment"),
    [(0, "never"), *((killed, moment) for killed in range(1, 5) for moment in MOMENTS)],
)
def test_the_others_go_on(tmp_path, trust, killed, moment):
    number = -1 if "terms" in moment else 0
    everyone = wards(tmp_path, 5)
    doomed = {
        name: Mortal(ward, moment if place < killed else "", number)
        for place, (name, ward) in enumerate(everyone.items())
    }
    server = serving(TERMS, everyone)
    for name, offer in server.pack_offers().items():
        if (reply := doomed[name].hears(offer, -1)) is not None:
            assert server.receive_consent(name, reply) is None
    while not server.is_finished:
        for name, asked in server.pack_requests().items():
            if (reply := doomed[name].hears(asked, server.round)) is not None:
                assert server.receive(name, reply) is None
        server.end_round()
    release = server.build_release()
    assert server.round == 2
    survivors = list(everyone.values())[killed:]
    assert [ward.spent() for ward in survivors] == [pytest.approx(PRICE)] * len(survivors)
    assert [ward.rows() for ward in survivors] == [TERMS.plan().stages[0].steps] * len(survivors)
    assert release.guarantee.epsilon == pytest.approx(PRICE)
    assert all(not each.disqualifying for each in server.offenses)
    # The dead have spent the plan if they were asked at all, and nothing if they died before.
    paid = 0.0 if "terms" in moment or moment == "request comes" else PRICE
    assert [ward.spent() for ward in list(everyone.values())[:killed]] == [
        pytest.approx(paid)
    ] * killed
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
    rounds = 0
    while not server.is_finished:
        server.pack_requests()
        server.end_round()
        rounds += 1
    assert rounds == 2
    with pytest.raises(Exception, match="No client answered"):
        server.build_release()


def test_one_that_comes_back_goes_on(tmp_path):
    """It misses a round, as another process, and pays for no more than the plan."""
    everyone = wards(tmp_path, 3)
    agreed = terms(owners=3)
    server = serving(agreed, everyone)
    consent(server, everyone)
    for number in range(3):
        for name, asked in server.pack_requests().items():
            if (name, number) != ("ward 1", 1):
                assert server.receive(name, everyone[name].again().reply(asked)) is None
        server.end_round()
    assert server.num_answers == 8
    assert everyone["ward 1"].spent() == everyone["ward 0"].spent()
    assert [(each.client_name, each.round) for each in server.offenses] == [("ward 1", 1)]
