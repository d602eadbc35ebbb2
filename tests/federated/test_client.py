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
from support.federation import (
    CLASSES,
    OTHER,
    ROOMY,
    RUN,
    Ward,
    compute_price,
    is_answer,
    make_dataset,
    pack_request,
    refusal,
    terms,
)
from support.hostile_payloads import build_frame, split_frame

from privot.components.client_critics import ClientCritics
from privot.data import load_dataset
from privot.data.client_data import load_client_data
from privot.data.dataset import Sensitive
from privot.errors import DataError, LedgerError, QueryError, SettingError
from privot.federated import Client, ClientPolicy, pack_message, unpack_message
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
OFFER = pack_message(TERMS)
PRICE = compute_price(TERMS)
STEPS = TERMS.plan().stages[0].steps
OVER_BUDGET = "The budget of this client does not cover the run."
HAS_LEFT = "This client has left the run for good."
FAILED = "This client cannot answer."
PHOTO_CLIENT = "federate client --data photos --server localhost:1 --ca x --key x --epsilon 5"


def stop(*_, **__):
    raise OSError("the machine stopped")


def entries_of(ledger, kind):
    return [entry for entry in ledger.entries() if entry["kind"] == kind]


@pytest.fixture
def ward(tmp_path):
    return Ward(tmp_path)


@pytest.fixture
def agreed(ward):
    assert ward.reply(OFFER) == OFFER
    return ward


# What it does for an honest server


def test_consent_is_the_terms_to_the_byte_and_reads_and_charges_nothing(ward, monkeypatch):
    monkeypatch.setattr(Sensitive, "_read_records", lambda *_: pytest.fail("a record was read"))
    assert "agreed to no terms" in refusal(ward.reply(pack_request(0)))
    for _ in range(2):
        assert ward.reply(OFFER) == OFFER
    assert ward.ledger.entries() == []


def test_rounds_are_paid_before_a_record_is_read_and_send_what_the_gate_released(
    agreed, monkeypatch
):
    spent = []
    released = []
    read = Sensitive._read_records
    query = Gate.query_clients
    monkeypatch.setattr(
        Sensitive, "_read_records", lambda *args: spent.append(agreed.spent()) or read(*args)
    )
    monkeypatch.setattr(
        Gate,
        "query_clients",
        lambda *args, **more: released.append(query(*args, **more)) or released[-1],
    )
    sent = [agreed.reply(pack_request(number)) for number in range(3)]
    assert [unpack_message(raw).round for raw in sent] == [0, 1, 2]
    assert spent
    assert spent == [pytest.approx(PRICE)] * len(spent)
    assert (agreed.spent(), agreed.rows()) == (pytest.approx(PRICE), STEPS)
    assert [split_frame(raw)[1] for raw in sent] == [
        value.float().reshape(-1).contiguous().numpy().tobytes() for value in released
    ]
    assert [entry["digest"] for entry in entries_of(agreed.ledger, "commit")] == [
        hashlib.sha256(raw).hexdigest() for raw in sent
    ]


@pytest.mark.usefixtures("real_fsync")
def test_an_answer_and_its_name_are_on_the_disk_before_it_is_sent(agreed, monkeypatch):
    """What a power failure takes away would have its round answered anew."""
    folder = agreed.folder / "run"
    named = []
    sizes = {}
    fsync = os.fsync

    def watch(file):
        status = os.fstat(file)
        named.append((status.st_ino, (folder / "answer-0").exists()))
        sizes[status.st_ino] = status.st_size
        fsync(file)

    monkeypatch.setattr(os, "fsync", watch)
    agreed.reply(pack_request(0))
    assert (folder.stat().st_ino, True) in named
    for file in (folder / "answer-0", *list_shard_checkpoints(agreed.ledger).values()):
        assert sizes[file.stat().st_ino] == file.stat().st_size > 0


