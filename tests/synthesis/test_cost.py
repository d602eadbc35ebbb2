"""Default settings and forecasts: pure functions of the declared data and the device type."""

import dataclasses
import json

import pytest
import torch

import privot
from privot.components.private_set_settings import LARGE_IMAGE_SETTINGS, SMALL_IMAGE_SETTINGS
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import list_methods, make_method
from privot.synthesis.cost import (
    LARGE_IMAGE_SECONDS,
    NOMINAL_FLOPS_PER_SECOND,
    SHORTER_RUN_SECONDS,
    configure_method,
    find_shorter_run,
    predict_cpu_seconds,
    reduce_settings,
)
from privot.synthesis.preflight import forecast_run
from privot.synthesis.run_warnings import LONG_RUN_SECONDS, collect_warnings

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DIGITS = Spec((1, 8, 8), 10, 1438, (143,) * 8 + (147, 147))
MNIST = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
CIFAR = Spec((3, 32, 32), 10, 50_000, (5000,) * 10)
every_method = pytest.mark.parametrize("name", list_methods())


def declared(name, spec):
    """The same data as a method needs it declared: with owners, or with class sizes."""
    return (
        dataclasses.replace(spec, num_clients=20, class_sizes=None)
        if name.startswith("federated")
        else spec
    )


def predict(method, spec):
    return predict_cpu_seconds(method.forecast(spec, method.plan(spec)))


def settings_of(method):
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


@every_method
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_defaults_on_a_gpu_are_the_published_ones(name, shape):
    spec = declared(name, MNIST if shape[0] == 1 else CIFAR)
    fitted = settings_of(configure_method(name, {}, spec, CUDA))
    published = settings_of(make_method(name))
    by_side = (
        LARGE_IMAGE_SETTINGS if name == "private-set" else {}
    )  # automatic there, by the side of the images
    assert fitted == {**published, **by_side}


@every_method
@pytest.mark.parametrize(
    ("spec", "limit"), [(DIGITS, 60.0), (MNIST, LARGE_IMAGE_SECONDS), (CIFAR, LARGE_IMAGE_SECONDS)]
)
def test_defaults_on_a_cpu_fit_the_data(name, spec, limit):
    spec = declared(name, spec)
    method = configure_method(name, {}, spec, CPU)
    took = predict(method, spec)
    assert took is not None
    assert took <= limit
    for key, least in method.cpu_minimums.items():
        published = getattr(make_method(name), key) or LARGE_IMAGE_SETTINGS[key]
        assert min(least, published) <= getattr(method, key) <= published or (
            name in ("gs-wgan", "g-pate") and key == "num_critics"
        )


@every_method
def test_a_given_setting_is_kept(name):
    for key in list_methods()[name].cpu_minimums:
        value = getattr(make_method(name), key) or LARGE_IMAGE_SETTINGS[key]
        spec = declared(name, DIGITS)
        assert getattr(configure_method(name, {key: str(value)}, spec, CPU), key) == value


def test_all_settings_of_a_method_given_as_such_are_kept():
    assert configure_method(make_method("merf"), None, DIGITS, CPU) == make_method("merf")
    fitted = configure_method(make_method("private-set", {"net_width": 64}), None, DIGITS, CUDA)
    assert settings_of(fitted) == {
        **settings_of(make_method("private-set")),
        **SMALL_IMAGE_SETTINGS,
        "net_width": 64,
    }  # None there means automatic


def test_defaults_do_not_depend_on_an_undeclared_size():
    secret = dataclasses.replace(MNIST, size=None, class_sizes=None)
    assert configure_method("private-set", {}, secret, CPU) == configure_method(
        "private-set", {}, secret, CPU
    )
    with pytest.raises(SettingError, match="no setting"):
        configure_method("merf", {"stepz": 3}, secret, CPU)


