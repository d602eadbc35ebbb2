"""An owner against its server: what it agrees to, what it refuses, and a ledger that is right whatever came."""

import hashlib
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from support.federation import CLASSES, OTHER, ROOMY, RUN, Ward, box, images, refusal, terms
from support.hostile_payloads import build_frame, split_frame

from privot.components.client_critics import ClientCritics
from privot.data.client_data import load_client_data
from privot.data.dataset import Sensitive
from privot.errors import DataError, LedgerError, QueryError, SettingError
from privot.federated import Answer, Client, ClientPolicy, Request, pack_message, unpack_message
from privot.federated.client_folder import ClientFolder
from privot.federated.client_policy import estimate_client_flops
from privot.privacy import answers
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.privacy.shard_checkpoint import list_shard_checkpoints
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")
TERMS = terms()


def request(number, seed=0, agreed=TERMS, run=RUN, **other):
    return pack_message(Request(run, number, images(agreed, seed + 100 * number, **other)))


@pytest.fixture
def ward(tmp_path):
    return Ward(tmp_path)


@pytest.fixture
def agreed(ward):
    assert ward.reply(pack_message(TERMS)) == pack_message(TERMS)
    return ward


def price(agreed=TERMS):
    return float(agreed.plan().cost().epsilon(1e-5))


# What it does for an honest server


def test_consent_is_the_terms_to_the_byte_and_reads_and_charges_nothing(ward, monkeypatch):
    monkeypatch.setattr(Sensitive, "_read_records", lambda *_: pytest.fail("a record was read"))
    for _ in range(2):
        assert ward.reply(pack_message(TERMS)) == pack_message(TERMS)
    assert ward.ledger.entries() == []


def test_the_whole_plan_is_paid_before_the_first_record_is_read(agreed, monkeypatch):
    seen = []
    take = Sensitive._read_records
    monkeypatch.setattr(
        Sensitive, "_read_records", lambda *args: seen.append(agreed.spent()) or take(*args)
    )
    assert unpack_message(agreed.reply(request(0))).kind == "answer"
    assert seen
    assert seen == [pytest.approx(price())] * len(seen)


def test_all_rounds_cost_the_plan_and_no_more(agreed):
    for number in range(3):
        assert unpack_message(agreed.reply(request(number))).round == number
    assert agreed.spent() == pytest.approx(price())
    assert agreed.rows() == TERMS.plan().stages[0].steps


def test_what_crosses_is_what_the_gate_gave(agreed, monkeypatch):
    given = []
    deal = Gate.query_clients
    monkeypatch.setattr(
        Gate, "query_clients", lambda *args, **more: given.append(deal(*args, **more)) or given[-1]
    )
    for number in range(3):
        raw = agreed.reply(request(number))
        released = given[-1].float().reshape(-1).contiguous()
        assert split_frame(raw)[1] == released.numpy().tobytes()
    assert len(given) == 3


def test_the_ledger_knows_the_digest_of_what_crossed(agreed):
    sent = [agreed.reply(request(number)) for number in range(3)]
    known = [each["digest"] for each in agreed.ledger.entries() if each["kind"] == "commit"]
    assert known == [hashlib.sha256(raw).hexdigest() for raw in sent]


@pytest.mark.usefixtures("real_fsync")
def test_an_answer_lies_on_the_disk_by_its_name_before_it_is_sent(agreed, monkeypatch):
    """A name that a power failure takes away would have its round answered anew."""
    folder = agreed.folder / "run"
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (
            synced.append((os.fstat(file).st_ino, (folder / "answer-0").exists())) or sync(file)
        ),
    )
    agreed.reply(request(0))
    assert (folder.stat().st_ino, True) in synced


@pytest.mark.usefixtures("real_fsync")
def test_and_so_do_its_bytes(agreed, monkeypatch):
    """What still lies in a buffer when the disk is asked to keep it is lost with the power."""
    sizes = {}
    sync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: sizes.update({os.fstat(file).st_ino: os.fstat(file).st_size}) or sync(file),
    )
    agreed.reply(request(0))
    for file in (
        agreed.folder / "run" / "answer-0",
        *list_shard_checkpoints(agreed.ledger).values(),
    ):
        assert sizes[file.stat().st_ino] == file.stat().st_size > 0