def test_an_interrupt_waits_until_the_answer_is_stored(agreed, monkeypatch):
    commit = Ledger.commit

    def interrupt(*given):
        signal.raise_signal(signal.SIGINT)
        return commit(*given)

    monkeypatch.setattr(Ledger, "commit", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            agreed.reply(pack_request(0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (agreed.folder / "run" / "answer-0").exists()
    monkeypatch.undo()
    rows = agreed.rows()
    assert is_answer(agreed.reply(pack_request(0)))  # the stored one
    assert agreed.rows() == rows


def test_the_same_request_again_is_free_and_the_same(agreed):
    first = agreed.reply(pack_request(0))
    assert agreed.reply(pack_request(0)) == first
    agreed.reply(pack_request(1))
    assert agreed.again().reply(pack_request(0)) == first  # an old one, too
    assert agreed.rows() == 2 * CLASSES
    assert len(entries_of(agreed.ledger, "ask")) == 2


# Restarted between any two messages


@pytest.mark.parametrize("is_new", [True, False], ids=["new processes", "two in turn"])
def test_another_process_goes_on_with_the_same_critic(ward, monkeypatch, is_new):
    ward.again()
    owners = [ward.owner, ward.again().owner]
    updates = []
    states = []
    update = Gate.update_shards
    query = ClientCritics.query_gradients

    def watch_update(self, query, *args, **more):
        updates.append(query.__name__)
        return update(self, query, *args, **more)

    def watch_query(self, *args):
        gradients = query(self, *args)
        states.append(self.gate._shards[1]["weights"].clone())
        return gradients

    monkeypatch.setattr(Gate, "update_shards", watch_update)
    monkeypatch.setattr(ClientCritics, "query_gradients", watch_query)
    assert ward.reply(OFFER) == OFFER
    for number in range(3):
        owner = ward.again() if is_new else owners[number % 2]
        assert is_answer(owner.reply(pack_request(number)))
    assert ward.again().spent() == pytest.approx(PRICE)
    assert ward.rows() == STEPS
    assert "rounds" in refusal(ward.again().reply(pack_request(3)))
    assert updates == ["warm_up", *["train_on_received"] * 3]
    assert not torch.equal(states[0], states[1])
    assert (states[2] - states[1]).abs().max() < states[2].abs().max()  # no new weights


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Ledger, "commit"), (Gate, "save_shard_states"), (ClientFolder, "store_answer")],
)
def test_a_crash_before_an_answer_is_sent_loses_it_and_the_ledger_stays_right(
    agreed, monkeypatch, owner, name
):
    agreed.reply(pack_request(0))
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, stop)
        assert refusal(agreed.reply(pack_request(1))) == FAILED
    assert agreed.rows() == 2 * CLASSES  # what was marked is gone, sent or not
    assert is_answer(agreed.again().reply(pack_request(1)))  # out of what is left
    assert agreed.rows() == 3 * CLASSES
    assert "used up" in refusal(agreed.reply(pack_request(2)))
    assert agreed.spent() == pytest.approx(PRICE)


def test_a_charge_whose_ticket_was_lost_is_charged_again(agreed, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(answers, "write_atomically", stop)
        assert refusal(agreed.reply(pack_request(0))) == FAILED
    assert agreed.spent() == pytest.approx(PRICE)
    assert is_answer(agreed.again().reply(pack_request(0)))
    assert agreed.spent() > PRICE


# The state of its critic


@pytest.mark.parametrize("rounds", [(0, 1, 2), (0, 2)])
def test_the_critic_is_removed_after_the_last_round_even_if_one_was_missed(agreed, rounds):
    sent = agreed.reply(pack_request(0))
    assert list(agreed.folder.glob("*.vault*"))
    for number in rounds[1:]:
        agreed.reply(pack_request(number))
    assert agreed.rows() == CLASSES * len(rounds)
    assert not list(agreed.folder.glob("*.vault*"))
    assert agreed.again().reply(pack_request(0)) == sent
    if 1 not in rounds:
        assert "go back" in refusal(agreed.again().reply(pack_request(1)))


def test_the_critic_is_removed_where_no_turn_of_a_cohort_is_left(tmp_path):
    """Five owners, two a round, four rounds: of the second pair none is asked again, though the plan has room for another turn."""
    few = terms(owners=5, clients_per_round=2, rounds=4)
    ward = Ward(tmp_path)
    ward.reply(pack_message(few))
    assert is_answer(ward.reply(pack_request(1)))
    assert ward.rows() < few.plan().stages[0].steps
    assert list_shard_checkpoints(ward.ledger) == {}
    other = Ward(tmp_path / "first")
    other.reply(pack_message(few))
    other.reply(pack_request(0))
    assert len(list_shard_checkpoints(other.ledger)) == 1
    assert "next turn is round 3" in refusal(other.reply(pack_request(1)))
    assert is_answer(other.reply(pack_request(3)))
    assert list_shard_checkpoints(other.ledger) == {}


def test_the_critic_is_removed_after_a_crash_that_lost_the_last_answer(agreed, monkeypatch):
    for number in (0, 1):
        agreed.reply(pack_request(number))
    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "commit", stop)
        agreed.reply(pack_request(2))
    assert list_shard_checkpoints(agreed.ledger)
    assert "used up" in refusal(agreed.again().reply(pack_request(2)))
    assert list_shard_checkpoints(agreed.ledger) == {}


