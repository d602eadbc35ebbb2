"""Default settings and forecasts: pure functions of the declared data and the device type."""

import dataclasses
import json

import pytest
import torch

import privot
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import make, methods
from privot.methods.private_set import LARGE, SMALL
from privot.synthesis.cost import (
    ARITHMETIC,
    LARGE_SECONDS,
    SHORT,
    fit_settings,
    reduce_settings,
    seconds_on_cpu,
    shorter_run,
)
from privot.synthesis.preflight import LONG, cautions, forecast

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DIGITS = Spec((1, 8, 8), 10, 1438, (143,) * 8 + (147, 147))
MNIST = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
CIFAR = Spec((3, 32, 32), 10, 50_000, (5000,) * 10)
every_method = pytest.mark.parametrize("name", methods())


def declared(name, spec):
    """The same data as a method needs it declared: with owners, or with class sizes."""
    return (
        dataclasses.replace(spec, owners=20, class_sizes=None)
        if name.startswith("federated")
        else spec
    )


def predict(method, spec):
    return seconds_on_cpu(method.forecast(spec, method.plan(spec)))


def settings_of(method):
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


@every_method
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_defaults_on_a_gpu_are_the_published_ones(name, shape):
    spec = declared(name, MNIST if shape[0] == 1 else CIFAR)
    fitted = settings_of(fit_settings(name, {}, spec, CUDA))
    published = settings_of(make(name))
    by_side = LARGE if name == "private-set" else {}  # automatic there, by the side of the images
    assert fitted == {**published, **by_side}


@every_method
@pytest.mark.parametrize(
    ("spec", "limit"), [(DIGITS, 60.0), (MNIST, LARGE_SECONDS), (CIFAR, LARGE_SECONDS)]
)
def test_defaults_on_a_cpu_fit_the_data(name, spec, limit):
    spec = declared(name, spec)
    method = fit_settings(name, {}, spec, CPU)
    took = predict(method, spec)
    assert took is not None
    assert took <= limit
    for key, least in getattr(method, "economies", {}).items():
        published = getattr(make(name), key) or LARGE[key]
        assert min(least, published) <= getattr(method, key) <= published or (
            name in ("gs-wgan", "g-pate") and key == "critics"
        )


@every_method
def test_a_given_setting_is_kept(name):
    for key in getattr(methods()[name], "economies", {}):
        value = getattr(make(name), key) or LARGE[key]
        spec = declared(name, DIGITS)
        assert getattr(fit_settings(name, {key: str(value)}, spec, CPU), key) == value


def test_all_settings_of_a_method_given_as_such_are_kept():
    assert fit_settings(make("merf"), None, DIGITS, CPU) == make("merf")
    fitted = fit_settings(make("private-set", {"width": 64}), None, DIGITS, CUDA)
    assert settings_of(fitted) == {
        **settings_of(make("private-set")),
        **SMALL,
        "width": 64,
    }  # None there means automatic


def test_defaults_do_not_depend_on_an_undeclared_size():
    secret = dataclasses.replace(MNIST, size=None, class_sizes=None)
    assert fit_settings("private-set", {}, secret, CPU) == fit_settings(
        "private-set", {}, secret, CPU
    )
    with pytest.raises(SettingError, match="no setting"):
        fit_settings("merf", {"stepz": 3}, secret, CPU)


