"""The report as files: its facts are those of the release, and its public face knows nothing else."""

import base64
import errno
import hashlib
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from specimens import GAUSSIAN, attack, hand, reading

from privot.data.records import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import NoGuarantee, Release
from privot.report import Owner, write
from privot.report.pictures import uri
from privot.synthesis import synthesize

PUBLIC = ("report.html", "report.json", "registry.yaml", "README.md")
INTERNAL = ("internal.html", "internal.json")
NONE = NoGuarantee("no noise was added: the budget was infinite")
REGISTRY = {
    "": {"url_slug", "status", "tier", "deployment"},
    "deployment": {
        "basic", "dp_variant", "privacy_loss", "deployment_model", "accounting", "implementation", "administrative",
    },
    "basic": {
        "name", "data_curators", "description", "intended_use", "data_product_type", "data_product_region", "publication_date",
        "data_product_sector",
    },
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_unit_details", "privacy_parameters", "privacy_parameters_details"},
    "privacy_parameters": {"epsilon", "delta", "rho"},
    "deployment_model": {"model_name", "actors", "release_type", "data_source_type", "access_type"},
    "accounting": {"post_processing", "composition"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"},
    "administrative": {"registry_authors", "sources", "notes"},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small release of the digits in its folder, and its ledger."""
    root = tmp_path_factory.mktemp("digits")
    synthesize("digits", "merf", 2.0, settings={"features": 100, "steps": 5}, out=root / "release", ledger=root / "digits.jsonl")
    return root


def box(seed, count=50):
    images = np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)
    return Sensitive(images, np.arange(count) % 3, Spec((1, 8, 8), 3), name="box")


def facts(folder, name="report.json"):
    return json.loads((folder / name).read_text())


def text(folder, name="report.html"):
    """What a reader sees."""
    html = re.sub(r"<(style|title)>.*?</\1>", "", (folder / name).read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", html))


def yaml(source):
    """Nested ``key: JSON`` lines; anything else fails."""
    root, stack = {}, []
    for line in source.splitlines():
        indent, key, value = re.fullmatch(r"( *)([a-z_]+):(?: (.+))?", line).groups()
        stack = [*stack[: len(indent) // 2], key]
        holder = root
        for each in stack[:-1]:
            holder = holder[each]
        holder[key] = json.loads(value) if value else {}
    return root


# What it says


def test_the_facts_are_those_of_the_release(saved, tmp_path):
    release = Release.load(saved / "release")
    write(release, tmp_path / "out", name="digits", readings=[reading()])
    manifest, said = json.loads((saved / "release" / "manifest.json").read_text()), facts(tmp_path / "out")
    assert said["guarantee"] == {key: value for key, value in manifest["guarantee"].items() if key != "kind"}
    assert said["verdict"] == {"kind": "Guarantee", "line": "(epsilon 2, delta 1e-5)-differential privacy of one record"}
    assert said["plan"] == manifest["plan"]
    assert said["ledger"] == manifest["ledger"]
    assert said["method"]["settings"].keys() == manifest["settings"].keys()
    assert said["method"]["citation"].startswith("@inproceedings")
    assert said["provenance"]["versions"] == manifest["versions"]
    assert (said["data"]["name"], said["data"]["size"], said["data"]["classes"]) == ("digits", 1438, 10)
    digests = said["provenance"]["digests"]
    assert digests["manifest.json"] == (saved / "release" / "manifest.sha256").read_text().strip()
    assert digests["tensors.safetensors"] == manifest["files"]["tensors.safetensors"]
    power = dict(zip(said["curve"]["fpr"], said["curve"]["tpr"], strict=True))
    assert {rate: power[float(rate)] for rate in manifest["guarantee"]["max_tpr"]} == pytest.approx(
        manifest["guarantee"]["max_tpr"], rel=1e-5
    )
    assert said["utility"]["readings"][0].items() >= {"value": 0.9, "name": "cnn_accuracy", "count": 10000}.items()


def test_the_page_tells_its_story_in_order(saved, tmp_path):
    owner = Owner(box(0), Ledger(saved / "digits.jsonl"))
    write(hand(), tmp_path / "out", name="toy", readings=[reading()], owner=owner)
    heads = [
        re.findall(r"<h2>(.*?)(?:<small>.*)?</h2>", (tmp_path / "out" / name).read_text()) for name in ("report.html", "internal.html")
    ]
    story = ["Samples", "What is promised", "Attack power", "Epsilon by step", "Use", "Method", "Ledger", "Provenance"]
    assert heads[0] == story
    assert heads[1] == [*story[:5], "Nearest real records", *story[5:]]
    seen = text(tmp_path / "out")
    for words in (
        "one record of the first is another",
        "Accountant: analytic Gaussian",
        "Renyi",
        "not covered",
        "Signature",
        "privot verify",
    ):
        assert words in seen
    assert "data:image/png" in (tmp_path / "out" / "report.html").read_text()


def test_every_relation_is_explained(tmp_path):
    for relation, words in (("add-remove", "one record more"), ("replace", "one record of the first"), ("local", "on its own")):
        plan = Plan((Stage("means", "sum", 4.0),), Neighbours(relation))
        write(hand(plan), tmp_path / relation, name="toy")
        assert words in text(tmp_path / relation)
        model = yaml((tmp_path / relation / "registry.yaml").read_text())["deployment"]["deployment_model"]["model_name"]
        assert model == ("Local" if relation == "local" else "Central")


def test_no_guarantee_prints_no_promise(tmp_path):
    release = hand(claim=NONE, ledger={"head": "00", "spent_epsilon": 3.0})
    write(release, tmp_path / "out", name="toy", readings=[reading(), reading("fid", 50.0)], attacks=[attack(lower=(0.01, 0.12))])
    assert facts(tmp_path / "out")["curve"] is None
    assert not facts(tmp_path / "out")["broken"]
    assert "No guarantee: no noise was added" in text(tmp_path / "out")
    assert "This release carries no proof" in text(tmp_path / "out")
    for name in ("report.html", "README.md", "registry.yaml"):
        assert not re.search(r"epsilon[^a-z]{0,4}\d|Certified", text(tmp_path / "out", name))
    record = yaml((tmp_path / "out" / "registry.yaml").read_text())
    assert record["deployment"].keys() == {"basic", "administrative"}
    assert "differential-privacy" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "claim",
    [{"epsilon": 0.1}, {"max_tpr": {"0.01": 0.011}}, {"unit": "one person"}, {"accountant": "mine"}, {"delta": "x"}, {"max_tpr": 3}],
)
def test_a_claim_that_the_events_do_not_prove_gets_no_page(tmp_path, claim):
    release = hand()
    with pytest.raises(ReleaseError, match=r"claims epsilon|not sound"):
        write(replace(release, guarantee=replace(release.guarantee, **claim)), tmp_path / "out", name="toy")
    with pytest.raises(ReleaseError, match="no plan"):
        write(replace(release, facts={}), tmp_path / "out", name="toy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("junk", [None, True, -1, 1e308, "x", "\x00", [], [[]], {}, {"a": [None]}], ids=repr)
def test_junk_in_a_manifest_is_shown_or_left_out(tmp_path, junk):
    known = dict.fromkeys(("method", "settings", "data", "seed", "ledger", "versions"), junk)
    write(hand(**known), tmp_path / "out", name="toy")
    assert "Provenance" in text(tmp_path / "out")
    write(replace(hand(claim=NONE), facts=dict.fromkeys((*known, "plan", "event"), junk)), tmp_path / "out", name="toy")
    assert "No guarantee" in text(tmp_path / "out")


def test_published_figures_of_the_same_data_stand_beside(tmp_path):
    write(hand(), tmp_path / "a", name="toy", readings=[reading(), reading("is", 5.0)])
    assert facts(tmp_path / "a")["utility"]["readings"][0]["real_data"] == 0.99
    assert "Published figures on the same data, at epsilon 1" in text(tmp_path / "a")
    assert "SoK: Privacy-Preserving Data Synthesis" in text(tmp_path / "a")
    assert "not strictly comparable" in text(tmp_path / "a")
    write(hand(data=""), tmp_path / "b", name="toy", readings=[reading()])
    assert "Published figures" not in text(tmp_path / "b")


# The two faces


def test_the_public_face_is_the_same_for_any_data(tmp_path):
    """privacy: two owners, two sets of records, other internal numbers, another ledger: not a byte of the public face differs."""
    release, faces = hand(), []
    for turn, seed in enumerate((None, 1, 2)):
        book = Ledger(tmp_path / f"{seed}.jsonl")
        book.limit(Budget(10.0 + turn))
        owner = None if seed is None else Owner(box(seed, 40 + seed), book)
        secret = [] if seed is None else [reading("fid", 10.0 * seed, publishable=False), reading("recall", seed / 7, publishable=False)]
        leaks = [] if seed is None else [attack(f"secret {seed}", lower=(0.01, 0.12) if seed == 1 else (0.0, 0.0), publishable=False)]
        write(release, tmp_path / f"out{turn}", name="toy", readings=[*secret, reading()], attacks=[*leaks, attack()], owner=owner)
        faces.append([(tmp_path / f"out{turn}" / name).read_bytes() for name in PUBLIC])
    assert faces[0] == faces[1] == faces[2]
    internal = [(tmp_path / f"out{turn}" / "internal.html").read_bytes() for turn in (1, 2)]
    assert internal[0] != internal[1]


def test_the_internal_face_has_what_the_public_one_has_not(tmp_path):
    book, data = Ledger(tmp_path / "box.jsonl"), box(3)
    book.limit(Budget(10.0))
    book.reserve(GAUSSIAN, "by hand")
    numbers = {"readings": [reading("secret_fid", 12.5, publishable=False)], "attacks": [attack("secret attack", publishable=False)]}
    done = write(hand(), tmp_path / "out", name="toy", **numbers, owner=Owner(data, book))
    assert [path.name for path in done.files] == [*PUBLIC, *INTERNAL]
    assert done.left_out == 0
    public, internal = ("".join(text(tmp_path / "out", name) for name in names) for names in (PUBLIC, INTERNAL))
    for words in (
        "Internal: not for publication",
        "Nearest real records",
        "secret",
        "the owner sets a limit of epsilon 10",
        "real to real",
    ):
        assert words in internal
        assert words not in public
    real = {uri(image) for image in data._take(slice(None)).images}
    shown = [set(re.findall(r'src="(data:[^"]+)"', (tmp_path / "out" / name).read_text())) for name in ("report.html", "internal.html")]
    assert not real & shown[0]
    assert real & shown[1]
    assert write(hand(), tmp_path / "out", name="toy", **numbers).left_out == 2
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(PUBLIC)


def test_the_public_face_knows_no_place_and_no_time(tmp_path):
    numbers = [reading(reference=str(tmp_path / "test.npz"), seconds=12.345)]
    write(hand(), tmp_path / "out", name="toy", readings=numbers)
    for name in PUBLIC:
        found = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in found
        assert str(Path.home()) not in found
        assert not re.search(r"12\.345|20\d\d-\d\d-\d\d", found)
    assert "test.npz" in text(tmp_path / "out")


def test_the_ledger_says_whether_the_release_is_in_it(saved, tmp_path):
    release = Release.load(saved / "release")
    for name, holds in ((saved / "digits.jsonl", True), (tmp_path / "other.jsonl", False)):
        write(release, tmp_path / "out", name="toy", owner=Owner(ledger=Ledger(name)))
        assert facts(tmp_path / "out", "internal.json")["history"]["holds_head"] is holds
    assert "charged to another one" in text(tmp_path / "out", "internal.html")


# The sandwich


@pytest.mark.parametrize(
    "plan", [GAUSSIAN, Plan((Stage("steps", "sum", 4.0, 4, Poisson(0.1)),), Neighbours.ADD_REMOVE)], ids=["gauss", "pld"]
)
def test_a_lower_bound_above_the_certificate_is_seen(tmp_path, plan):
    release, rates = hand(plan), (0.003, 0.2)
    bound = [plan.cost().tpr(rate) for rate in rates]
    for factor, broken in ((0.999, False), (1.001, True)):
        lower = (bound[0] * 0.5, bound[1] * factor)
        found = [attack(fpr=rates, tpr=(bound[0] * 2, bound[1] * 1.2), lower=lower)]  # estimates may lie above, their bounds may not
        done = write(release, tmp_path / "out", name="toy", attacks=found)
        assert done.broken is broken
        assert facts(tmp_path / "out")["broken"] is broken
        assert facts(tmp_path / "out")["attacks"][0]["above"] == [False, broken]
        for name in ("report.html", "README.md"):
            assert ("implementation broken" in text(tmp_path / "out", name).lower()) is broken


def test_an_internal_attack_breaks_it_for_the_owner_alone(tmp_path):
    found = [attack(tpr=(0.9, 0.9), lower=(0.8, 0.8), publishable=False)]
    done = write(hand(), tmp_path / "out", name="toy", attacks=found, owner=Owner())
    assert done.broken
    assert not facts(tmp_path / "out")["broken"]
    assert facts(tmp_path / "out", "internal.json")["broken"]
    assert write(hand(), tmp_path / "more", name="toy", attacks=found).broken


# The records for others


@pytest.mark.parametrize("claim", [None, NONE], ids=["proved", "none"])
def test_the_registry_record_has_the_registry_s_keys(tmp_path, claim):
    release = hand(claim=claim)
    write(release, tmp_path / "out", name='yes: "no" #1 \\', readings=[reading()])
    record = yaml((tmp_path / "out" / "registry.yaml").read_text())

    def check(name, value):
        assert value.keys() <= REGISTRY[name]
        for key, each in value.items():
            if isinstance(each, dict):
                check(key, each)

    check("", record)
    assert record["deployment"]["basic"]["name"] == 'yes: "no" #1 \\'
    assert record["deployment"]["basic"]["data_product_type"] == "Synthetic data"
    assert re.fullmatch(r"[a-z0-9-]+", record["url_slug"])
    if claim is None:
        assert record["deployment"]["privacy_loss"]["privacy_parameters"] == {"epsilon": release.guarantee.epsilon, "delta": 1e-5}
        assert "delta: 1.0e-05" in (tmp_path / "out" / "registry.yaml").read_text()  # a word to readers of YAML 1.1 without its point


def test_the_card_has_front_matter_and_obeys_no_name(tmp_path):
    name = "<img src=x> [a](http://b) *c* | `d` www.e.f"
    write(hand(), tmp_path / "out", name=name, readings=[reading(name)])
    card = (tmp_path / "out" / "README.md").read_text()
    empty, front, body = card.split("---\n", 2)
    assert empty == ""
    assert yaml(front)["pretty_name"] == name
    assert r"&lt;img src=x&gt; \[a\](http\://b) \*c\* \| \`d\` www\.e.f" in body
    assert "<img" not in body


# The folder


def test_an_earlier_report_is_replaced_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write(hand(), out, name="first", owner=Owner())
    write(hand(), out, name="second")
    assert facts(out)["name"] == "second"
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="something else"):
        write(hand(), out, name="third")
    assert (out / "mine.txt").read_text() == "mine"
    assert facts(out)["name"] == "second"


def test_what_only_looks_like_a_report_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, inside in (("odd", "[]"), ("torn", "{"), ("foreign", '{"name": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(inside)
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("mine")
    (tmp_path / "nested" / "report.html").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    for name in ("file", "odd", "torn", "foreign", "card", "nested", "link"):
        with pytest.raises(ReleaseError, match="something else"):
            write(hand(), tmp_path / name, name="toy")
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path, monkeypatch):
    out, real = tmp_path / "out", {"write_bytes": Path.write_bytes, "replace": Path.replace}

    def fails(place, turn):
        left = [turn]

        def maybe(self, *rest):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real[place](self, *rest)

        return maybe

    for earlier in (False, True):
        if earlier:
            write(hand(), out, name="first")
        for place, turns in (("write_bytes", 4), ("replace", 2 if earlier else 1)):
            for turn in range(1, turns + 1):
                with monkeypatch.context() as broken:
                    broken.setattr(Path, place, fails(place, turn))
                    with pytest.raises(OSError, match="No space"):
                        write(hand(), out, name="second")
                assert [each.name for each in tmp_path.iterdir()] == (["out"] if earlier else [])
                assert not earlier or facts(out)["name"] == "first"


def test_a_page_of_large_colour_images_stays_small(tmp_path):
    names = tuple(f"class {place}" for place in range(25))
    write(hand(shape=(3, 64, 64), classes=25, names=names, each=10), tmp_path / "a", name="toy")
    assert (tmp_path / "a" / "report.html").stat().st_size < 3e6
    assert "20 of 25 classes" in text(tmp_path / "a")
    write(hand(shape=(3, 300, 200), classes=2, names=None, each=2), tmp_path / "b", name="toy")
    assert (tmp_path / "b" / "report.html").stat().st_size < 3e6


def test_a_class_without_images_has_an_empty_row(tmp_path):
    release = hand()
    keep = release.product.tensors["labels"] != 1
    tensors = {key: value[keep] for key, value in release.product.tensors.items()}
    write(replace(release, product=replace(release.product, tensors=tensors)), tmp_path / "out", name="toy", owner=Owner(box(0)))
    assert re.search(r"<bdi>dog</bdi></span><div class=\"strip\"><small>none", (tmp_path / "out" / "report.html").read_text())


def test_records_of_another_shape_are_refused(tmp_path):
    other = Public(np.zeros((4, 1, 4, 4), np.uint8), np.arange(4) % 3, Spec((1, 4, 4), 3))
    with pytest.raises(ReleaseError, match=r"\[1, 4, 4\]"):
        write(hand(), tmp_path / "out", name="toy", owner=Owner(other))


def test_the_policy_names_the_one_style(tmp_path):
    write(hand(), tmp_path / "out", name="toy")
    html = (tmp_path / "out" / "report.html").read_text()
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'" in html
    assert not re.search(r"<script|\sstyle=|\son\w+=|https?:", html)


def test_readings_survive_as_they_were_given(tmp_path):
    given = [reading("fid", 50.0, error=float("nan"), better="lower", warning="few samples")]
    write(hand(), tmp_path / "out", name="toy", readings=given)
    (found,) = facts(tmp_path / "out")["utility"]["readings"]
    wanted = {key: value for key, value in asdict(given[0]).items() if key not in ("error", "seconds")}
    assert found.items() >= wanted.items()
    assert found["error"] == "nan"
    assert "few samples" in text(tmp_path / "out")
