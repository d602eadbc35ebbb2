"""From a client's records to a file, and from the file to a release on a server that has nothing else."""

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from privot.components.method_base import MethodBase
from privot.data import load_dataset
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.data.tabular import SensitiveTable
from privot.errors import DataError, PlanError, PrivotError, SettingError
from privot.local.channels import Laplace, Projection, RandomizedResponse
from privot.local.dataset import PrivatizedDataset, concatenate_privatized
from privot.local.privatize import build_image_channel, privatize
from privot.local.server_gate import ServerGate
from privot.methods import make_method
from privot.privacy.gate import Gate
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Neighbours, Plan
from privot.release.artifact import Artifact
from privot.release.verify import verify
from privot.report import write_report
from privot.runtime import Streams, ignore_progress
from privot.synthesis import inputs as boxes
from privot.synthesis import synthesize
from privot.synthesis.preflight import plan_run


@dataclass(frozen=True, kw_only=True)
class Average(MethodBase):
    """The least that a server can do: the mean of what was sent, as one image."""

    name: ClassVar[str] = "average"

    def plan(self, spec):
        return Plan((), Neighbours.LOCAL)

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        box = gate.get_privatized_dataset()
        progress("mean", 1, 1)
        image = (
            box.values[:, : gate.spec.num_features].mean(0).clamp(0, 1).view(1, *gate.spec.shape)
        )
        made = Artifact.from_images(
            image.expand(gate.spec.num_classes, -1, -1, -1), torch.arange(gate.spec.num_classes)
        )
        return dataclasses.replace(
            made, metadata={"diagnostics": {"meaning": "a mean is no law"}, "method": "merf"}
        )


@pytest.fixture
def sent(tmp_path):
    """A file of digits with labels, and its ledger."""
    digits = load_dataset("digits")
    channel = build_image_channel(digits.spec, "laplace", 20.0, labels_epsilon=2.0)
    privatize(digits, channel, out=tmp_path / "sent.safetensors", ledger=tmp_path / "book.jsonl")
    return tmp_path / "sent.safetensors"


