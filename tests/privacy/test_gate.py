"""The gate: what it refuses, in which order it does things, and what a crash leaves."""

import math
import traceback

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from privot.data.dataset import Records, Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, LedgerError, PlanError, PrivotError, QueryError, ReleaseError
from privot.privacy import answers as answers_module
from privot.privacy.accounting import Neighbours
from privot.privacy.answers import MARKS_PER_STAGE, MAX_STORED_RESULTS
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.runtime import Runtime

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
FREE = Budget(math.inf)


def pixels(image, label, *public):
    return image.flatten()


def make(box, ledger, *stages, relation=REPLACE, wall=FREE, **more):
    return Gate(box, Plan(stages, relation), ledger, wall, **more)


def kinds(ledger):
    return [each["kind"] for each in ledger.entries()]


# The wall and the plan


@pytest.mark.parametrize("wall", [Budget(1.0), AttackPowerTarget(0.02, 0.01)])
def test_a_plan_over_its_wall_is_refused_before_anything(box, ledger, wall):
    plan = Plan((Stage("it", "sum", 1.0),), REPLACE)
    with pytest.raises(BudgetError, match="Calibrate"):
        Gate(box, plan.calibrate(wall).scale_noise(0.999), ledger, wall)
    Gate(box, plan.calibrate(wall), ledger, wall).sum("it", pixels, clip_norm=1.0)
    assert kinds(ledger) == ["reserve", "ask", "commit"]


def test_no_noise_needs_an_infinite_wall(box, ledger):
    with pytest.raises(BudgetError):
        make(box, ledger, Stage("it", "sum", 0.0), wall=Budget(1e300))


def test_an_unknown_verb_has_no_proof(box, ledger):
    with pytest.raises(PlanError, match="no proof"):
        make(box, ledger, Stage("it", "shout", 1.0))


@pytest.mark.parametrize(
    ("verb", "relation"),
    [
        ("rows", ADD_REMOVE),
        ("sorted_blocks", ADD_REMOVE),
        ("sum", LOCAL),
        ("query_sample", LOCAL),
        ("sum", CLIENT),
        ("rows", CLIENT),
        ("query_sample", CLIENT),
        ("sorted_blocks", CLIENT),
        ("query_clients", ADD_REMOVE),
        ("query_clients", LOCAL),
    ],
)
def test_pairs_without_a_sensitivity(box, ledger, verb, relation):
    with pytest.raises(PlanError, match="no proof"):
        make(box, ledger, Stage("it", verb, 1.0), relation=relation)


def test_asks_that_the_plan_does_not_cover(box, ledger):
    gate = make(box, ledger, Stage("it", "sum", 1.0, steps=2))
    with pytest.raises(PlanError, match="no stage 'other'"):
        gate.sum("other", pixels, clip_norm=1.0)
    with pytest.raises(PlanError, match="of rows"):
        gate.rows("it", pixels, clip_norm=1.0)
    assert ledger.entries() == []
    gate.sum("it", pixels, clip_norm=1.0)
    gate.sum("it", pixels, clip_norm=1.0)
    with pytest.raises(BudgetError, match="used up"):
        gate.sum("it", pixels, clip_norm=1.0)
    assert kinds(ledger) == ["reserve", "ask", "commit", "ask", "commit"]


def test_the_charge_comes_before_the_records(box, ledger, monkeypatch):
    """Reserve and mark are on disk when the first record is read; the digest follows the answer."""
    seen = []
    take = Sensitive._read_records
    monkeypatch.setattr(
        Sensitive,
        "_read_records",
        lambda self, *args: (seen.append(kinds(Ledger(ledger.path))), take(self, *args))[1],
    )
    make(box, ledger, Stage("it", "sum", 1.0)).sum("it", pixels, clip_norm=1.0)
    assert seen == [["reserve", "ask"]]
    assert kinds(ledger) == ["reserve", "ask", "commit"]