@pytest.mark.parametrize("removed", [False, True], ids=["leaves", "its critic is removed"])
def test_who_leaves_or_loses_its_critic_answers_nothing_new(agreed, removed):
    sent = agreed.reply(pack_request(0))
    if removed:
        (file,) = list_shard_checkpoints(agreed.ledger).values()
        file.unlink()
    else:
        agreed.owner.leave()
    rows = agreed.rows()
    assert refusal(agreed.again().reply(pack_request(1))) == HAS_LEFT
    assert (agreed.rows(), list_shard_checkpoints(agreed.ledger)) == (rows, {})
    assert not list(agreed.folder.glob("*.vault*"))
    assert agreed.reply(pack_request(0)) == sent
    assert agreed.spent() == pytest.approx(PRICE)


# A hostile server


def test_hostile_messages_are_refused_and_charge_nothing(agreed):
    head, data = split_frame(pack_request(0))
    head["images"] |= {"dtype": "F32", "data_offsets": [0, 4 * len(data)]}
    cases = [
        *((pack_request(number), "3 rounds") for number in (3, 4, 10**6)),
        (pack_request(0, shape=(1, 16, 16)), "images"),
        (pack_request(0, shape=(3, 8, 8)), "images"),
        (pack_request(0, batch_per_class=2), "images"),
        (pack_request(0, classes=9), "images"),
        (pack_request(0, classes=11), "images"),
        (build_frame(head, b"\xff\xff\xff\x7f" * len(data)), "U8"),  # NaN
        (pack_message(terms(noise_multiplier=4.0)), "other terms"),
        (pack_message(terms(rounds=4)), "other terms"),
        (pack_message(terms(batch_per_class=2)), "other terms"),
        (pack_message(terms(critic_steps=2)), "other terms"),
        (pack_message(terms(owners=2)), "other terms"),
        (pack_message(terms(classes=11)), "other terms"),
        (pack_message(terms(shape=(1, 9, 9))), "other terms"),
        (pack_message(terms(unit="record", num_critics=4)), "other terms"),
        (pack_message(terms(run=OTHER)), "another run"),
        (pack_request(0, run=OTHER), "agreed to no terms"),
    ]
    for message, words in cases:
        assert words in refusal(agreed.reply(message))
        assert agreed.ledger.entries() == []
    answer = agreed.again().reply(pack_request(1))
    assert is_answer(answer)
    assert "to another request" in refusal(agreed.reply(pack_request(1, seed=1)))
    assert "to another request" in refusal(agreed.again().reply(pack_request(1, seed=1)))
    assert "go back" in refusal(agreed.reply(pack_request(0)))
    assert "accepts only" in refusal(agreed.reply(answer))
    assert (agreed.spent(), agreed.rows()) == (pytest.approx(PRICE), CLASSES)


def test_an_owner_of_a_cohort_is_asked_its_share_and_no_more(tmp_path):
    few = terms(clients_per_round=1)  # one of three owners in each of three rounds
    ward = Ward(tmp_path)
    ward.reply(pack_message(few))
    assert is_answer(ward.reply(pack_request(0)))
    assert "next turn" in refusal(ward.reply(pack_request(1)))
    assert ward.spent() == pytest.approx(compute_price(few))
    assert compute_price(few) < PRICE


