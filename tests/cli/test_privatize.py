"""From a client's records to a file, and from the file to a release on a server that has nothing else."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
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
from privot.synthesis import inputs, synthesize
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
        dataset = gate.get_privatized_dataset()
        progress("mean", 1, 1)
        mean = dataset.values[:, : gate.spec.num_features].mean(0).clamp(0, 1)
        classes = gate.spec.num_classes
        images = mean.view(1, *gate.spec.shape).expand(classes, -1, -1, -1)
        artifact = Artifact.from_images(images, torch.arange(classes))
        metadata = {"diagnostics": {"meaning": "a mean is no law"}, "method": "merf"}
        return dataclasses.replace(artifact, metadata=metadata)


@pytest.fixture(scope="module")
def digits_file(tmp_path_factory):
    """A file of digits with labels, and its ledger."""
    folder = tmp_path_factory.mktemp("client")
    digits = load_dataset("digits")
    channel = build_image_channel(digits.spec, "laplace", 20.0, labels_epsilon=2.0)
    privatize(digits, channel, out=folder / "sent.safetensors", ledger=folder / "ledger.jsonl")
    return folder / "sent.safetensors"


@pytest.fixture
def sent(digits_file, tmp_path):
    return Path(shutil.copy(digits_file, tmp_path))


def alter_header(path, **change):
    """The file with a changed header and the same digest."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["privot"])
    other = path.with_name("altered.safetensors")
    save_file(load_file(path), other, {"privot": json.dumps({**head, **change})})
    return other


def load_privatized(path):
    dataset = inputs.load(path)
    assert isinstance(dataset, PrivatizedDataset)
    return dataset


# The verb


def test_privatize_writes_a_file_and_charges_the_owner(privot, run_json, expect_refusal, tmp_path):
    words = "privatize digits --epsilon 8 --labels-epsilon 2 --projection pooled:2 --out"
    facts = run_json(words, "sent.safetensors")
    assert facts["records"] == 1438
    assert facts["guarantee"]["epsilon"] == pytest.approx(10.0)
    assert facts["guarantee"]["neighbours"] == "local"
    dataset = load_privatized(tmp_path / "sent.safetensors")
    assert dataset.values.shape == (1438, 17)
    assert dataset.spec == Spec((1, 8, 8), 10, 1438)
    assert dataset.has_labels
    assert b"epsilon" not in (tmp_path / "sent.safetensors").read_bytes()
    expect_refusal("already exists", words, "sent.safetensors")
    assert run_json("ledger digits")["spent_epsilon"] == pytest.approx(10.0)  # nothing more
    assert "1,438 records" in privot(words, "again.safetensors")[1]
    assert run_json("ledger digits")["spent_epsilon"] == pytest.approx(20.0)


def test_a_file_is_verified_without_data(privot, run_json, expect_refusal, sent):
    facts = run_json("verify", sent)
    assert (facts["records"], facts["digests"]) == (1438, "ok")
    assert facts["epsilon_from_events"] == pytest.approx(22.0)
    assert "recomputed epsilon 22" in privot("verify", sent)[1]
    expect_refusal("digest", "verify", alter_header(sent, count=1))