def test_an_interrupt_is_heard_when_the_answer_is_kept(agreed, monkeypatch):
    commit = agreed.ledger.commit

    def interrupted(*given):
        signal.raise_signal(signal.SIGINT)
        return commit(*given)

    monkeypatch.setattr(type(agreed.ledger), "commit", lambda self, *given: interrupted(*given))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # one that was started in the background hears none
    try:
        with pytest.raises(KeyboardInterrupt):
            agreed.reply(request(0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (agreed.folder / "run" / "answer-0").exists()
    monkeypatch.undo()
    rows = agreed.rows()
    assert isinstance(unpack_message(agreed.reply(request(0))), Answer)  # the one that was kept
    assert agreed.rows() == rows


def test_the_same_request_again_is_free_and_the_same(agreed):
    first = agreed.reply(request(0))
    lines = len(agreed.ledger.entries())
    assert agreed.reply(request(0)) == first
    agreed.reply(request(1))
    assert agreed.again().reply(request(0)) == first  # an old one, too
    assert agreed.rows() == 2 * CLASSES
    assert len([each for each in agreed.ledger.entries() if each["kind"] == "ask"]) == 2
    assert lines < len(agreed.ledger.entries())


def test_rounds_may_be_left_out(agreed):
    assert unpack_message(agreed.reply(request(2))).kind == "answer"


def test_its_critic_learns_from_round_to_round(agreed, monkeypatch):
    states = []
    answers = ClientCritics.query_gradients

    def watched(self, *args):
        found = answers(self, *args)
        states.append(self.gate._shards[1]["weights"].clone())
        return found

    monkeypatch.setattr(ClientCritics, "query_gradients", watched)
    for number in range(3):
        agreed.again().reply(request(number))
    assert not torch.equal(states[0], states[1])
    assert (states[2] - states[1]).abs().max() < (
        states[2]
    ).abs().max()  # it goes on from there, and not from new weights


# Restarted between any two messages


def test_a_new_process_for_each_message(ward):
    assert ward.again().reply(pack_message(TERMS)) == pack_message(TERMS)
    for number in range(3):
        assert unpack_message(ward.again().reply(request(number))).kind == "answer"
    assert ward.again().spent() == pytest.approx(price())
    assert ward.rows() == TERMS.plan().stages[0].steps
    assert "rounds" in refusal(ward.again().reply(request(3)))


def test_two_processes_take_turns(tmp_path):
    one = Ward(tmp_path)
    other = Ward(tmp_path)
    one.reply(pack_message(TERMS))
    for number, ward in enumerate((one, other, one)):
        assert unpack_message(ward.reply(request(number))).kind == "answer"
    assert one.rows() == TERMS.plan().stages[0].steps


def test_the_warm_up_is_done_once(agreed, monkeypatch):
    lessons = []
    update = Gate.update_shards

    def watched(self, query, *args, **more):
        lessons.append(query.__name__)
        return update(self, query, *args, **more)

    monkeypatch.setattr(Gate, "update_shards", watched)
    for number in range(2):
        agreed.again().reply(request(number))
    assert lessons == ["warm_up", "train_on_received", "train_on_received"]


@pytest.mark.parametrize("before", ["commit", "store", "keep"])
def test_a_crash_before_an_answer_is_sent_loses_it_and_the_ledger_stays_right(
    agreed, monkeypatch, before
):
    def crash(*_, **__):
        raise OSError("the machine stopped")

    agreed.reply(request(0))
    with monkeypatch.context() as broken:
        place, name = {
            "commit": (Ledger, "commit"),
            "store": (Gate, "save_shard_states"),
            "keep": (ClientFolder, "store_answer"),
        }[before]
        broken.setattr(place, name, crash)
        assert refusal(agreed.reply(request(1))) == "This client cannot answer."
    assert agreed.rows() == 2 * CLASSES  # what was marked is gone, sent or not
    assert unpack_message(agreed.again().reply(request(1))).kind == "answer"  # out of what is left
    assert agreed.rows() == 3 * CLASSES
    assert "used up" in refusal(agreed.reply(request(2)))
    assert agreed.spent() == pytest.approx(price())


def test_what_its_critic_knows_is_removed_after_the_last_answer(agreed):
    sent = agreed.reply(request(0))
    assert list(agreed.folder.glob("*.vault*"))
    for number in (1, 2):
        agreed.reply(request(number))
    assert not list(agreed.folder.glob("*.vault*"))
    assert agreed.again().reply(request(0)) == sent


def test_nor_does_it_stay_where_a_round_was_missed(agreed):
    """After the last round none is left to ask in, though the plan has answers left."""
    for number in (0, 2):
        agreed.reply(request(number))
    assert agreed.rows() < TERMS.plan().stages[0].steps
    assert not list(agreed.folder.glob("*.vault*"))
    assert "go back" in refusal(agreed.again().reply(request(1)))


def test_nor_where_no_turn_of_a_cohort_is_left(tmp_path):
    """Five owners, two a round, four rounds: of the second pair none is asked again, though the plan has room for another turn."""
    few = terms(owners=5, clients_per_round=2, rounds=4)
    ward = Ward(tmp_path)
    ward.reply(pack_message(few))
    assert unpack_message(ward.reply(request(1))).kind == "answer"
    assert ward.rows() < few.plan().stages[0].steps
    assert list_shard_checkpoints(ward.ledger) == {}
    other = Ward(tmp_path / "first")
    other.reply(pack_message(few))
    other.reply(request(0))
    assert len(list_shard_checkpoints(other.ledger)) == 1
    assert "next turn is round 3" in refusal(other.reply(request(1)))
    assert unpack_message(other.reply(request(3))).kind == "answer"
    assert list_shard_checkpoints(other.ledger) == {}


def test_nor_after_a_crash_that_lost_the_last_answer(agreed, monkeypatch):
    for number in (0, 1):
        agreed.reply(request(number))
    with monkeypatch.context() as broken:
        broken.setattr(
            Ledger, "commit", lambda *_: (_ for _ in ()).throw(OSError("the machine stopped"))
        )
        agreed.reply(request(2))
    assert list_shard_checkpoints(agreed.ledger)
    assert "used up" in refusal(agreed.again().reply(request(2)))
    assert list_shard_checkpoints(agreed.ledger) == {}


def test_whoever_removes_what_a_critic_knows_ends_the_run_for_this_owner(agreed):
    """Else a critic that knows nothing would go on in its place."""
    sent = agreed.reply(request(0))
    (file,) = list_shard_checkpoints(agreed.ledger).values()
    file.unlink()
    rows = agreed.rows()
    assert refusal(agreed.again().reply(request(1))) == "This client has left the run for good."
    assert (agreed.rows(), list_shard_checkpoints(agreed.ledger)) == (rows, {})
    assert agreed.reply(request(0)) == sent


def test_who_leaves_answers_nothing_new(agreed):
    sent = agreed.reply(request(0))
    agreed.owner.leave()
    assert not list(agreed.folder.glob("*.vault*"))
    assert refusal(agreed.again().reply(request(1))) == "This client has left the run for good."
    assert agreed.reply(request(0)) == sent
    assert agreed.spent() == pytest.approx(price())


# A hostile server


def test_a_row_asked_twice(agreed):
    agreed.reply(request(0))
    assert "to another request" in refusal(agreed.reply(request(0, seed=1)))
    assert "to another request" in refusal(agreed.again().reply(request(0, seed=1)))
    assert agreed.rows() == CLASSES


@pytest.mark.parametrize("number", [3, 4, 10**6])
def test_more_rounds_than_agreed(agreed, number):
    assert "3 rounds" in refusal(agreed.reply(request(number)))
    assert agreed.ledger.entries() == []


def test_rounds_that_go_back(agreed):
    agreed.reply(request(2))
    assert "go back" in refusal(agreed.reply(request(1)))
    assert agreed.rows() == CLASSES


def test_a_cohorts_owner_is_asked_its_share_and_no_more(tmp_path):
    few = terms(
        clients_per_round=1
    )  # one of three owners in each of three rounds: one round for each
    ward = Ward(tmp_path)
    ward.reply(pack_message(few))
    assert unpack_message(ward.reply(request(0))).kind == "answer"
    assert "next turn" in refusal(ward.reply(request(1)))
    assert ward.spent() == pytest.approx(price(few))
    assert price(few) < price()


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 4.0},
        {"rounds": 4},
        {"batch_per_class": 2},
        {"critic_steps": 2},
        {"owners": 2},
        {"classes": 11},
        {"shape": (1, 9, 9)},
        {"unit": "record", "num_critics": 4},
    ],
    ids=str,
)
def test_other_terms_under_the_same_run(agreed, change):
    assert "other terms" in refusal(agreed.reply(pack_message(terms(**change))))
    assert unpack_message(agreed.again().reply(request(0))).kind == "answer"
    assert agreed.spent() == pytest.approx(price())