def test_a_run_whose_traces_are_gone_is_not_joined_again(agreed, tmp_path):
    """Else a server could have all rounds twice, and the release would say what one of them costs."""
    agreed.reply(pack_request(0))
    lines = agreed.ledger.entries()
    anew = Client(make_dataset(), ROOMY, Ledger(tmp_path / "ledger.jsonl"), tmp_path / "another")
    assert "in this run before" in refusal(anew.reply(OFFER))
    assert "agreed to no terms" in refusal(anew.reply(pack_request(0)))
    assert agreed.ledger.entries() == lines
    another_run = pack_message(terms(run=OTHER))
    assert anew.reply(another_run) == another_run


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_whatever_is_asked_in_whatever_order_the_ledger_is_right(ward, seed):
    """Terms, requests and nonsense at random, with restarts: never more than the plan, and one answer to a round."""
    rng = np.random.default_rng(seed)
    has_agreed = False
    sent = {}
    asked = {}
    for _ in range(25):
        if rng.random() < 0.3:
            ward.again()
        number = int(rng.integers(0, 5))
        variant = int(rng.integers(0, 2))
        match rng.integers(0, 5):
            case 0:
                has_agreed |= ward.reply(OFFER) == OFFER
            case 1 if has_agreed:
                other = terms(run=OTHER if number % 2 else RUN, noise_multiplier=9.0)
                assert refusal(ward.reply(pack_message(other)))
            case _:
                reply = ward.reply(raw := pack_request(number, seed=variant))
                if is_answer(reply):
                    assert has_agreed
                    assert sent.setdefault(number, reply) == reply
                    assert asked.setdefault(number, raw) == raw
        assert ward.rows() == CLASSES * len(sent) <= STEPS
        assert ward.spent() == pytest.approx(PRICE if sent else 0.0)


# Two clients with one ledger, each with a folder of its own, at the same time


def make_twins(folder, one=TERMS, two=TERMS):
    """Both have agreed before either has answered."""
    ledger = Ledger(folder / "ledger.jsonl")
    pair = [
        Client(make_dataset(), ROOMY, Ledger(ledger.path), folder / name, Runtime("cpu"))
        for name in ("one", "two")
    ]
    for owner, agreed in zip(pair, (one, two), strict=True):
        assert owner.reply(pack_message(agreed)) == pack_message(agreed)
    return ledger, *pair


@pytest.mark.parametrize("moment", ["reserve", "mark_asked", "commit"])
def test_two_folders_do_not_answer_one_run(tmp_path, monkeypatch, moment):
    """The second does all of its work at the worst moment of the first: before its charge, before its mark, and after it."""
    ledger, one, two = make_twins(tmp_path)
    replies = []
    plain = getattr(Ledger, moment)

    def overtake(self, *args, **more):
        monkeypatch.setattr(Ledger, moment, plain)
        replies.append(two.reply(pack_request(0)))
        return plain(self, *args, **more)

    monkeypatch.setattr(Ledger, moment, overtake)
    replies.append(one.reply(pack_request(0)))
    kinds = [unpack_message(raw).kind for raw in replies]
    assert sorted(kinds) == ["answer", "refusal"]
    assert "in this run before" in refusal(replies[kinds.index("refusal")])
    winner, loser = (one, two) if kinds[1] == "answer" else (two, one)
    charges = entries_of(ledger, "reserve")
    assert float(ledger.compute_spent_cost().epsilon(1e-5)) >= PRICE * (1 - 1e-9)
    assert len(list_shard_checkpoints(ledger)) == 1  # what the other's critic learned is gone
    for number in (1, 2):
        assert refusal(loser.reply(pack_request(number)))
        assert is_answer(winner.reply(pack_request(number)))
    assert entries_of(ledger, "reserve") == charges  # the loser pays once at most