def altered(path, **change):
    """The file with other words in its header, and a digest that fits unless told otherwise."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["privot"])
    head.update(change)
    other = path.with_name("altered.safetensors")
    save_file(load_file(path), other, {"privot": json.dumps(head)})
    return other


def test_privatize_says_and_writes(privot, tmp_path):
    words = (
        "privatize",
        "digits",
        "--epsilon",
        8,
        "--labels-epsilon",
        2,
        "--projection",
        "pooled:2",
        "--out",
        "sent.safetensors",
    )
    code, out, err = privot(*words, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["records"] == 1438
    assert facts["guarantee"]["epsilon"] == pytest.approx(10.0)
    assert facts["guarantee"]["neighbours"] == "local"
    box = privot_load(tmp_path / "sent.safetensors")
    assert box.values.shape == (1438, 17)
    assert box.spec == Spec((1, 8, 8), 10, 1438)
    assert box.has_labels
    assert b"epsilon" not in (tmp_path / "sent.safetensors").read_bytes()
    code, out, err = privot(*words)
    assert (code, "already exists" in err) == (2, True)
    code, out, _ = privot("ledger", "digits", "--json")
    assert json.loads(out)["spent_epsilon"] == pytest.approx(10.0)  # the refused one cost nothing
    code, out, _ = privot(*words[:-1], "again.safetensors")
    assert "1,438 records" in out
    code, out, _ = privot("ledger", "digits", "--json")
    assert json.loads(out)["spent_epsilon"] == pytest.approx(20.0)


def privot_load(path):
    box = boxes.load(path)
    assert isinstance(box, PrivatizedDataset)
    return box


def test_a_file_is_verified_without_data(privot, sent):
    code, out, _ = privot("verify", sent, "--json")
    facts = json.loads(out)
    assert (code, facts["records"], facts["digests"]) == (0, 1438, "ok")
    assert facts["epsilon_from_events"] == pytest.approx(22.0)
    code, out, _ = privot("verify", sent)
    assert "recomputed epsilon 22" in out
    code, _, err = privot("verify", altered(sent, count=1))
    assert (code, "digest" in err) == (2, True)


def test_a_table_has_a_channel_for_each_column(privot, tmp_path):
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.uniform(-3, 3, (300, 2)), rng.integers(0, 5, (300, 1))], 1)
    np.savez(tmp_path / "people.npz", x=rows)
    np.savetxt(tmp_path / "people.csv", rows, delimiter=",", header="a,b,c")
    for name in ("people.npz", "people.csv"):
        out = tmp_path / f"{name}.safetensors"
        columns = ("--column", "0-1=laplace:4:-1:1", "--column", "2=randomized-response:1:5")
        code, said, err = privot("privatize", name, *columns, "--out", out, "--json")
        assert code == 0, err
        assert json.loads(said)["guarantee"]["epsilon"] == pytest.approx(5.0)
        box = privot_load(out)
        assert box.spec.shape == (1, 1, 3)
        assert box.channel.parts[0].scale == 1.0
        assert box.values[:, 2].unique().tolist() == [0, 1, 2, 3, 4]
    for columns, word in [
        (("0-1=laplace:4:-1:1",), "none may leave without noise"),
        (("0=laplace:4:-1:1", "2=unary:1:5"), "the next column is 1"),
        (("0-2=laplace:-4:-1:1",), "above 0"),
        (("0-2=laplac:4:-1:1",), "did you mean 'laplace'"),
        (("0-2=laplace:4",), "write it as"),
        (("0=unary:4:nan",), "write it as"),
        (("0=unary:4:inf",), "write it as"),
        (("0-2=laplace:4:nan:1",), "two finite numbers"),
        (("0-2=unary:4:5",), "write it as"),
        (("x=laplace:4:0:1",), "write it as"),
        (("0-2=laplace:4:1:-1",), "the lower first"),
    ]:
        given = [each for column in columns for each in ("--column", column)]
        code, _, err = privot("privatize", "people.npz", *given, "--out", "no.safetensors")
        assert (code, err.count("\n")) == (2, 1)
        assert word in err
    assert not (tmp_path / "no.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epsilon", 0), "epsilon=0"),
        (("--epsilon", -1), "epsilon=-1"),
        (("--epsilon", "nan"), "epsilon=nan"),
        (("--epsilon", "inf"), "epsilon=inf"),
        (("--epsilon", 1, "--labels-epsilon", 0), "labels-epsilon=0"),
        (("--epsilon", 1, "--channel", "gausian"), "did you mean 'gaussian'"),
        (("--epsilon", 1, "--channel", "unary"), "for categories"),
        (("--epsilon", 1, "--channel", "gaussian", "--delta", 0), "delta=0"),
        (("--epsilon", 1, "--projection", "pooled:3"), "divides 8"),
        (("--epsilon", 1, "--projection", "poold:2"), "identity, pooled, dct"),
        (("--epsilon", 1, "--projection", "dct"), "Write identity"),
        (("--epsilon", 1, "--radius", -1), "radius=-1"),
        ((), "Give --epsilon"),
    ],
)
def test_bad_words_cost_nothing(privot, tmp_path, words, said):
    code, out, err = privot("privatize", "digits", *words, "--out", "sent.safetensors")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "sent.safetensors").exists()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_wall_holds_before_anything_is_read(privot, tmp_path, monkeypatch):
    assert privot("ledger", "digits", "--limit", 3)[0] == 0
    monkeypatch.setattr(Laplace, "privatize", lambda *_: pytest.fail("a record was read"))
    code, _, err = privot("privatize", "digits", "--epsilon", 4, "--out", "sent.safetensors")
    assert code == 2
    assert "budget of epsilon 3" in err
    assert not (tmp_path / "sent.safetensors").exists()


def test_too_little_is_said_before(privot):
    code, out, err = privot(
        "privatize", "digits", "--epsilon", 0.5, "--out", "sent.safetensors", "--json"
    )
    assert code == 0
    assert "or epsilon" in err
    assert json.loads(out)["warnings"][0] in err


# The file


def test_a_file_is_whole_or_refused(sent, tmp_path, privot):
    raw = sent.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    flipped = bytearray(raw)
    flipped[-5] ^= 1
    broken = {
        "cut": raw[:-100],
        "short": raw[:4],
        "empty": b"",
        "flipped": bytes(flipped),
        "text": b"hello" * 100,
        "long": raw + b"\0" * 8,
        "head": raw[:8] + b"[" * length + raw[8 + length :],
        "huge": b"\xff" * 8 + raw[8:],
    }
    for name, data in broken.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        code, _, err = privot(
            "synthesize", f"{name}.safetensors", "--method", "merf", "--out", "release"
        )
        assert (code, err.count("\n")) == (2, 1), name
        assert f"{name}.safetensors" in err
    save_file({"values": torch.zeros(3, 3)}, tmp_path / "plain.safetensors")
    code, _, err = privot("synthesize", "plain.safetensors", "--method", "merf")
    assert "does not say which channel made it" in err


def test_words_changed_in_the_header_are_noticed(sent):
    box = PrivatizedDataset.load(sent)
    with pytest.raises(DataError, match="digest"):
        PrivatizedDataset.load(altered(sent, spec=Spec((1, 8, 8), 9, 1438).to_json()))
    with pytest.raises(DataError, match="digest"):
        PrivatizedDataset.load(altered(sent, count=5))
    save_file(
        {"values": box.values},
        other := sent.with_name("x.safetensors"),
        {"privot": json.dumps({"format": 1})},
    )
    with pytest.raises(DataError, match="does not say which channel made it"):
        PrivatizedDataset.load(other)
    with pytest.raises(DataError, match="format 3"):
        PrivatizedDataset.load(altered(sent, format=3))


def test_values_that_no_channel_gave_are_refused(sent):
    box = PrivatizedDataset.load(sent)
    for place, value in ((0, 1e9), (0, float("nan")), (64, 10.0), (64, 0.5), (64, -1.0)):
        values = box.values.clone()
        values[7, place] = value
        with pytest.raises(DataError, match="The channel cannot give"):
            PrivatizedDataset(values, box.channel, box.spec)
    with pytest.raises(DataError, match="shape"):
        PrivatizedDataset(box.values[:, :5], box.channel, box.spec)
    for classes in (9, 11, 1):  # the last part of the channel is for ten
        with pytest.raises(DataError, match=r"categories|labels"):
            PrivatizedDataset(box.values, box.channel, Spec((1, 8, 8), classes))
    values = Laplace.calibrate(
        9.0, projection=Projection(shape=(65,))
    )  # a column more than there are pixels, and no label
    with pytest.raises(DataError, match=r"categories|labels"):
        PrivatizedDataset(torch.zeros(3, 65), values, Spec((1, 8, 8), 10))
    with pytest.raises(DataError, match="does not fit"):
        PrivatizedDataset(box.values, box.channel, Spec((1, 2, 2), 10))


def test_files_of_one_channel_are_joined_and_others_refused(tmp_path):
    space = Projection(shape=(2,))
    folder = tmp_path / "clients"
    folder.mkdir()
    for name in ("a", "b"):
        privatize(
            SensitiveTable(np.random.default_rng(0).random((20, 2)), name=name),
            Laplace.calibrate(3.0, projection=space),
            out=folder / f"{name}.safetensors",
            ledger=tmp_path / f"{name}.jsonl",
        )
    box = privot_load(folder)
    assert len(box) == box.spec.size == 40
    same = PrivatizedDataset.load(folder / "a.safetensors")
    with pytest.raises(DataError, match="same contents"):
        concatenate_privatized([same, same])
    privatize(
        SensitiveTable(np.zeros((20, 2)), name="c"),
        Laplace.calibrate(4.0, projection=space),
        out=folder / "c.safetensors",
        ledger=tmp_path / "c.jsonl",
    )
    with pytest.raises(DataError, match="another channel"):
        privot_load(folder)


def test_seeded_noise_makes_neither_a_file_nor_a_guarantee(tmp_path):
    digits = load_dataset("digits")
    box = privatize(
        digits,
        build_image_channel(digits.spec, "laplace", 20.0),
        ledger=tmp_path / "book.jsonl",
        insecure_seed=1,
    )
    with pytest.raises(DataError, match="seeded"):
        box.save(tmp_path / "x.safetensors")
    assert isinstance(synthesize(box, Average()).guarantee, NoGuarantee)


def test_labels_that_were_not_privatized_stay(tmp_path):
    """Two data sets that differ in their labels alone: the same file but for its noise, and nothing of the labels in its words."""
    images = np.random.default_rng(0).random((12, 1, 2, 2), np.float32)
    spec = Spec((1, 2, 2), 3, 12, (4, 4, 4), ("x", "y", "z"))
    boxes = [
        Sensitive(images, np.roll(np.arange(12) % 3, turn), spec, name=f"box{turn}")
        for turn in (0, 1)
    ]
    for labels_epsilon, same in ((None, True), (50.0, False)):
        channel = build_image_channel(spec, "laplace", 1.0, labels_epsilon=labels_epsilon)
        first, second = (
            privatize(each, channel, ledger=tmp_path / "book.jsonl", insecure_seed=3)
            for each in boxes
        )
        assert torch.equal(first.values, second.values) is same
        assert (first.spec.num_classes, first.spec.class_names) == (
            (1, None) if same else (3, ("x", "y", "z"))
        )
        assert first.spec.class_sizes is None


# The server


def test_a_release_of_what_was_sent(sent, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "server"))
    book = (tmp_path / "book.jsonl").read_bytes()
    seen = []
    release = synthesize(
        sent,
        Average(),
        out=tmp_path / "release",
        progress=lambda *step, **facts: seen.append(facts["epsilon"]),
    )
    assert (release.guarantee.neighbours, release.guarantee.delta) == ("local", 0.0)
    assert release.guarantee.epsilon == pytest.approx(22.0)
    assert seen == [pytest.approx(22.0)]
    assert (
        release.metadata["method"] == "average"
    )  # what a method says of itself is no word about the run
    proved = verify(tmp_path / "release")
    assert proved["epsilon_from_events"] == pytest.approx(22.0)
    assert not list((tmp_path / "server").rglob("*"))  # no ledger on the server
    assert (tmp_path / "book.jsonl").read_bytes() == book
    real = load_dataset("digits", public=True).records().images.mean(0)
    assert (
        release.sample(1)[0][0] - real
    ).abs().mean() < 0.15  # noise of 4.5 / sqrt(1797) a pixel leaves .07 ± .01; a flat image .3
    write_report(release, tmp_path / "page", name="digits")
    text = (tmp_path / "page" / "report.html").read_text()
    for words in ("before it leaves its owner", "A server only has their word", "a mean is no law"):
        assert words in text


def test_a_release_cannot_claim_another_channel(sent, tmp_path):
    release = synthesize(sent, Average())
    for scale in (2.0, 0.5):
        channel = json.loads(json.dumps(release.metadata["channel"]))
        channel["parts"][0]["scale"] *= scale
        dataclasses.replace(release, metadata={**release.metadata, "channel": channel}).save(
            tmp_path / f"lie{scale}"
        )
        with pytest.raises(PrivotError, match="does not follow from its channel"):
            verify(tmp_path / f"lie{scale}")


def test_a_server_gate_has_no_way_to_a_record(sent):
    box = PrivatizedDataset.load(sent)
    gate = ServerGate(box)
    for ask in (
        lambda: gate.sum("values-0", lambda image, label: image, clip_norm=1.0),
        lambda: gate.read_without_guarantee("why not"),
        lambda: gate.update_shards(None),
        lambda: gate.rows("values-0", lambda image, label: image, clip_norm=1.0),
        lambda: gate.privatize(box.channel),
        lambda: gate.split_into_shards(2, {}),
        lambda: gate.sum_over_shards("x", None, clip_norm=1.0),
        lambda: gate.query_sample("x", None, clip_norm=1.0, shape=(1,)),
    ):
        with pytest.raises(PlanError):
            ask()
    assert gate.get_privatized_dataset() is box


def test_clean_records_never_reach_a_local_method(tmp_path, box):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 2, 2)))
    gate = Gate(box, channel.plan(), Ledger(tmp_path / "book.jsonl"), Budget(1.01))
    with pytest.raises(PlanError, match="privot privatize"):
        make_method("entropic-gan").fit(gate, Streams(0), ignore_progress)
    with pytest.raises(SettingError, match="privot privatize"):
        synthesize(box, Average(), ledger=tmp_path / "book.jsonl")
    with pytest.raises(PlanError, match="not that of this channel"):
        gate.privatize(Laplace.calibrate(2.0, projection=Projection(shape=(1, 2, 2))))
    assert not (tmp_path / "book.jsonl").exists()
    with pytest.raises(SettingError, match="run privot privatize first"):
        synthesize(
            SensitiveTable(np.zeros((5, 2)), name="t"), "merf", 1.0, ledger=tmp_path / "book.jsonl"
        )


def test_what_a_method_cannot_be_given(sent, privot):
    code, _, err = privot("synthesize", sent, "--method", "merf")
    assert (code, "entropic-gan" in err) == (2, True)
    code, _, err = privot("synthesize", sent, "--method", "merf", "--classes", 10)
    assert "Leave --classes out" in err
    code, _, err = privot("measure", "digits", "--test", sent)
    assert (code, err.count("\n")) == (2, 1)
    with pytest.raises(SettingError, match="which no budget can change"):
        synthesize(sent, Average(), 5.0)


def test_a_plan_of_a_file_reads_its_channel(sent):
    facts = plan_run(PrivatizedDataset.load(sent), Average(), None)
    assert facts["guarantee"]["epsilon"] == pytest.approx(22.0)
    assert facts["warnings"] == []
    few = PrivatizedDataset(
        torch.zeros(10, 1), RandomizedResponse.calibrate(0.1, num_categories=9), Spec((1, 1, 1), 1)
    )
    assert "or epsilon" in plan_run(few, Average(), None)["warnings"][0]


def test_a_table_is_sealed():
    sealed = SensitiveTable(np.zeros((4, 2)), name="t")
    assert isinstance(sealed, Sensitive)
    with pytest.raises(TypeError):
        len(sealed)
    for rows in (np.zeros(3), np.full((2, 2), np.nan), np.array([["a"]]), np.zeros((0, 3))):
        with pytest.raises(DataError):
            SensitiveTable(rows)