def test_another_run_under_the_same_folder(agreed):
    assert "another run" in refusal(agreed.reply(pack_message(terms(run=OTHER))))
    assert "agreed to no terms" in refusal(agreed.reply(request(0, run=OTHER)))
    assert agreed.ledger.entries() == []


def test_a_run_whose_traces_are_gone_is_not_joined_again(agreed, tmp_path):
    """Else a server could have all rounds twice, and the release would say what one of them costs."""
    agreed.reply(request(0))
    lines = agreed.ledger.entries()
    anew = Client(box(), ROOMY, Ledger(tmp_path / "ledger.jsonl"), tmp_path / "another")
    assert "in this run before" in refusal(anew.reply(pack_message(TERMS)))
    assert "agreed to no terms" in refusal(anew.reply(request(0)))
    assert agreed.ledger.entries() == lines
    assert anew.reply(pack_message(terms(run=OTHER))) == pack_message(
        terms(run=OTHER)
    )  # another run is another run


# Two clients with one ledger, each with a folder of its own, at the same time


def twins(folder, one=TERMS, two=TERMS):
    """Both have agreed before either has answered."""
    book = Ledger(folder / "ledger.jsonl")
    pair = [
        Client(box(), ROOMY, Ledger(book.path), folder / name, Runtime("cpu"))
        for name in ("one", "two")
    ]
    for owner, agreed in zip(pair, (one, two), strict=True):
        assert owner.reply(pack_message(agreed)) == pack_message(agreed)
    return book, *pair