@pytest.mark.parametrize("run", [RUN, OTHER], ids=["one run", "two runs"])
def test_clients_at_once_do_not_pass_the_limit(tmp_path, monkeypatch, run):
    """Both heard at consent that it fits, and one of them fits: threads that come to the charge together."""
    ledger, one, two = make_twins(tmp_path, two=terms(run=run))
    ledger.set_limit(Budget(PRICE * 1.01))
    gathered = threading.Barrier(2)
    plain = Ledger.reserve

    def meet(self, *args, **more):
        gathered.wait(60)
        return plain(self, *args, **more)

    monkeypatch.setattr(Ledger, "reserve", meet)
    with ThreadPoolExecutor(2) as pool:
        raws = pool.map(
            lambda owner, run: owner.reply(pack_request(0, run=run)), (one, two), (RUN, run)
        )
    assert sorted(unpack_message(raw).kind for raw in raws) == ["answer", "refusal"]
    assert float(ledger.compute_spent_cost().epsilon(1e-5)) == pytest.approx(PRICE)


def test_two_runs_may_be_answered_in_turn(tmp_path):
    ledger, one, two = make_twins(tmp_path, two=terms(run=OTHER))
    for number in range(3):
        for owner, run in ((one, RUN), (two, OTHER)):
            assert is_answer(owner.reply(pack_request(number, run=run)))
    assert float(ledger.compute_spent_cost().epsilon(1e-5)) > PRICE
    assert list_shard_checkpoints(ledger) == {}


# Which terms it refuses


def test_terms_without_noise_or_over_a_budget_are_refused(tmp_path):
    rich = Ward(tmp_path, budget=Budget(math.inf))
    assert "without noise" in refusal(rich.reply(pack_message(terms(noise_multiplier=0.0))))
    assert rich.ledger.entries() == []
    poor = Ward(tmp_path / "a", budget=Budget(PRICE * 0.99))
    assert refusal(poor.reply(OFFER)) == OVER_BUDGET
    assert Ward(tmp_path / "b", budget=Budget(PRICE * 1.01)).reply(OFFER) == OFFER
    limited = Ward(tmp_path / "c")
    limited.ledger.set_limit(Budget(PRICE * 0.99))
    assert refusal(limited.reply(OFFER)) == OVER_BUDGET


def test_a_budget_that_another_run_used_up_between_consent_and_request(agreed):
    agreed.ledger.set_limit(Budget(PRICE * 1.01))
    agreed.ledger.reserve(terms(noise_multiplier=20.0).plan(), "another")
    before = agreed.spent()
    assert refusal(agreed.reply(pack_request(0))) == OVER_BUDGET
    assert agreed.spent() == before


def test_terms_for_other_data_are_refused(ward):
    """The number of classes may be what a folder holds: the owner hears it, and not the server."""
    for change in ({"shape": (3, 8, 8)}, {"shape": (1, 28, 28)}, {"classes": 9}, {"classes": 62}):
        assert (
            refusal(ward.reply(pack_message(terms(**change))))
            == "The terms have other images or classes than this client declared."
        )
    assert all("10 classes" in text for text in ward.warnings[::2])


def test_terms_of_a_weaker_unit_need_the_owner_s_word(tmp_path):
    weaker = terms(unit="record", num_critics=4)
    assert str(weaker.plan().neighbours) == "replace"
    assert "protect" in refusal(Ward(tmp_path / "a").reply(pack_message(weaker)))
    lenient = Ward(tmp_path / "b", policy=ClientPolicy(unit="record"))
    assert lenient.reply(pack_message(weaker)) == pack_message(weaker)
    for number in range(3):
        assert is_answer(lenient.again().reply(pack_request(number)))
    assert lenient.rows() == weaker.plan().stages[0].steps


def test_terms_that_would_take_the_whole_machine_are_refused(tmp_path):
    ward = Ward(tmp_path, policy=ClientPolicy(unit="record"))
    many_rows = {"batch_per_class": 2000, "rounds": 1, "critic_channels": 32}
    many_critics = {"critic_channels": 32, "warmup_rounds": 0, "rounds": 1}
    for change in (
        *(
            {name: 10**6}
            for name in (
                "critic_steps",
                "critic_channels",
                "critic_batch_size",
                "warmup_rounds",
                "rounds",
            )
        ),
        {"unit": "record", "num_critics": 10**6},
        {"batch_per_class": 10**5, "rounds": 1},  # of images alone 64 MB, and their maps
        {"unit": "record", "num_critics": 2, **many_rows},  # every row with a copy of its critic
        {"unit": "record", "num_critics": 20_000, **many_critics},  # all critics lie in memory
    ):
        offer = pack_message(terms(**{"noise_multiplier": 1e6, **change}))
        assert "computation or memory" in refusal(ward.reply(offer))