def test_a_full_ledger_gives_nothing(box, ledger):
    ledger.set_limit(Budget(0.1))
    with pytest.raises(BudgetError):
        make(box, ledger, Stage("it", "sum", 1.0)).sum("it", pixels, clip_norm=1.0)
    assert kinds(ledger) == ["budget"]


def test_rows_need_a_declared_size(ledger):
    box = Sensitive(np.zeros((3, 1, 2, 2)), np.zeros(3, int), Spec((1, 2, 2), 1))
    with pytest.raises(PlanError, match="declared public"):
        make(box, ledger, Stage("it", "rows", 1.0)).rows("it", pixels, clip_norm=1.0)
    assert ledger.entries() == []


@pytest.mark.parametrize("blocks", [0, -1, 5])
def test_sorted_blocks_need_classes_that_fill_them(box, ledger, blocks):
    gate = make(box, ledger, Stage("it", "sorted_blocks", 1.0))
    with pytest.raises(PlanError, match="class sizes"):
        gate.sorted_blocks("it", pixels, frame=torch.eye(4), num_blocks=blocks, clip_norm=1.0)


def test_sorted_blocks_need_declared_sizes(ledger):
    box = Sensitive(np.zeros((3, 1, 2, 2)), np.zeros(3, int), Spec((1, 2, 2), 1, 3))
    with pytest.raises(PlanError, match="class sizes"):
        make(box, ledger, Stage("it", "sorted_blocks", 1.0)).sorted_blocks(
            "it", pixels, frame=torch.eye(4), num_blocks=1, clip_norm=1.0
        )


@pytest.mark.parametrize("frame", [torch.eye(3), torch.ones(4), torch.ones(2, 2, 4)])
def test_a_frame_must_fit_the_query(box, ledger, frame):
    with pytest.raises(PlanError, match="frame"):
        make(box, ledger, Stage("it", "sorted_blocks", 1.0)).sorted_blocks(
            "it", pixels, frame=frame, num_blocks=2, clip_norm=1.0
        )
    assert ledger.entries() == []


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_a_radius_must_be_above_zero(box, ledger, radius):
    with pytest.raises(PlanError, match="radius"):
        make(box, ledger, Stage("it", "sorted_blocks", 1.0)).sorted_blocks(
            "it", pixels, frame=torch.eye(4), num_blocks=2, clip_norm=radius
        )
    assert ledger.entries() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_frame_must_be_finite(box, ledger, value):
    with pytest.raises((PlanError, RuntimeError)):
        make(box, ledger, Stage("it", "sorted_blocks", 1.0)).sorted_blocks(
            "it", pixels, frame=torch.full((2, 4), value), num_blocks=2, clip_norm=1.0
        )
    assert ledger.entries() == []


# Answers are right


def test_verbs_answer_what_they_say(box, ledger):
    images = torch.from_numpy(box._images).flatten(1).double()
    labels = torch.from_numpy(box._labels)
    names = ("sum", "rows", "query_sample", "sorted_blocks")
    gate = make(box, ledger, *(Stage(name, name, 0.0, 2) for name in names))
    close = {"atol": 1e-5, "rtol": 0}  # 8 parts, each rounded to 2^-21
    assert torch.allclose(gate.sum("sum", pixels, clip_norm=9.0), images.sum(0), **close)
    by_class = torch.stack([images[labels == each].sum(0) for each in range(2)])
    assert torch.allclose(gate.sum("sum", pixels, clip_norm=9.0, per_class=True), by_class, **close)
    ordered = images[gate._get_secret_order()]  # as rows come
    assert torch.allclose(gate.rows("rows", pixels, clip_norm=9.0), ordered, **close)
    short = gate.rows("rows", pixels, clip_norm=0.5)
    assert torch.allclose(
        short, ordered * (0.5 / ordered.norm(dim=1, keepdim=True)).clamp(max=1), **close
    )
    mean = gate.query_sample(
        "query_sample",
        lambda records, factor: records.images.mean(0) * factor,
        2.0,
        clip_norm=9.0,
        shape=(1, 2, 2),
    )
    assert torch.allclose(mean, 2 * images.mean(0).view(1, 2, 2), **close)
    frame = torch.tensor([[1.0, 0, 0, 0], [0.5, -0.5, 0.5, -0.5], [0, 0, 2, 0]])
    blocks = gate.sorted_blocks("sorted_blocks", pixels, frame=frame, num_blocks=2, clip_norm=9.0)
    for label in range(2):
        order = (images[labels == label] @ frame.T.double()).sort(0).values
        assert torch.allclose(blocks[label], order.view(2, 2, 3).mean(1).T, **close)