@pytest.mark.parametrize("moment", ["reserve", "mark_asked", "commit"])
def test_two_folders_do_not_answer_one_run(tmp_path, monkeypatch, moment):
    """The second does all of its work at the worst moment of the first: before its charge, before its mark, and after it."""
    book, one, two = twins(tmp_path)
    heard = []
    plain = getattr(Ledger, moment)

    def overtaken(self, *args, **more):
        monkeypatch.setattr(Ledger, moment, plain)
        heard.append(two.reply(request(0)))
        return plain(self, *args, **more)

    monkeypatch.setattr(Ledger, moment, overtaken)
    heard.append(one.reply(request(0)))
    kinds = [unpack_message(raw).kind for raw in heard]
    assert sorted(kinds) == ["answer", "refusal"]
    assert "in this run before" in refusal(heard[kinds.index("refusal")])
    winner, loser = (one, two) if kinds[1] == "answer" else (two, one)
    charges = [each for each in book.entries() if each["kind"] == "reserve"]
    assert float(book.compute_spent_cost().epsilon(1e-5)) >= price() * (1 - 1e-9)
    assert len(list_shard_checkpoints(book)) == 1  # what the other's critic learned is gone
    for number in (1, 2):
        assert refusal(loser.reply(request(number)))
        assert unpack_message(winner.reply(request(number))).kind == "answer"
    assert [
        each for each in book.entries() if each["kind"] == "reserve"
    ] == charges  # the loser pays once at most