def test_work_and_memory_grow_with_the_terms():
    assert estimate_client_flops(terms(critic_steps=50)) > estimate_client_flops(TERMS)
    least = TERMS.settings.estimate_memory(TERMS.spec)
    for more in (
        {"critic_channels": 64},
        {"batch_per_class": 9},
        {"records_per_critic": 10**5},
        {"unit": "record"},
    ):
        assert terms(**more).settings.estimate_memory(TERMS.spec) > least


# What a refusal tells


def test_a_refusal_names_no_file_and_no_error(agreed, monkeypatch):
    def fail(*_, **__):
        raise LedgerError("/home/ward/secret/ledger.jsonl: the ledger cannot be written")

    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "reserve", fail)
        raw = agreed.reply(pack_request(0))
    assert refusal(raw) == "The ledger of this client cannot be used."
    assert b"secret" not in raw
    assert any("secret" in text for text in agreed.warnings)  # the owner itself hears of it
    monkeypatch.setattr(ClientCritics, "query_gradients", lambda *_: {}["record 7 of patient 12"])
    assert refusal(agreed.reply(pack_request(0))) == FAILED
    assert not any("patient" in text for text in agreed.warnings)


def test_a_query_that_failed_ends_the_run_for_good(agreed, monkeypatch):
    def fail(*_):
        raise QueryError("A query failed on the secret side with ValueError")

    with monkeypatch.context() as broken:
        broken.setattr(ClientCritics, "query_gradients", fail)
        assert refusal(agreed.reply(pack_request(0))) == HAS_LEFT
    assert list_shard_checkpoints(agreed.ledger) == {}
    assert refusal(agreed.again().reply(pack_request(1))) == HAS_LEFT


def test_a_stored_answer_that_was_altered_is_not_sent(agreed):
    agreed.reply(pack_request(0))
    file = agreed.folder / "run" / "answer-0"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert refusal(agreed.again().reply(pack_request(0))) == FAILED


def test_data_of_several_owners_is_not_one_owner_s(tmp_path, ledger):
    with pytest.raises(DataError):
        Client(load_dataset("digits", num_clients=3), ROOMY, ledger, tmp_path)


def write_photos(folder, names):
    for name in names:
        (folder / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 100).save(folder / "photos" / name / "1.png")
    return folder / "photos"


@pytest.mark.parametrize("held", [("cat",), ("cat", "dog"), ("cat", "dog", "owl")])
def test_which_terms_are_refused_tells_nothing_of_the_class_folders(tmp_path, held):
    """A hostile server offers terms for every number of classes and hears the same from owners of one, two or three class folders."""
    photos = write_photos(tmp_path, held)
    with pytest.raises(SettingError, match="declare --shape"):
        load_client_data(photos)  # else terms would be compared with the number of folders
    data = load_client_data(photos, shape=(1, 8, 8), class_names=("cat", "dog", "owl"))
    kinds = []
    for classes in range(1, 6):
        for shape in ((1, 8, 8), (1, 9, 9)):
            folder = tmp_path / f"{classes}-{shape[1]}"
            owner = Client(
                data, ROOMY, Ledger(folder / "ledger.jsonl"), folder / "run", Runtime("cpu")
            )
            reply = owner.reply(pack_message(terms(classes=classes, shape=shape)))
            kinds.append(unpack_message(reply).kind)
    assert kinds == ["terms" if number == 4 else "refusal" for number in range(10)]


def test_a_client_declares_what_terms_are_compared_with(privot, tmp_path):
    write_photos(tmp_path, ("cat", "dog"))
    for less in (
        (),
        ("--classes", 2),
        ("--shape", "1x8x8"),
        ("--partition", "0/2"),
        ("--partition", "0/2", "--classes", 2),
    ):
        code, out, err = privot(*PHOTO_CLIENT.split(), *less)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "declare --shape" in err
    assert not (tmp_path / "home").exists()
