"""The report as files: its facts are those of the release, and its public face knows nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.factories import (
    GAUSSIAN,
    NO_GUARANTEE,
    make_attack_result,
    make_metric_result,
    make_noise_dataset,
    make_release,
    parse_data_card,
    read_json,
    read_visible_text,
)

from privot.errors import ReleaseError
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Poisson
from privot.release import Release
from privot.release.artifact import Artifact
from privot.report import AttackResult, OwnerInputs, write_report
from privot.report.images import encode_data_uri
from privot.synthesis import synthesize

PUBLIC = ("report.html", "report.json", "registry.yaml", "README.md")
INTERNAL = ("internal.html", "internal.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small release of the digits in its folder, and its ledger."""
    root = tmp_path_factory.mktemp("digits")
    synthesize(
        "digits",
        "merf",
        2.0,
        settings={"num_features": 100, "steps": 5},
        out=root / "release",
        ledger=root / "digits.jsonl",
    )
    return root


# What it says


def test_the_facts_are_those_of_the_release(saved, tmp_path):
    release = Release.load(saved / "release")
    write_report(release, tmp_path / "out", name="digits", results=[make_metric_result()])
    manifest = json.loads((saved / "release" / "manifest.json").read_text())
    said = read_json(tmp_path / "out")
    assert said["guarantee"] == {
        key: value for key, value in manifest["guarantee"].items() if key != "kind"
    }
    assert said["verdict"] == {
        "kind": "Guarantee",
        "line": "(epsilon 2, delta 1e-5)-differential privacy of one record",
    }
    assert said["plan"] == manifest["plan"]
    assert said["ledger"] == manifest["ledger"]
    assert said["method"]["settings"].keys() == manifest["settings"].keys()
    assert said["method"]["citation"].startswith("@inproceedings")
    assert said["provenance"]["versions"] == manifest["versions"]
    assert (said["data"]["name"], said["data"]["size"], said["data"]["num_classes"]) == (
        "digits",
        1438,
        10,
    )
    digests = said["provenance"]["digests"]
    assert digests["manifest.json"] == (saved / "release" / "manifest.sha256").read_text().strip()
    assert digests["tensors.safetensors"] == manifest["files"]["tensors.safetensors"]
    power = dict(zip(said["max_tpr_curve"]["fpr"], said["max_tpr_curve"]["tpr"], strict=True))
    assert {rate: power[float(rate)] for rate in manifest["guarantee"]["max_tpr"]} == pytest.approx(
        manifest["guarantee"]["max_tpr"], rel=1e-5
    )
    assert (
        said["utility"]["results"][0].items()
        >= {"value": 0.9, "name": "cnn_accuracy", "reference_size": 10000}.items()
    )


def test_the_page_tells_its_story_in_order(saved, tmp_path):
    owner = OwnerInputs(make_noise_dataset(0), Ledger(saved / "digits.jsonl"))
    write_report(
        make_release(),
        tmp_path / "out",
        name="toy",
        results=[make_metric_result()],
        owner_inputs=owner,
    )
    heads = [
        re.findall(r"<h2>(.*?)(?:<small>.*)?</h2>", path.read_text())
        for path in (tmp_path / "out" / "report.html", tmp_path / "out-internal" / "internal.html")
    ]
    story = [
        "Samples",
        "What is promised",
        "Attack power",
        "Epsilon by step",
        "Utility",
        "Method",
        "Ledger",
        "Provenance",
    ]
    assert heads[0] == story
    assert heads[1] == [*story[:5], "Nearest real records", *story[5:]]
    seen = read_visible_text(tmp_path / "out")
    for words in (
        "one record of the first is replaced",
        "Accountant: analytic Gaussian",
        "Renyi",
        "not covered",
        "Signature",
        "privot verify",
    ):
        assert words in seen
    assert "data:image/png" in (tmp_path / "out" / "report.html").read_text()