@pytest.mark.parametrize("name", ["gs-wgan", "g-pate"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_critics_have_records_enough(name, device):
    method = configure_method(name, {}, DIGITS, device)
    assert method.forecast(DIGITS, method.plan(DIGITS))["records_per_critic"] >= 50
    assert (
        configure_method(
            name, {}, dataclasses.replace(DIGITS, size=None, class_sizes=None), CUDA
        ).num_critics
        == 1000
    )


def test_reducing_leaves_alone_what_has_no_part_in_the_run():
    grey = configure_method(
        "private-set", {}, MNIST, CPU
    )  # its budget has no share for nets that learned from scenes
    assert (grey.num_pretrained_nets, grey.pretrain_epochs) == (
        make_method("private-set").num_pretrained_nets,
        make_method("private-set").pretrain_epochs,
    )
    colour = configure_method("private-set", {"budget_shares": "0.05,0,0.35,0.6"}, CIFAR, CPU)
    assert colour.pretrain_epochs < grey.pretrain_epochs


def test_colour_on_a_cpu_does_without_scenes():
    colour = configure_method("private-set", {}, CIFAR, CPU)
    assert colour.budget_shares[2] == 0
    assert configure_method("private-set", {"net_width": "32"}, CIFAR, CPU).net_width == 32
    assert configure_method("private-set", {}, CIFAR, CUDA).budget_shares is None


def test_the_last_economies_come_last():
    small = configure_method("dp-sinkhorn", {}, MNIST, CPU)
    assert small.steps < make_method("dp-sinkhorn").steps
    assert (small.generator_channels, small.batch_size) == (
        make_method("dp-sinkhorn").generator_channels,
        make_method("dp-sinkhorn").batch_size,
    )


@every_method
def test_a_forecast_counts_operations_and_calls(name):
    spec = declared(name, DIGITS)
    method = make_method(name)
    if name in ("gs-wgan", "g-pate"):
        method = make_method(name, {"num_critics": 28})
    expected = method.forecast(spec, method.plan(spec))
    assert expected["floating_point_operations"] is not None
    if name != "real-subset":
        assert expected["operator_calls"] > 0
    json.dumps(expected)


@every_method
@pytest.mark.parametrize("spec", [DIGITS, MNIST, CIFAR])
def test_a_long_run_names_settings_that_take_about_ten_minutes(name, spec):
    spec = declared(name, spec)
    method = make_method(
        name, {"num_critics": 28} if name in ("gs-wgan", "g-pate") and spec is DIGITS else {}
    )
    if (took := predict(method, spec)) <= LONG_RUN_SECONDS:
        pytest.skip("not long")
    shorter = find_shorter_run(method, spec)
    again = make_method(name, {**settings_of(method), **shorter["settings"]})
    assert predict(again, spec) == pytest.approx(shorter["predicted_seconds"])
    assert shorter["predicted_seconds"] <= 1.5 * SHORTER_RUN_SECONDS < took
    assert shorter["accuracy"]


def test_the_caution_says_how_long_what_instead_and_what_it_costs(monkeypatch):
    monkeypatch.setattr(
        "privot.synthesis.preflight._measure_flops_per_second",
        lambda device, count=None: NOMINAL_FLOPS_PER_SECOND,
    )
    method = make_method("private-set", {**LARGE_IMAGE_SETTINGS, "noise_multiplier": 3.0})
    plan = method.plan(CIFAR)
    expected = forecast_run(CIFAR, method, plan, CPU)
    shorter = expected["shorter_run"]
    [said] = [
        text
        for text in collect_warnings(CIFAR, plan, 1e-5, expected)
        if "predicted to take" in text
    ]
    assert all(f"--set {key}={value}" in said for key, value in shorter["settings"].items())
    assert shorter["accuracy"] in said
    short = configure_method("merf", {"noise_multiplier": 3.0}, DIGITS, CPU)
    assert "shorter_run" not in forecast_run(DIGITS, short, short.plan(DIGITS), CPU)


def test_a_slow_machine_takes_longer_and_more_steps_do():
    method = make_method("merf")
    expected = method.forecast(MNIST, method.plan(MNIST))
    assert predict_cpu_seconds(expected, NOMINAL_FLOPS_PER_SECOND / 2) > 1.5 * predict_cpu_seconds(
        expected
    )
    more = make_method("merf", {"steps": 6000})
    assert predict(more, DIGITS) > 1.5 * predict(method, DIGITS)
    assert reduce_settings(more, DIGITS, 1e9) == more


def test_a_resumed_run_keeps_the_settings_it_began_with(tmp_path, monkeypatch):
    def stop(stage, step, of, **more):
        if stage == "training the generator":
            raise KeyboardInterrupt

    how = {"settings": {"steps": 50}, "out": tmp_path / "out", "ledger": tmp_path / "ledger.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        privot.synthesize("digits", "merf", 1.0, **how, progress=stop)
    began = json.loads((tmp_path / "out.run" / "run.json").read_text())["settings"][
        "feature_batch_size"
    ]
    monkeypatch.setattr(
        "privot.synthesis.cost.SMALL_IMAGE_SECONDS", 0.1
    )  # as another device would have other defaults
    assert configure_method("merf", {"steps": 50}, DIGITS, CPU).feature_batch_size < began
    release = privot.synthesize("digits", "merf", 1.0, **how, resume=True)
    assert release.metadata["settings"]["feature_batch_size"] == began


def test_the_manifest_holds_concrete_settings(tmp_path):
    quick = {
        "images_per_class": 2,
        "num_random_nets": 4,
        "nets_per_round": 2,
        "net_width": 4,
        "steps": 4,
    }
    release = privot.synthesize(
        "digits", budget=5.0, settings=quick, ledger=tmp_path / "ledger.jsonl"
    )
    assert (
        release.metadata["settings"]["net_train_epochs"] == SMALL_IMAGE_SETTINGS["net_train_epochs"]
    )