def test_a_table_has_a_channel_for_each_column(run_json, expect_refusal, tmp_path):
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.uniform(-3, 3, (300, 2)), rng.integers(0, 5, (300, 1))], 1)
    np.savez(tmp_path / "people.npz", x=rows)
    np.savetxt(tmp_path / "people.csv", rows, delimiter=",", header="a,b,c")
    for name in ("people.npz", "people.csv"):
        columns = "--column 0-1=laplace:4:-1:1 --column 2=randomized-response:1:5"
        facts = run_json(f"privatize {name} {columns} --out {name}.safetensors")
        assert facts["guarantee"]["epsilon"] == pytest.approx(5.0)
        dataset = load_privatized(tmp_path / f"{name}.safetensors")
        assert dataset.spec.shape == (1, 1, 3)
        assert dataset.channel.parts[0].scale == 1.0
        assert dataset.values[:, 2].unique().tolist() == [0, 1, 2, 3, 4]
    for columns, reason in (
        ("0-1=laplace:4:-1:1", "none may leave without noise"),
        ("0=laplace:4:-1:1 --column 2=unary:1:5", "the next column is 1"),
        ("0-2=laplace:-4:-1:1", "above 0"),
        ("0-2=laplac:4:-1:1", "did you mean 'laplace'"),
        ("0-2=laplace:4", "write it as"),
        ("0=unary:4:nan", "write it as"),
        ("0=unary:4:inf", "write it as"),
        ("0-2=laplace:4:nan:1", "two finite numbers"),
        ("0-2=unary:4:5", "write it as"),
        ("x=laplace:4:0:1", "write it as"),
        ("0-2=laplace:4:1:-1", "the lower first"),
    ):
        expect_refusal(reason, f"privatize people.npz --out no.safetensors --column {columns}")
    assert not (tmp_path / "no.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--epsilon 0", "epsilon=0"),
        ("--epsilon -1", "epsilon=-1"),
        ("--epsilon nan", "epsilon=nan"),
        ("--epsilon inf", "epsilon=inf"),
        ("--epsilon 1 --labels-epsilon 0", "labels-epsilon=0"),
        ("--epsilon 1 --channel gausian", "did you mean 'gaussian'"),
        ("--epsilon 1 --channel unary", "for categories"),
        ("--epsilon 1 --channel gaussian --delta 0", "delta=0"),
        ("--epsilon 1 --projection pooled:3", "divides 8"),
        ("--epsilon 1 --projection poold:2", "identity, pooled, dct"),
        ("--epsilon 1 --projection dct", "Write identity"),
        ("--epsilon 1 --radius -1", "radius=-1"),
        ("", "Give --epsilon"),
    ],
)
def test_wrong_words_cost_nothing(expect_refusal, tmp_path, words, reason):
    expect_refusal(reason, "privatize digits --out sent.safetensors", words)
    assert not (tmp_path / "sent.safetensors").exists()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_limit_holds_before_anything_is_read(privot, tmp_path, monkeypatch):
    assert privot("ledger digits --limit 3")[0] == 0
    monkeypatch.setattr(Laplace, "privatize", lambda *_: pytest.fail("a record was read"))
    code, _, err = privot("privatize digits --epsilon 4 --out sent.safetensors")
    assert (code, "budget of epsilon 3" in err) == (2, True)
    assert not (tmp_path / "sent.safetensors").exists()


def test_warns_that_too_little_is_sent(privot):
    code, out, err = privot("privatize digits --epsilon 0.5 --out sent.safetensors --json")
    assert (code, "or epsilon" in err) == (0, True)
    assert json.loads(out)["warnings"][0] in err


# The file


def test_a_file_is_whole_or_refused(sent, tmp_path, expect_refusal):
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
        words = f"synthesize {name}.safetensors --method merf --out release"
        expect_refusal(f"{name}.safetensors", words)
    save_file({"values": torch.zeros(3, 3)}, tmp_path / "plain.safetensors")
    words = "synthesize plain.safetensors --method merf"
    expect_refusal("does not say which channel made it", words)


def test_changes_of_the_header_are_noticed(sent):
    other = sent.with_name("x.safetensors")
    values = PrivatizedDataset.load(sent).values
    save_file({"values": values}, other, {"privot": json.dumps({"format": 1})})
    with pytest.raises(DataError, match="does not say which channel made it"):
        PrivatizedDataset.load(other)
    for change, reason in (
        ({"spec": Spec((1, 8, 8), 9, 1438).to_json()}, "digest"),
        ({"count": 5}, "digest"),
        ({"format": 3}, "format 3"),
    ):
        with pytest.raises(DataError, match=reason):
            PrivatizedDataset.load(alter_header(sent, **change))