def test_public_arguments_reach_the_query(box, ledger):
    gate = make(box, ledger, Stage("it", "sum", 0.0))
    weights = torch.ones(3, 4)
    value = gate.sum(
        "it",
        lambda image, label, w, factor: w @ image.flatten() * factor,
        weights,
        3.0,
        clip_norm=100.0,
    )
    assert torch.allclose(
        value, 3 * torch.from_numpy(box._images).double().sum().expand(3), atol=1e-5
    )


def split_box(count=37):
    rng = np.random.default_rng(3)
    images = rng.random((count, 1, 2, 2))
    labels = np.arange(count) % 3
    sizes = tuple(np.bincount(labels).tolist())
    return Sensitive(images, labels, Spec((1, 2, 2), 3, count, sizes))


@pytest.mark.parametrize("relation", [REPLACE, ADD_REMOVE])
def test_microbatches_change_no_bit(tmp_path, relation, array_order):
    """Parts are multiples of the grid, so their sum is the same in any order and grouping; noise is off."""

    def query(image, label):
        return (image.flatten().double() * 7.3 - label).sin() / 3

    verbs = ("sum", "rows", "sorted_blocks") if relation is REPLACE else ("sum",)
    found = []
    for size in (1, 2, 5, 36, 37, 1000):
        ledger = Ledger(tmp_path / f"{size}.jsonl")
        gate = make(
            split_box(),
            ledger,
            *(Stage(verb, verb, 0.0, 2) for verb in verbs),
            relation=relation,
            runtime=Runtime("cpu", size),
        )
        answers = [
            gate.sum("sum", query, clip_norm=0.4),
            gate.sum("sum", query, clip_norm=0.4, per_class=True),
        ]
        if relation is REPLACE:
            answers.append(gate.rows("rows", query, clip_norm=0.4))
            answers.append(
                gate.sorted_blocks(
                    "sorted_blocks", query, frame=torch.eye(4), num_blocks=3, clip_norm=0.4
                )
            )
        found.append(answers)
    for answers in found[1:]:
        assert all(torch.equal(here, there) for here, there in zip(found[0], answers, strict=True))


def test_order_of_records_changes_no_bit_of_a_sum(tmp_path):
    box = split_box()
    turned = Sensitive(box._images[::-1], box._labels[::-1], box.spec)
    answers = [
        make(each, Ledger(tmp_path / f"{name}.jsonl"), Stage("it", "sum", 0.0)).sum(
            "it", pixels, clip_norm=0.3
        )
        for name, each in (("here", box), ("there", turned))
    ]
    assert torch.equal(*answers)


def test_answers_carry_no_graph(box, ledger):
    weights = torch.ones(4, requires_grad=True)
    gate = make(box, ledger, Stage("it", "sum", 1.0), Stage("all", "query_sample", 1.0))
    assert not gate.sum(
        "it", lambda image, label, w: image.flatten() * w, weights, clip_norm=1.0
    ).requires_grad
    value = gate.query_sample(
        "all",
        lambda records, w: records.images.sum(0).flatten() * w,
        weights,
        clip_norm=1.0,
        shape=(4,),
    )
    assert not value.requires_grad


# Errors keep their words


def fails(records, *rest):
    raise ValueError(f"secret {records.images.flatten()[0]:.6f}")