@pytest.mark.parametrize("run", [RUN, OTHER], ids=["one run", "two runs"])
def test_clients_at_once_do_not_pass_the_wall(tmp_path, monkeypatch, run):
    """Both were told at consent that there is room, and there is for one: threads that come to the charge together."""
    book, one, two = twins(tmp_path, two=terms(run=run))
    book.set_limit(Budget(price() * 1.01))
    gathered = threading.Barrier(2)
    plain = Ledger.reserve

    def together(self, *args, **more):
        gathered.wait(60)
        return plain(self, *args, **more)

    monkeypatch.setattr(Ledger, "reserve", together)
    with ThreadPoolExecutor(2) as pool:
        heard = list(
            pool.map(
                lambda pair: unpack_message(pair[0].reply(request(0, run=pair[1]))),
                [(one, RUN), (two, run)],
            )
        )
    assert sorted(each.kind for each in heard) == ["answer", "refusal"]
    assert float(book.compute_spent_cost().epsilon(1e-5)) == pytest.approx(price())


def test_two_runs_may_be_answered_in_turn(tmp_path):
    book, one, two = twins(tmp_path, two=terms(run=OTHER))
    for number in range(3):
        for owner, run in ((one, RUN), (two, OTHER)):
            assert unpack_message(owner.reply(request(number, run=run))).kind == "answer"
    assert float(book.compute_spent_cost().epsilon(1e-5)) > price()
    assert list_shard_checkpoints(book) == {}


def test_a_charge_whose_ticket_was_lost_ends_nothing(agreed, monkeypatch):
    """A crash between charge and ticket: charged again, and it goes on, since nothing was answered under the first."""
    with monkeypatch.context() as broken:
        broken.setattr(
            answers,
            "write_atomically",
            lambda *_, **__: (_ for _ in ()).throw(OSError("the machine stopped")),
        )
        assert refusal(agreed.reply(request(0))) == "This client cannot answer."
    assert agreed.spent() == pytest.approx(price())
    assert unpack_message(agreed.again().reply(request(0))).kind == "answer"
    assert agreed.spent() > price()


def test_a_request_without_terms(ward):
    assert "agreed to no terms" in refusal(ward.reply(request(0)))
    assert ward.ledger.entries() == []


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (1, 16, 16)},
        {"shape": (3, 8, 8)},
        {"batch_per_class": 2},
        {"classes": 9},
        {"classes": 11},
    ],
    ids=str,
)
def test_other_images_than_agreed(agreed, other):
    assert "images" in refusal(agreed.reply(request(0, **other)))
    assert agreed.ledger.entries() == []


def test_images_that_are_not_numbers(agreed):
    """Images are bytes, so none of them can be NaN; floats are no request."""
    head, data = split_frame(request(0))
    head["images"] |= {"dtype": "F32", "data_offsets": [0, 4 * len(data)]}
    assert "U8" in refusal(agreed.reply(build_frame(head, b"\xff\xff\xff\x7f" * len(data))))
    assert agreed.ledger.entries() == []


def test_no_noise_at_all(tmp_path):
    ward = Ward(tmp_path, wall=Budget(math.inf))
    assert "without noise" in refusal(ward.reply(pack_message(terms(noise_multiplier=0.0))))
    assert ward.ledger.entries() == []


def test_too_little_noise_for_the_budget_of_a_run(tmp_path):
    ward = Ward(tmp_path, wall=Budget(price() * 0.99))
    assert (
        refusal(ward.reply(pack_message(TERMS)))
        == "The budget of this client does not cover the run."
    )
    assert Ward(tmp_path, wall=Budget(price() * 1.01)).reply(pack_message(TERMS)) == pack_message(
        TERMS
    )


def test_too_little_left_in_the_budget_of_the_data(ward):
    ward.ledger.set_limit(Budget(price() * 0.99))
    assert (
        refusal(ward.reply(pack_message(TERMS)))
        == "The budget of this client does not cover the run."
    )