def test_every_relation_is_explained(tmp_path):
    for relation, words in (
        ("add-remove", "one record more"),
        ("replace", "one record of the first"),
        ("local", "on its own"),
    ):
        plan = Plan((Stage("means", "sum", 4.0),), Neighbours(relation))
        write_report(make_release(plan), tmp_path / relation, name="toy")
        assert words in read_visible_text(tmp_path / relation)
        model = parse_data_card((tmp_path / relation / "registry.yaml").read_text())["deployment"][
            "deployment_model"
        ]["model_name"]
        assert model == ("Local" if relation == "local" else "Central")


def test_no_guarantee_prints_no_promise(tmp_path):
    release = make_release(claim=NO_GUARANTEE, ledger={"head": "00", "spent_epsilon": 3.0})
    write_report(
        release,
        tmp_path / "out",
        name="toy",
        results=[make_metric_result(), make_metric_result("fid", 50.0)],
        attacks=[make_attack_result(lower=(0.01, 0.12))],
    )
    assert read_json(tmp_path / "out")["max_tpr_curve"] is None
    assert not read_json(tmp_path / "out")["guarantee_refuted"]
    assert "No guarantee: no noise was added" in read_visible_text(tmp_path / "out")
    assert "This release carries no proof" in read_visible_text(tmp_path / "out")
    for name in ("report.html", "README.md", "registry.yaml"):
        assert not re.search(
            r"epsilon[^a-z]{0,4}\d|Certified", read_visible_text(tmp_path / "out", name)
        )
    record = parse_data_card((tmp_path / "out" / "registry.yaml").read_text())
    assert record["deployment"].keys() == {"basic", "administrative"}
    assert "differential-privacy" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "claim",
    [
        {"epsilon": 0.1},
        {"max_tpr": {"0.01": 0.011}},
        {"unit": "one person"},
        {"accountant": "mine"},
        {"delta": "x"},
        {"max_tpr": 3},
    ],
)
def test_a_claim_that_the_events_do_not_prove_gets_no_page(tmp_path, claim):
    release = make_release()
    with pytest.raises(ReleaseError, match=r"toy: (claims|its guarantee is not valid)"):
        write_report(
            replace(release, guarantee=replace(release.guarantee, **claim)),
            tmp_path / "out",
            name="toy",
        )
    with pytest.raises(ReleaseError, match="records no plan"):
        write_report(replace(release, metadata={}), tmp_path / "out", name="toy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("claim", [None, NO_GUARANTEE], ids=["proved", "none"])
@pytest.mark.parametrize("event", [None, "GaussianDpEvent(noise_multiplier=1.0)", 3])
def test_events_that_are_not_those_of_the_plan_get_no_page(tmp_path, claim, event):
    with pytest.raises(ReleaseError, match="toy: the recorded event"):
        write_report(make_release(claim=claim, event=event), tmp_path / "out", name="toy")
    assert list(tmp_path.iterdir()) == []


def test_an_infinite_epsilon_is_no_guarantee(tmp_path):
    with pytest.raises(ReleaseError, match=r"toy: .*infinite"):
        write_report(
            make_release(Plan((Stage("means", "sum", 0.0),), Neighbours.REPLACE)),
            tmp_path / "out",
            name="toy",
        )


def test_without_a_plan_nothing_is_said_of_noise(tmp_path):
    bare = replace(make_release(claim=NO_GUARANTEE), metadata={"data": "mnist"})
    write_report(bare, tmp_path / "bare", name="toy", results=[make_metric_result()])
    assert read_json(tmp_path / "bare")["utility"]["published"] == []
    write_report(
        make_release(Plan((Stage("means", "sum", 0.0),), Neighbours.REPLACE), NO_GUARANTEE),
        tmp_path / "free",
        name="toy",
        results=[make_metric_result()],
    )
    assert "without noise" in read_visible_text(tmp_path / "free")


@pytest.mark.parametrize("claim", [None, NO_GUARANTEE], ids=["proved", "none"])
def test_a_hostile_release_gets_a_page_or_one_line(tmp_path, claim):
    huge = 10**400
    plan = Plan(
        (Stage("a\ud800", "sum\udfff", 8.0), Stage("b\ud800", "sum", 20.0, 40)), Neighbours.REPLACE
    )
    release = make_release(plan, claim, ledger={"head": "\ud800", "spent_epsilon": huge}, seed=huge)
    release = replace(release, spec=replace(release.spec, size=huge))
    write_report(
        release,
        tmp_path / "out",
        name="a\ud800",
        results=[make_metric_result(num_samples=huge, reference_size=huge)],
        owner_inputs=OwnerInputs(),
    )
    assert "more than 1e300" in read_visible_text(tmp_path / "out")
    assert [each["name"] for each in read_json(tmp_path / "out")["plan"]["stages"]] == ["a", "b"]
    sampled = Stage("steps", "sum", 0.0, huge, Fixed(5, huge))
    write_report(
        make_release(Plan((sampled,), Neighbours.REPLACE), NO_GUARANTEE),
        tmp_path / "long",
        name="toy",
    )
    assert "5 of more than 1e300" in read_visible_text(tmp_path / "long")
    lie = make_release(
        Plan((replace(sampled, noise_multiplier=1.0),), Neighbours.REPLACE),
        make_release().guarantee,
    )
    with pytest.raises(ReleaseError, match="toy: "):
        write_report(lie, tmp_path / "lie", name="toy")


def test_paid_readings_rulers_and_warnings_stand_beside(tmp_path):
    price = "through the gate at epsilon 0.1, delta 1e-05, replace neighbours"
    found = [
        make_metric_result(protocol=f"LeNet, {'many words, ' * 20}; {price}"),
        make_metric_result("fid", 50.0, protocol="2015 | network", warning="few samples"),
    ]
    write_report(make_release(), tmp_path / "out", name="toy", results=found)
    for name in ("report.html", "README.md"):
        seen = read_visible_text(tmp_path / "out", name)
        assert (
            seen.count("measured privately, with an epsilon of its own on the test data")
            == seen.count(price)
            == 1
        )
        assert "few samples" in seen
    assert (
        r"2015 \| network; **warning**: few samples |"
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert [
        each["privately_measured"] for each in read_json(tmp_path / "out")["utility"]["results"]
    ] == [
        True,
        False,
    ]


def test_the_page_leaves_out_nothing_that_the_promise_leaves_out(tmp_path):
    write_report(make_release(), tmp_path / "out", name="toy")
    for words in (
        "memory use and power",
        "ledger and its backups",
        "constants of the promise",
        "several records",
        "after looking at the data",
        "Whether loading succeeded",
        "Metrics on sensitive data",
        "under another name or path",
        "Whether the public data of a method contains sensitive records",
    ):
        assert words in read_visible_text(tmp_path / "out")
        assert words in read_visible_text(tmp_path / "out", "README.md")


def test_measured_numbers_are_not_flattered(tmp_path):
    release = make_release(delta=1.00001e-5, ledger={"head": "00", "spent_epsilon": 3.0})
    found = make_attack_result(fpr=(0.5,), tpr=(0.50049,), lower=(0.49999,), confidence=0.9999)
    write_report(release, tmp_path / "out", name="toy", attacks=[found])
    seen = read_visible_text(tmp_path / "out")
    assert "at 99.9 % confidence" in seen
    assert re.search(r"50 %\s*50 %\s*49\.9 %", seen)
    assert "delta 1.001e-5)-differential" in seen
    assert "1e-5" not in seen.replace("1.001e-5", "")
    assert (
        "replace-one if the runs have different neighbours" in seen
    )  # as releases did that do not say for whom the sum holds


def test_a_sum_is_of_the_data_set_only_where_its_own_ledger_made_it(tmp_path):
    said = {
        "head": "00",
        "spent_epsilon": 3.0,
        "neighbours": "replace",
        "privacy_unit": "one record",
    }
    for own in (True, False):
        write_report(
            make_release(ledger={**said, "is_dataset_ledger": own}), tmp_path / f"{own}", name="toy"
        )
        seen = read_visible_text(tmp_path / f"{own}")
        assert "for one record under replace neighbours" in seen
        assert ("Spent in all" in seen, "not the dataset's own ledger" in seen) == (own, not own)


@pytest.mark.parametrize(
    "junk", [None, True, -1, 1e308, "x", "\x00", [], [[]], {}, {"a": [None]}], ids=repr
)
def test_junk_in_a_manifest_is_shown_or_left_out(tmp_path, junk):
    known = dict.fromkeys(("method", "settings", "data", "seed", "ledger", "versions"), junk)
    write_report(make_release(**known), tmp_path / "out", name="toy")
    assert "Provenance" in read_visible_text(tmp_path / "out")
    write_report(
        replace(
            make_release(claim=NO_GUARANTEE),
            metadata=dict.fromkeys((*known, "plan", "event"), junk),
        ),
        tmp_path / "out",
        name="toy",
    )
    assert "No guarantee" in read_visible_text(tmp_path / "out")


def test_published_figures_of_the_same_data_stand_beside(tmp_path):
    write_report(
        make_release(),
        tmp_path / "a",
        name="toy",
        results=[make_metric_result(), make_metric_result("is", 5.0)],
    )
    assert read_json(tmp_path / "a")["utility"]["results"][0]["real_data"] == pytest.approx(
        0.99, abs=0.005
    )
    assert "Published results on the same data, at epsilon 1" in read_visible_text(tmp_path / "a")
    assert "SoK: Privacy-Preserving Data Synthesis" in read_visible_text(tmp_path / "a")
    assert "not strictly comparable" in read_visible_text(tmp_path / "a")
    write_report(make_release(data=""), tmp_path / "b", name="toy", results=[make_metric_result()])
    assert "Published results" not in read_visible_text(tmp_path / "b")


# The two faces


def test_the_public_face_is_the_same_for_any_data(tmp_path):
    """privacy: two owners, two sets of records, other internal numbers, another ledger: not a byte of the public face differs."""
    release = make_release()
    faces = []
    for turn, seed in enumerate((None, 1, 2)):
        book = Ledger(tmp_path / f"{seed}.jsonl")
        book.set_limit(Budget(10.0 + turn))
        owner = None if seed is None else OwnerInputs(make_noise_dataset(seed, 40 + seed), book)
        secret = (
            []
            if seed is None
            else [
                make_metric_result("fid", 10.0 * seed, publishable=False),
                make_metric_result("recall", seed / 7, publishable=False),
            ]
        )
        leaks = (
            []
            if seed is None
            else [
                make_attack_result(
                    f"secret {seed}",
                    lower=(0.01, 0.12) if seed == 1 else (0.0, 0.0),
                    publishable=False,
                )
            ]
        )
        write_report(
            release,
            tmp_path / f"out{turn}",
            name="toy",
            results=[*secret, make_metric_result()],
            attacks=[*leaks, make_attack_result()],
            owner_inputs=owner,
        )
        faces.append([(tmp_path / f"out{turn}" / name).read_bytes() for name in PUBLIC])
    assert faces[0] == faces[1] == faces[2]
    internal = [
        (tmp_path / f"out{turn}-internal" / "internal.html").read_bytes() for turn in (1, 2)
    ]
    assert internal[0] != internal[1]


def test_the_internal_face_has_what_the_public_one_has_not(tmp_path):
    book = Ledger(tmp_path / "box.jsonl")
    data = make_noise_dataset(3)
    book.set_limit(Budget(10.0))
    book.reserve(GAUSSIAN, "by hand")
    numbers = {
        "results": [make_metric_result("secret_fid", 12.5, publishable=False)],
        "attacks": [make_attack_result("secret attack", publishable=False)],
    }
    done = write_report(
        make_release(),
        tmp_path / "out",
        name="toy",
        **numbers,
        owner_inputs=OwnerInputs(data, book),
    )
    assert [path.name for path in done.paths] == [*PUBLIC, *INTERNAL]
    assert done.num_left_out == 0
    assert [path.parent.name for path in done.paths] == ["out"] * 4 + ["out-internal"] * 2
    public, internal = (
        "".join(read_visible_text(path.parent, path.name) for path in paths)
        for paths in (done.paths[:4], done.paths[4:])
    )
    for words in (
        "Internal: not for publication",
        "Nearest real records",
        "secret",
        "the owner sets a limit of epsilon 10",
        "real to real",
    ):
        assert words in internal
        assert words not in public
    real = {encode_data_uri(image) for image in data._read_records(slice(None)).images}
    shown = [
        set(re.findall(r'src="(data:[^"]+)"', path.read_text()))
        for path in (done.paths[0], done.paths[4])
    ]
    assert not real & shown[0]
    assert real & shown[1]
    assert write_report(make_release(), tmp_path / "out", name="toy", **numbers).num_left_out == 2
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(PUBLIC)


def test_the_public_face_knows_no_place_and_no_time(tmp_path):
    numbers = [make_metric_result(reference=str(tmp_path / "test.npz"), seconds=12.345)]
    write_report(make_release(), tmp_path / "out", name="toy", results=numbers)
    for name in PUBLIC:
        found = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in found
        assert str(Path.home()) not in found
        assert not re.search(r"12\.345|20\d\d-\d\d-\d\d", found)
    assert "test.npz" in read_visible_text(tmp_path / "out")


def test_the_ledger_says_whether_the_release_is_in_it(saved, tmp_path):
    release = Release.load(saved / "release")
    for name, holds in ((saved / "digits.jsonl", True), (tmp_path / "other.jsonl", False)):
        write_report(
            release, tmp_path / "out", name="toy", owner_inputs=OwnerInputs(ledger=Ledger(name))
        )
        assert (
            read_json(tmp_path / "out-internal", "internal.json")["history"]["contains_head"]
            is holds
        )
    assert "charged to another one" in read_visible_text(tmp_path / "out-internal", "internal.html")


# The sandwich


@pytest.mark.parametrize(
    "plan",
    [GAUSSIAN, Plan((Stage("steps", "sum", 4.0, 4, Poisson(0.1)),), Neighbours.ADD_REMOVE)],
    ids=["gauss", "pld"],
)
def test_a_lower_bound_above_the_certificate_is_seen(tmp_path, plan):
    release = make_release(plan)
    rates = (0.003, 0.2)
    bound = [plan.cost().max_tpr(rate) for rate in rates]
    for factor, broken in ((0.999, False), (1.001, True)):
        lower = (bound[0] * 0.5, bound[1] * factor)
        found = [
            make_attack_result(fpr=rates, tpr=(bound[0] * 2, bound[1] * 1.2), lower=lower)
        ]  # estimates may lie above, their bounds may not
        done = write_report(release, tmp_path / "out", name="toy", attacks=found)
        assert done.guarantee_refuted is broken
        assert read_json(tmp_path / "out")["guarantee_refuted"] is broken
        assert read_json(tmp_path / "out")["attacks"][0]["exceeds_max_tpr"] == [False, broken]
        for name in ("report.html", "README.md", "registry.yaml"):
            assert (
                "implementation broken" in read_visible_text(tmp_path / "out", name).lower()
            ) is broken
        assert ("- differential-privacy" in _tags(tmp_path / "out")) is not broken
        record = parse_data_card((tmp_path / "out" / "registry.yaml").read_text())
        assert ("privacy_loss" in record["deployment"]) is not broken
        assert ("do not submit" in record["deployment"]["administrative"]["notes"]) is broken
        assert (
            "differential privacy" in record["deployment"]["basic"]["description"]
        ) is not broken


def test_what_else_is_known_of_an_attack_is_shown(tmp_path):
    words = {
        "controls_summary": "AUC 0.99 <b>on</b> a control",
        "warning": "class shares differ",
        "verdict": "proves a true-positive rate of 0.1",
    }
    found = replace(
        make_attack_result(),
        auc=0.531,
        perfect_attack_tpr_lower=(0.77, 0.88),
        roc_curve=((0.01, 0.3, 1.0), (0.011, 0.31, 1.0)),
        **words,
    )
    assert not write_report(
        make_release(), tmp_path / "out", name="toy", attacks=[found, make_attack_result("bare")]
    ).guarantee_refuted
    seen = read_visible_text(tmp_path / "out")
    for each in ("0.531", "88 %", "class shares differ", words["verdict"], "AUC 0.99"):
        assert each in seen
    assert "<b>on" not in (tmp_path / "out" / "report.html").read_text()
    assert "A perfect attack" in seen
    assert seen.count("Its controls") == seen.count("Caution") == 1
    assert "none" not in seen[seen.index("A perfect attack") : seen.index("Epsilon by step")]


def test_an_audit_that_refutes_the_claim_breaks_the_report(tmp_path):
    found = AttackResult(
        "audit of the whole method: one run",
        (),
        (),
        (),
        0.95,
        True,
        verdict="proves epsilon of at least 9",
        verdict_refutes_guarantee=True,
    )
    assert write_report(
        make_release(), tmp_path / "out", name="toy", attacks=[found]
    ).guarantee_refuted
    assert "Implementation broken" in read_visible_text(tmp_path / "out")
    assert "proves epsilon of at least 9" in read_visible_text(tmp_path / "out")
    assert not write_report(
        make_release(),
        tmp_path / "out",
        name="toy",
        attacks=[replace(found, verdict_refutes_guarantee=False)],
    ).guarantee_refuted


def _tags(folder):
    return [
        f"- {each}"
        for each in parse_data_card((folder / "README.md").read_text().split("---\n")[1])["tags"]
    ]


def test_an_internal_attack_lets_no_clean_page_stand(tmp_path):
    found = [
        make_attack_result(tpr=(0.9, 0.9), lower=(0.8, 0.8), publishable=False),
        make_attack_result(),
    ]
    for owner in (OwnerInputs(), None):
        write_report(make_release(), tmp_path / "out", name="toy", attacks=[make_attack_result()])
        done = write_report(
            make_release(), tmp_path / "out", name="toy", attacks=found, owner_inputs=owner
        )
        assert done.guarantee_refuted
        assert [path.name for path in done.paths] == (list(INTERNAL) if owner else [])
        assert done.num_left_out == (0 if owner else 1)
        assert [each.name for each in tmp_path.iterdir()] == ["out-internal"]
    assert read_json(tmp_path / "out-internal", "internal.json")["guarantee_refuted"]
    known = [replace(found[0], publishable=True), found[0]]
    assert write_report(
        make_release(), tmp_path / "out", name="toy", attacks=known
    ).guarantee_refuted
    assert "Implementation broken" in read_visible_text(tmp_path / "out")


def test_an_internal_attack_takes_no_folder_of_others(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(ReleaseError, match="contains other files"):
        write_report(
            make_release(),
            tmp_path / "out",
            name="toy",
            attacks=[make_attack_result(tpr=(0.9, 0.9), lower=(0.8, 0.8), publishable=False)],
        )
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


# The strip of a flow


def with_strip(strip):
    made = make_release()
    return replace(
        made,
        artifact=Artifact.from_images(
            made.artifact.tensors["images"],
            made.artifact.tensors["labels"],
            resize_state={"snapshots": strip},
        ),
    )


def test_a_flow_shows_its_particles_on_their_way(tmp_path):
    strip = torch.linspace(0, 1, 8).view(8, 1, 1, 1, 1).expand(8, 2, 1, 8, 8).half()
    write_report(with_strip(strip), tmp_path / "out", name="toy")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Particles of the flow" in read_visible_text(tmp_path / "out")
    assert page.count('of the flow">') == 16
    assert encode_data_uri(torch.ones(1, 8, 8)) in page
    write_report(make_release(), tmp_path / "plain", name="toy")
    assert "Particles of the flow" not in read_visible_text(tmp_path / "plain")


@pytest.mark.parametrize(
    "shape",
    [
        (8, 2, 8, 8),
        (8, 2, 3, 8, 8),
        (1, 2, 1, 8, 8),
        (500, 2, 1, 8, 8),
        (0, 2, 1, 8, 8),
        (8, 0, 1, 8, 8),
    ],
)
def test_what_is_no_strip_is_left_out(tmp_path, shape):
    write_report(with_strip(torch.zeros(shape)), tmp_path / "out", name="toy")
    assert "Particles of the flow" not in read_visible_text(tmp_path / "out")