def test_errors_on_the_secret_side_do_not_speak(box, ledger):
    secret = f"{box._images.flatten()[0]:.6f}"
    with pytest.raises(QueryError, match="with ValueError") as caught:
        make(box, ledger, Stage("it", "query_sample", 1.0)).query_sample(
            "it", fails, clip_norm=1.0, shape=(1,)
        )
    told = "".join(traceback.format_exception(caught.value, chain=True))
    assert secret not in told
    assert "secret 0" not in told
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None  # not even for one who looks


def test_errors_in_a_mapped_query_do_not_speak(box, ledger):
    """It passes on the black record of the trial, and fails on real ones."""
    calls = []

    def query(image, label):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("secret")
        return image.flatten()

    with pytest.raises(QueryError, match="with KeyError") as caught:
        make(box, ledger, Stage("each", "sum", 1.0)).sum("each", query, clip_norm=1.0)
    assert "secret 0" not in str(caught.value)
    assert caught.value.__context__ is None
    assert kinds(ledger) == ["reserve", "ask"]  # charged: records were read


def test_errors_on_the_public_record_speak_and_cost_nothing(box, ledger):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        make(box, ledger, Stage("it", "sum", 1.0)).sum(
            "it", lambda image, label: torch.ones(2, 3) @ image.flatten(), clip_norm=1.0
        )
    assert ledger.entries() == []


@pytest.mark.parametrize("value", [3.5, None, (torch.ones(2),), torch.ones(3), torch.ones(1, 2)])
def test_an_answer_of_another_shape_is_refused(box, ledger, value):
    with pytest.raises(QueryError, match="declared shape"):
        make(box, ledger, Stage("it", "query_sample", 1.0)).query_sample(
            "it", lambda records: value, clip_norm=1.0, shape=(2,)
        )


# The open door


def test_an_open_door_stays_open(box, ledger):
    gate = make(box, ledger)
    assert gate.no_guarantee_reason == ""
    records = gate.read_without_guarantee("condensation has no proof")
    assert isinstance(records, Records)
    assert records.images.shape == (8, 1, 2, 2)
    assert gate.no_guarantee_reason == "condensation has no proof"
    assert ledger.compute_spent_cost().epsilon(1e-5) == math.inf


def test_an_owners_wall_keeps_the_door_shut(box, ledger):
    ledger.set_limit(Budget(100.0))
    gate = make(box, ledger)
    with pytest.raises(BudgetError):
        gate.read_without_guarantee("no proof")
    assert gate.no_guarantee_reason == ""


@pytest.mark.parametrize("content", [b"", b"not a tensor file"])
def test_a_torn_kept_answer_is_refused(box, ledger, tmp_path, content):
    stage = Stage("it", "sum", 1.0)
    make(box, ledger, stage, folder=tmp_path).sum(
        "it", lambda image, label: image.flatten(), clip_norm=1.0
    )
    (tmp_path / "it-0.safetensors").write_bytes(content)
    with pytest.raises(ReleaseError, match="altered"):
        make(box, ledger, stage, folder=tmp_path).sum(
            "it", lambda image, label: image.flatten(), clip_norm=1.0
        )


def test_seeded_noise_is_marked(box, ledger):
    assert not make(box, ledger, Stage("it", "sum", 1.0)).insecure
    assert make(box, ledger, Stage("it", "sum", 1.0), insecure_seed=0).insecure


# Long stages and crashes


def test_a_long_stage_is_marked_in_strides(box, ledger):
    steps = 3 * MARKS_PER_STAGE + 2
    gate = make(box, ledger, Stage("it", "sum", 1.0, steps), wall=Budget(1e9))
    for _ in range(7):
        gate.sum("it", pixels, clip_norm=1.0)
    assert [(each["first"], each["last"]) for each in ledger.entries()[1:]] == [
        (0, 2),
        (3, 5),
        (6, 8),
    ]


def test_the_last_stride_ends_with_the_stage(box, ledger, monkeypatch):
    monkeypatch.setattr(answers_module, "MARKS_PER_STAGE", 2)
    monkeypatch.setattr(answers_module, "MAX_STORED_RESULTS", 0)
    gate = make(box, ledger, Stage("it", "sum", 1.0, 7), wall=Budget(1e9))
    for _ in range(7):
        gate.sum("it", pixels, clip_norm=1.0)
    assert [(each["first"], each["last"]) for each in ledger.entries()[1:]] == [
        (0, 2),
        (3, 5),
        (6, 6),
    ]