def test_a_budget_that_another_run_used_up_between_consent_and_request(agreed):
    agreed.ledger.set_limit(Budget(price() * 1.01))
    agreed.ledger.reserve(terms(noise_multiplier=20.0).plan(), "another")
    before = agreed.spent()
    assert refusal(agreed.reply(request(0))) == "The budget of this client does not cover the run."
    assert agreed.spent() == before


@pytest.mark.parametrize(
    "change",
    [{"shape": (3, 8, 8)}, {"shape": (1, 28, 28)}, {"classes": 9}, {"classes": 62}],
    ids=str,
)
def test_terms_for_other_data(ward, change):
    """How many classes it has may be what folders were found: the owner hears it, and not the server."""
    said = refusal(ward.reply(pack_message(terms(**change))))
    assert said == "The terms have other images or classes than this client declared."


def test_terms_that_protect_less_than_asked_for(tmp_path):
    weaker = terms(unit="record", num_critics=4)
    assert "protect" in refusal(Ward(tmp_path / "a").reply(pack_message(weaker)))
    lenient = Ward(tmp_path / "b", policy=ClientPolicy(unit="record"))
    assert lenient.reply(pack_message(weaker)) == pack_message(weaker)


@pytest.mark.parametrize(
    "change",
    [
        {"critic_steps": 10**6},
        {"critic_channels": 10**6},
        {"critic_batch_size": 10**6},
        {"warmup_rounds": 10**6},
        {"rounds": 10**6},
        {"unit": "record", "num_critics": 10**6},
        {
            "batch_per_class": 10**5,
            "rounds": 1,
        },  # of images alone 64 MB, which a message may have, and their maps
        {
            "batch_per_class": 2000,
            "rounds": 1,
            "unit": "record",
            "num_critics": 2,
            "critic_channels": 32,
        },  # each row with a copy of its critic
        {
            "unit": "record",
            "num_critics": 20_000,
            "critic_channels": 32,
            "warmup_rounds": 0,
            "rounds": 1,
        },  # little work, but all critics lie in memory
    ],
    ids=str,
)
def test_terms_that_would_take_the_whole_machine(tmp_path, change):
    assert "computation or memory" in refusal(
        Ward(tmp_path, policy=ClientPolicy(unit="record")).reply(
            pack_message(terms(**{"noise_multiplier": 1e6, **change}))
        )
    )


def test_work_and_memory_grow_with_the_terms():
    assert estimate_client_flops(terms(critic_steps=50)) > estimate_client_flops(TERMS)
    for more in (
        {"critic_channels": 64},
        {"batch_per_class": 9},
        {"records_per_critic": 10**5},
        {"unit": "record"},
    ):
        assert terms(**more).settings.estimate_memory(TERMS.spec) > TERMS.settings.estimate_memory(
            TERMS.spec
        )


def test_other_kinds_are_not_heard(agreed):
    answer = agreed.reply(request(0))
    assert "accepts only" in refusal(agreed.reply(answer))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_in_whatever_order_the_ledger_is_right(ward, seed):
    """Terms, requests and nonsense at random, with restarts: never more than the plan, and one answer to a round."""
    draw = np.random.default_rng(seed)
    agreed_to = False
    sent = {}
    asked = {}
    for _ in range(25):
        if draw.random() < 0.3:
            ward.again()
        number = int(draw.integers(0, 5))
        which = int(draw.integers(0, 2))
        match draw.integers(0, 5):
            case 0:
                agreed_to |= ward.reply(pack_message(TERMS)) == pack_message(TERMS)
            case 1 if agreed_to:
                assert refusal(
                    ward.reply(
                        pack_message(terms(run=OTHER if number % 2 else RUN, noise_multiplier=9.0))
                    )
                )
            case _:
                reply = ward.reply(raw := request(number, seed=which))
                if unpack_message(reply).kind == "answer":
                    assert agreed_to
                    assert sent.setdefault(number, reply) == reply
                    assert asked.setdefault(number, raw) == raw
        assert ward.rows() == CLASSES * len(sent) <= TERMS.plan().stages[0].steps
        assert ward.spent() == pytest.approx(price() if sent else 0.0)


# What a refusal tells