def test_refuses_values_that_the_channel_cannot_give(sent):
    dataset = PrivatizedDataset.load(sent)
    channel = dataset.channel
    for column, value in ((0, 1e9), (0, float("nan")), (64, 10.0), (64, 0.5), (64, -1.0)):
        values = dataset.values.clone()
        values[7, column] = value
        with pytest.raises(DataError, match="The channel cannot give"):
            PrivatizedDataset(values, channel, dataset.spec)
    # one column more than there are pixels, and no label
    unlabelled = Laplace.calibrate(9.0, projection=Projection(shape=(65,)))
    ten = Spec((1, 8, 8), 10)
    for values, made_by, spec, reason in (
        (dataset.values[:, :5], channel, dataset.spec, "shape"),
        *((dataset.values, channel, Spec((1, 8, 8), n), "categories|labels") for n in (9, 11, 1)),
        (torch.zeros(3, 65), unlabelled, ten, "categories|labels"),
        (dataset.values, channel, Spec((1, 2, 2), 10), "does not fit"),
    ):
        with pytest.raises(DataError, match=reason):
            PrivatizedDataset(values, made_by, spec)


def test_files_of_one_channel_are_joined_and_others_refused(tmp_path):
    folder = tmp_path / "clients"
    folder.mkdir()

    def send(name, epsilon):
        table = SensitiveTable(np.random.default_rng(0).random((20, 2)), name=name)
        channel = Laplace.calibrate(epsilon, projection=Projection(shape=(2,)))
        out = folder / f"{name}.safetensors"
        privatize(table, channel, out=out, ledger=tmp_path / f"{name}.jsonl")

    send("a", 3.0)
    send("b", 3.0)
    dataset = load_privatized(folder)
    assert len(dataset) == dataset.spec.size == 40
    same = PrivatizedDataset.load(folder / "a.safetensors")
    with pytest.raises(DataError, match="same contents"):
        concatenate_privatized([same, same])
    send("c", 4.0)
    with pytest.raises(DataError, match="another channel"):
        load_privatized(folder)


def test_seeded_noise_makes_neither_a_file_nor_a_guarantee(tmp_path):
    digits = load_dataset("digits")
    channel = build_image_channel(digits.spec, "laplace", 20.0)
    dataset = privatize(digits, channel, ledger=tmp_path / "ledger.jsonl", insecure_seed=1)
    with pytest.raises(DataError, match="seeded"):
        dataset.save(tmp_path / "x.safetensors")
    assert isinstance(synthesize(dataset, Average()).guarantee, NoGuarantee)


def test_labels_that_were_not_privatized_stay(tmp_path):
    """Of two data sets that differ in labels alone, the same is sent, without a word of labels."""
    images = np.random.default_rng(0).random((12, 1, 2, 2), np.float32)
    spec = Spec((1, 2, 2), 3, 12, (4, 4, 4), ("x", "y", "z"))

    def send(turn, channel):
        labels = np.roll(np.arange(12) % 3, turn)
        dataset = Sensitive(images, labels, spec, name=f"turned{turn}")
        return privatize(dataset, channel, ledger=tmp_path / "ledger.jsonl", insecure_seed=3)

    for labels_epsilon, same, labels in (
        (None, True, (1, None)),
        (50.0, False, (3, ("x", "y", "z"))),
    ):
        channel = build_image_channel(spec, "laplace", 1.0, labels_epsilon=labels_epsilon)
        first, second = send(0, channel), send(1, channel)
        assert torch.equal(first.values, second.values) is same
        assert (first.spec.num_classes, first.spec.class_names) == labels
        assert first.spec.class_sizes is None


# The server


def test_a_release_of_what_was_sent(sent, digits_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "server"))
    ledger = digits_file.with_name("ledger.jsonl")
    before = ledger.read_bytes()
    spent = []

    def progress(*_, **facts):
        spent.append(facts["epsilon"])

    release = synthesize(sent, Average(), out=tmp_path / "release", progress=progress)
    assert (release.guarantee.neighbours, release.guarantee.delta) == ("local", 0.0)
    proved = verify(tmp_path / "release")["epsilon_from_events"]
    assert [release.guarantee.epsilon, proved, *spent] == [pytest.approx(22.0)] * 3
    assert release.metadata["method"] == "average"  # not what a method says of itself
    assert not list((tmp_path / "server").rglob("*"))  # no ledger on the server
    assert ledger.read_bytes() == before
    real = load_dataset("digits", public=True).records().images.mean(0)
    # noise of 4.5 / sqrt(1797) a pixel leaves .07 ± .01; a flat image .3
    assert (release.sample(1)[0][0] - real).abs().mean() < 0.15
    write_report(release, tmp_path / "page", name="digits")
    text = (tmp_path / "page" / "report.html").read_text()
    for words in ("before it leaves its owner", "A server only has their word", "a mean is no law"):
        assert words in text