@pytest.mark.parametrize("name", ["gs-wgan", "g-pate"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_critics_have_records_enough(name, device):
    method = fit_settings(name, {}, DIGITS, device)
    assert method.forecast(DIGITS, method.plan(DIGITS))["records_of_a_critic"] >= 50
    assert (
        fit_settings(
            name, {}, dataclasses.replace(DIGITS, size=None, class_sizes=None), CUDA
        ).critics
        == 1000
    )


def test_reducing_leaves_alone_what_has_no_part_in_the_run():
    grey = fit_settings(
        "private-set", {}, MNIST, CPU
    )  # its budget has no share for nets that learned from scenes
    assert (grey.seeing, grey.scene_epochs) == (
        make("private-set").seeing,
        make("private-set").scene_epochs,
    )
    colour = fit_settings("private-set", {"shares": "0.05,0,0.35,0.6"}, CIFAR, CPU)
    assert colour.scene_epochs < grey.scene_epochs


def test_colour_on_a_cpu_does_without_scenes():
    colour = fit_settings("private-set", {}, CIFAR, CPU)
    assert colour.shares[2] == 0
    assert fit_settings("private-set", {"width": "32"}, CIFAR, CPU).width == 32
    assert fit_settings("private-set", {}, CIFAR, CUDA).shares is None


def test_the_last_economies_come_last():
    small = fit_settings("dp-sinkhorn", {}, MNIST, CPU)
    assert small.steps < make("dp-sinkhorn").steps
    assert (small.width, small.batch) == (make("dp-sinkhorn").width, make("dp-sinkhorn").batch)


@every_method
def test_a_forecast_counts_operations_and_calls(name):
    spec = declared(name, DIGITS)
    method = make(name)
    if name in ("gs-wgan", "g-pate"):
        method = make(name, {"critics": 28})
    expected = method.forecast(spec, method.plan(spec))
    assert expected["floating_point_operations"] is not None
    if name != "real-subset":
        assert expected["operator_calls"] > 0
    json.dumps(expected)


@every_method
@pytest.mark.parametrize("spec", [DIGITS, MNIST, CIFAR])
def test_a_long_run_names_settings_that_take_about_ten_minutes(name, spec):
    spec = declared(name, spec)
    method = make(name, {"critics": 28} if name in ("gs-wgan", "g-pate") and spec is DIGITS else {})
    if (took := predict(method, spec)) <= LONG:
        pytest.skip("not long")
    shorter = shorter_run(method, spec)
    again = make(name, {**settings_of(method), **shorter["settings"]})
    assert predict(again, spec) == pytest.approx(shorter["predicted_seconds"])
    assert shorter["predicted_seconds"] <= 1.5 * SHORT < took
    assert shorter["accuracy"]


def test_the_caution_says_how_long_what_instead_and_what_it_costs(monkeypatch):
    monkeypatch.setattr("privot.synthesis.preflight._speed", lambda device, count=None: ARITHMETIC)
    method = make("private-set", {**LARGE, "noise": 3.0})
    plan = method.plan(CIFAR)
    expected = forecast(CIFAR, method, plan, CPU)
    shorter = expected["shorter_run"]
    [said] = [
        text
        for text in cautions(CIFAR, plan, 1e-5, expected)
        if "predicted on this machine" in text
    ]
    assert all(f"--set {key}={value}" in said for key, value in shorter["settings"].items())
    assert shorter["accuracy"] in said
    short = fit_settings("merf", {"noise": 3.0}, DIGITS, CPU)
    assert "shorter_run" not in forecast(DIGITS, short, short.plan(DIGITS), CPU)


def test_a_slow_machine_takes_longer_and_more_steps_do():
    method = make("merf")
    expected = method.forecast(MNIST, method.plan(MNIST))
    assert seconds_on_cpu(expected, ARITHMETIC / 2) > 1.5 * seconds_on_cpu(expected)
    more = make("merf", {"steps": 6000})
    assert predict(more, DIGITS) > 1.5 * predict(method, DIGITS)
    assert reduce_settings(more, DIGITS, 1e9) == more


def test_a_resumed_run_keeps_the_settings_it_began_with(tmp_path, monkeypatch):
    def stop(stage, step, of, **more):
        if stage == "training the generator":
            raise KeyboardInterrupt

    how = {"settings": {"steps": 50}, "out": tmp_path / "out", "ledger": tmp_path / "ledger.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        privot.synthesize("digits", "merf", 1.0, **how, progress=stop)
    began = json.loads((tmp_path / "out.run" / "run.json").read_text())["settings"]["portion"]
    monkeypatch.setattr(
        "privot.synthesis.cost.SMALL_SECONDS", 0.1
    )  # as another device would have other defaults
    assert fit_settings("merf", {"steps": 50}, DIGITS, CPU).portion < began
    release = privot.synthesize("digits", "merf", 1.0, **how, resume=True)
    assert release.facts["settings"]["portion"] == began


def test_the_manifest_holds_concrete_settings(tmp_path):
    quick = {"per_class": 2, "nets": 4, "trained": 2, "width": 4, "steps": 4}
    release = privot.synthesize(
        "digits", budget=5.0, settings=quick, ledger=tmp_path / "ledger.jsonl"
    )
    assert release.facts["settings"]["lessons"] == SMALL["lessons"]