def test_a_refusal_names_no_file_and_no_error(agreed, monkeypatch):
    def broken(*_, **__):
        raise LedgerError("/home/ward/secret/ledger.jsonl: the ledger cannot be written")

    monkeypatch.setattr(Ledger, "reserve", broken)
    raw = agreed.reply(request(0))
    assert refusal(raw) == "The ledger of this client cannot be used."
    assert b"secret" not in raw
    assert any("secret" in text for text in agreed.heard)  # the owner itself hears of it


def test_an_error_that_carries_records_is_not_told_at_all(agreed, monkeypatch):
    monkeypatch.setattr(ClientCritics, "query_gradients", lambda *_: {}["record 7 of patient 12"])
    assert refusal(agreed.reply(request(0))) == "This client cannot answer."
    assert not any("patient" in text for text in agreed.heard)


def test_a_query_that_failed_ends_the_run_for_good(agreed, monkeypatch):
    def failing(*_):
        raise QueryError("A query failed on the secret side with ValueError")

    with monkeypatch.context() as broken:
        broken.setattr(ClientCritics, "query_gradients", failing)
        assert refusal(agreed.reply(request(0))) == "This client has left the run for good."
    assert list_shard_checkpoints(agreed.ledger) == {}
    assert refusal(agreed.again().reply(request(1))) == "This client has left the run for good."


def test_a_kept_answer_that_was_altered_is_not_sent(agreed):
    agreed.reply(request(0))
    file = agreed.folder / "run" / "answer-0"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert refusal(agreed.again().reply(request(0))) == "This client cannot answer."


def test_data_of_several_owners_is_not_one_owners(tmp_path, ledger):
    from privot.data import load_dataset

    with pytest.raises(DataError):
        Client(load_dataset("digits", num_clients=3), ROOMY, ledger, tmp_path)


def test_records_unit_end_to_end(tmp_path):
    weaker = terms(unit="record", num_critics=4)
    ward = Ward(tmp_path, policy=ClientPolicy(unit="record"))
    ward.reply(pack_message(weaker))
    for number in range(3):
        assert unpack_message(ward.again().reply(request(number))).kind == "answer"
    assert ward.rows() == weaker.plan().stages[0].steps
    assert str(weaker.plan().neighbours) == "replace"


@pytest.mark.parametrize("held", [("cat",), ("cat", "dog"), ("cat", "dog", "owl")])
def test_which_terms_are_refused_tells_nothing_of_the_class_folders(tmp_path, held):
    """A hostile server offers terms for every number of classes and hears the same from owners of one, two or three class folders."""
    for name in held:
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 100).save(tmp_path / "photos" / name / "1.png")
    with pytest.raises(SettingError, match="declare --shape"):
        load_client_data(
            tmp_path / "photos"
        )  # else the number of folders would be what terms are held against
    data = load_client_data(tmp_path / "photos", shape=(1, 8, 8), class_names=("cat", "dog", "owl"))
    heard = []
    for classes in range(1, 6):
        for shape in ((1, 8, 8), (1, 9, 9)):
            folder = tmp_path / f"{classes}-{shape[1]}"
            owner = Client(
                data, ROOMY, Ledger(folder / "ledger.jsonl"), folder / "run", Runtime("cpu")
            )
            heard.append(
                unpack_message(owner.reply(pack_message(terms(classes=classes, shape=shape)))).kind
            )
    assert heard == ["terms" if place == 4 else "refusal" for place in range(10)]


def test_a_client_declares_what_terms_are_held_against(privot, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 100).save(tmp_path / "photos" / name / "1.png")
    words = (
        "federate",
        "client",
        "--data",
        "photos",
        "--server",
        "localhost:1",
        "--ca",
        "x",
        "--key",
        "x",
        "--epsilon",
        5,
    )
    for less in (
        (),
        ("--classes", 2),
        ("--shape", "1x8x8"),
        ("--partition", "0/2"),
        ("--partition", "0/2", "--classes", 2),
    ):
        code, out, err = privot(*words, *less)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "declare --shape" in err
    assert not (tmp_path / "home").exists()