def test_a_release_cannot_claim_another_channel(sent, tmp_path):
    release = synthesize(sent, Average())
    for scale in (2.0, 0.5):
        channel = json.loads(json.dumps(release.metadata["channel"]))
        channel["parts"][0]["scale"] *= scale
        metadata = {**release.metadata, "channel": channel}
        dataclasses.replace(release, metadata=metadata).save(tmp_path / f"lie{scale}")
        with pytest.raises(PrivotError, match="does not follow from its channel"):
            verify(tmp_path / f"lie{scale}")


def test_a_server_gate_has_no_way_to_a_record(sent):
    dataset = PrivatizedDataset.load(sent)
    gate = ServerGate(dataset)
    for ask in (
        lambda: gate.sum("values-0", lambda image, label: image, clip_norm=1.0),
        lambda: gate.read_without_guarantee("why not"),
        lambda: gate.update_shards(None),
        lambda: gate.rows("values-0", lambda image, label: image, clip_norm=1.0),
        lambda: gate.privatize(dataset.channel),
        lambda: gate.split_into_shards(2, {}),
        lambda: gate.sum_over_shards("x", None, clip_norm=1.0),
        lambda: gate.query_sample("x", None, clip_norm=1.0, shape=(1,)),
    ):
        with pytest.raises(PlanError):
            ask()
    assert gate.get_privatized_dataset() is dataset


def test_clean_records_never_reach_a_local_method(tmp_path, dataset):
    ledger = tmp_path / "ledger.jsonl"
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 2, 2)))
    gate = Gate(dataset, channel.plan(), Ledger(ledger), Budget(1.01))
    with pytest.raises(PlanError, match="privot privatize"):
        make_method("entropic-gan").fit(gate, Streams(0), ignore_progress)
    with pytest.raises(SettingError, match="privot privatize"):
        synthesize(dataset, Average(), ledger=ledger)
    with pytest.raises(PlanError, match="not that of this channel"):
        gate.privatize(Laplace.calibrate(2.0, projection=Projection(shape=(1, 2, 2))))
    assert not ledger.exists()
    with pytest.raises(SettingError, match="run privot privatize first"):
        synthesize(SensitiveTable(np.zeros((5, 2)), name="t"), "merf", 1.0, ledger=ledger)


def test_privatized_files_are_only_for_local_methods(sent, privot, expect_refusal):
    code, _, err = privot(f"synthesize {sent} --method merf")
    assert (code, "entropic-gan" in err) == (2, True)
    code, _, err = privot(f"synthesize {sent} --method merf --classes 10")
    assert (code, "Leave --classes out" in err) == (2, True)
    expect_refusal("", f"measure digits --test {sent}")
    with pytest.raises(SettingError, match="which no budget can change"):
        synthesize(sent, Average(), 5.0)


def test_a_plan_of_a_file_reads_its_channel(sent):
    facts = plan_run(PrivatizedDataset.load(sent), Average(), None)
    assert facts["guarantee"]["epsilon"] == pytest.approx(22.0)
    assert facts["warnings"] == []
    channel = RandomizedResponse.calibrate(0.1, num_categories=9)
    few = PrivatizedDataset(torch.zeros(10, 1), channel, Spec((1, 1, 1), 1))
    assert "or epsilon" in plan_run(few, Average(), None)["warnings"][0]


def test_a_table_is_sealed():
    sealed = SensitiveTable(np.zeros((4, 2)), name="t")
    assert isinstance(sealed, Sensitive)
    with pytest.raises(TypeError):
        len(sealed)
    for rows in (np.zeros(3), np.full((2, 2), np.nan), np.array([["a"]]), np.zeros((0, 3))):
        with pytest.raises(DataError):
            SensitiveTable(rows)