def test_kept_answers_are_replayed_without_a_new_charge(box, ledger, tmp_path):
    stages = (Stage("it", "sum", 1.0, 3), Stage("rows", "rows", 1.0))
    first = make(box, ledger, *stages, folder=tmp_path / "run")
    known = [first.sum("it", pixels, clip_norm=1.0) for _ in range(2)]
    again = make(box, ledger, *stages, folder=tmp_path / "run")  # as after a crash
    assert again.ticket == first.ticket
    before = kinds(ledger)
    replayed = [again.sum("it", pixels, clip_norm=1.0) for _ in range(2)]
    assert all(torch.equal(here, there) for here, there in zip(known, replayed, strict=True))
    assert kinds(ledger) == before
    fresh = again.sum("it", pixels, clip_norm=1.0)
    assert not torch.equal(fresh, known[0])
    again.rows("rows", pixels, clip_norm=1.0)
    assert kinds(ledger).count("reserve") == 1
    with pytest.raises(BudgetError, match="used up"):
        again.sum("it", pixels, clip_norm=1.0)


def test_a_crash_between_keeping_and_committing_heals(box, ledger, tmp_path, monkeypatch):
    gate = make(box, ledger, Stage("it", "sum", 1.0), folder=tmp_path)
    monkeypatch.setattr(Ledger, "commit", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gate.sum("it", pixels, clip_norm=1.0)
    monkeypatch.undo()
    value = make(box, ledger, Stage("it", "sum", 1.0), folder=tmp_path).sum(
        "it", pixels, clip_norm=1.0
    )
    assert torch.equal(value, load_file(tmp_path / "it-0.safetensors")["value"])
    assert kinds(ledger) == ["reserve", "ask", "commit"]


def test_an_altered_answer_is_refused(box, ledger, tmp_path):
    make(box, ledger, Stage("it", "sum", 1.0), folder=tmp_path).sum("it", pixels, clip_norm=1.0)
    save_file({"value": torch.zeros(4, dtype=torch.float64)}, tmp_path / "it-0.safetensors")
    with pytest.raises(ReleaseError, match="altered"):
        make(box, ledger, Stage("it", "sum", 1.0), folder=tmp_path).sum("it", pixels, clip_norm=1.0)


def test_a_lost_answer_is_not_given_twice(box, ledger, tmp_path):
    make(box, ledger, Stage("it", "sum", 1.0, 2), folder=tmp_path).sum("it", pixels, clip_norm=1.0)
    (tmp_path / "it-0.safetensors").unlink()
    with pytest.raises(BudgetError, match="Start a new run"):
        make(box, ledger, Stage("it", "sum", 1.0, 2), folder=tmp_path).sum(
            "it", pixels, clip_norm=1.0
        )


def test_an_answer_that_was_broken_off_is_not_asked_again(box, ledger):
    """Else whoever breaks it off where a record has something, and asks again, would read it for nothing."""
    gate = make(box, ledger, Stage("it", "query_sample", 1.0, 2))
    times = []

    def broken(records):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return records.images.sum((0, 1, 2, 3))[None]

    with pytest.raises(KeyboardInterrupt):
        gate.query_sample("it", broken, clip_norm=1.0, shape=(1,))
    with pytest.raises(BudgetError, match="none is given twice"):
        gate.query_sample("it", broken, clip_norm=1.0, shape=(1,))
    assert times == [1]
    assert kinds(ledger) == ["reserve", "ask"]


def test_an_answer_of_another_shape_closes_the_gate(box, ledger):
    """Which shape it has may hang on the records: it says so once."""
    gate = make(box, ledger, Stage("it", "query_sample", 1.0, 2))
    times = []
    for error in ("declared shape", "no stage"):
        with pytest.raises(PrivotError, match=error):
            gate.query_sample(
                "it",
                lambda records: (times.append(1), records.images[0])[1],
                clip_norm=1.0,
                shape=(1,),
            )
    assert times == [1]


def test_a_long_stage_keeps_nothing_and_goes_on_after_its_marks(box, ledger, tmp_path):
    stage = Stage("it", "sum", 1.0, steps := 3 * MARKS_PER_STAGE)
    make(box, ledger, stage, folder=tmp_path, wall=Budget(1e9)).sum("it", pixels, clip_norm=1.0)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == []
    again = make(box, ledger, stage, folder=tmp_path, wall=Budget(1e9))
    assert (
        again.count_remaining_queries("it") == steps - 3
    )  # a stride of three was marked, one answer of it was given: two are lost for good
    again.sum("it", pixels, clip_norm=1.0)
    assert again.count_remaining_queries("it") == steps - 4
    assert kinds(ledger) == ["reserve", "ask", "ask"]
    assert [(each["first"], each["last"]) for each in ledger.entries()[1:]] == [(0, 2), (3, 5)]


def test_a_short_stage_has_all_its_answers_left_to_replay(box, ledger, tmp_path):
    stage = Stage("it", "sum", 1.0, MAX_STORED_RESULTS)
    gate = make(box, ledger, stage, folder=tmp_path, wall=Budget(1e9))
    gate.sum("it", pixels, clip_norm=1.0)
    assert gate.count_remaining_queries("it") == MAX_STORED_RESULTS - 1
    assert (
        make(box, ledger, stage, folder=tmp_path, wall=Budget(1e9)).count_remaining_queries("it")
        == MAX_STORED_RESULTS
    )


def test_a_ticket_is_good_for_its_plan_and_ledger_alone(box, ledger, tmp_path):
    """Otherwise a run that goes on beside another ledger, or under a dearer plan, would be charged to nobody."""
    stage = Stage("it", "sum", 1.0, 2)
    make(box, ledger, stage, folder=tmp_path / "run", method="merf").sum(
        "it", pixels, clip_norm=1.0
    )
    for other, book, method in (
        (stage, Ledger(tmp_path / "other.jsonl"), "merf"),
        (Stage("it", "sum", 0.5, 2), ledger, "merf"),
        (Stage("it", "sum", 1.0, 3), ledger, "merf"),
        (stage, ledger, "other"),
    ):
        with pytest.raises(LedgerError, match="charged to another ledger"):
            make(box, book, other, folder=tmp_path / "run", method=method)
    make(box, ledger, stage, folder=tmp_path / "run", method="merf")


def test_two_gates_pay_twice(box, ledger):
    for _ in range(2):
        make(box, ledger, Stage("it", "sum", 1.0)).sum("it", pixels, clip_norm=1.0)
    assert kinds(ledger).count("reserve") == 2
    assert ledger.compute_spent_cost().mu == pytest.approx(math.sqrt(2))


def test_a_stage_without_a_folder_keeps_digests_only(box, ledger):
    make(box, ledger, Stage("it", "sum", 1.0)).sum("it", pixels, clip_norm=1.0)
    assert ledger.entries()[-1]["kind"] == "commit"


@pytest.mark.parametrize(
    ("kind", "way"),
    [(ValueError, "Try it on public data"), (MemoryError, "fewer records at a time")],
)
def test_a_failed_query_closes_the_gate(kind, way, box, ledger):
    """A failure may depend on the records: it is one bit, told once."""

    def fails(records):
        raise kind(str(records.images[0]))

    gate = make(box, ledger, Stage("it", "query_sample", 1.0), Stage("more", "sum", 1.0))
    with pytest.raises(
        QueryError, match=f"^A query failed on the secret side with {kind.__name__}\\. .*{way}"
    ):
        gate.query_sample("it", fails, clip_norm=1.0, shape=(1,))
    with pytest.raises(PlanError):
        gate.sum("more", pixels, clip_norm=1.0)
    assert kinds(ledger) == ["reserve", "ask"]
