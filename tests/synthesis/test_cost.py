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
UNDECLARED = dataclasses.replace(MNIST, size=None, class_sizes=None)
SLOW_FORECASTS = ("gs-wgan", "g-pate", "federated-gs-wgan", "federated-average-gan")
SHARDED = ("gs-wgan", "g-pate")
every_method = pytest.mark.parametrize("name", list_methods())
every_method_and_dataset = pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(
            name,
            spec,
            marks=pytest.mark.slow if name in SLOW_FORECASTS and spec is not DIGITS else (),
            id=f"{name}-{spec.shape[-1]}",
        )
        for name in list_methods()
        for spec in (DIGITS, MNIST, CIFAR)
    ],
)


def declare(name, spec):
    """The same data as a method needs it declared: with clients, or with class sizes."""
    if name.startswith("federated"):
        return dataclasses.replace(spec, num_clients=20, class_sizes=None)
    return spec


def predict(method, spec):
    return predict_cpu_seconds(method.forecast(spec, method.plan(spec)))


def settings_of(method):
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


def get_published(name, key):
    return getattr(make_method(name), key) or LARGE_IMAGE_SETTINGS[key]


@every_method
def test_defaults_on_a_gpu_are_the_published_ones(name):
    by_side = LARGE_IMAGE_SETTINGS if name == "private-set" else {}  # automatic, by image side
    for spec in (MNIST, CIFAR):
        fitted = settings_of(configure_method(name, {}, declare(name, spec), CUDA))
        assert fitted == {**settings_of(make_method(name)), **by_side}


@every_method_and_dataset
def test_defaults_on_a_cpu_fit_the_data(name, spec):
    method = configure_method(name, {}, declare(name, spec), CPU)
    seconds = predict(method, declare(name, spec))
    assert seconds is not None
    assert seconds <= (60.0 if spec is DIGITS else LARGE_IMAGE_SECONDS)
    for key, least in method.cpu_minimums.items():
        published = get_published(name, key)
        is_by_size = name in SHARDED and key == "num_critics"
        assert is_by_size or min(least, published) <= getattr(method, key) <= published


@every_method
def test_a_given_setting_is_kept(name, monkeypatch):
    """Though every other one is reduced to its least value."""
    minimums = list_methods()[name].cpu_minimums

    def predict_too_long(method, *_):
        return 1e9 * sum(getattr(method, key) for key in minimums)

    monkeypatch.setattr("privot.synthesis.cost._predict_seconds", predict_too_long)
    for key in minimums:
        value = get_published(name, key)
        method = configure_method(name, {key: str(value)}, declare(name, DIGITS), CPU)
        assert getattr(method, key) == value
        for other, least in minimums.items():
            assert other == key or getattr(method, other) <= least


def test_all_settings_of_a_method_given_as_such_are_kept():
    assert configure_method(make_method("merf"), None, DIGITS, CPU) == make_method("merf")
    given = make_method("private-set", {"net_width": 64})
    fitted = settings_of(configure_method(given, None, DIGITS, CUDA))
    assert fitted == {**settings_of(given), **SMALL_IMAGE_SETTINGS, "net_width": 64}
    with pytest.raises(SettingError, match="no setting"):
        configure_method("merf", {"stepz": 3}, UNDECLARED, CPU)


@pytest.mark.parametrize("name", SHARDED)
def test_critics_have_records_enough(name):
    for device in (CPU, CUDA):
        method = configure_method(name, {}, DIGITS, device)
        assert method.forecast(DIGITS, method.plan(DIGITS))["records_per_critic"] >= 50
    assert configure_method(name, {}, UNDECLARED, CUDA).num_critics == 1000


def test_what_is_reduced_has_a_part_in_the_run_and_the_last_economies_come_last():
    published = make_method("private-set")
    grey = configure_method("private-set", {}, MNIST, CPU)  # its budget has no share for scenes
    assert grey.num_pretrained_nets == published.num_pretrained_nets
    assert grey.pretrain_epochs == published.pretrain_epochs
    shares = {"budget_shares": "0.05,0,0.35,0.6"}
    colour = configure_method("private-set", shares, CIFAR, CPU)
    assert colour.pretrain_epochs < grey.pretrain_epochs
    assert configure_method("private-set", {}, CIFAR, CPU).budget_shares[2] == 0
    assert configure_method("private-set", {"net_width": "32"}, CIFAR, CPU).net_width == 32
    assert configure_method("private-set", {}, CIFAR, CUDA).budget_shares is None
    small = configure_method("dp-sinkhorn", {}, MNIST, CPU)
    whole = make_method("dp-sinkhorn")
    assert small.steps < whole.steps
    assert small.generator_channels == whole.generator_channels
    assert small.batch_size == whole.batch_size


def make_sharded(name, spec):
    small = name in SHARDED and spec is DIGITS
    return make_method(name, {"num_critics": 28} if small else {})


@every_method
def test_a_forecast_counts_operations_and_calls(name):
    spec = declare(name, DIGITS)
    method = make_sharded(name, DIGITS)
    forecast = method.forecast(spec, method.plan(spec))
    assert forecast["floating_point_operations"] is not None
    assert name == "real-subset" or forecast["operator_calls"] > 0
    json.dumps(forecast)


@every_method_and_dataset
def test_a_long_run_names_settings_that_take_about_ten_minutes(name, spec):
    method = make_sharded(name, spec)
    spec = declare(name, spec)
    seconds = predict(method, spec)
    if seconds > LONG_RUN_SECONDS:
        shorter = find_shorter_run(method, spec)
        again = make_method(name, {**settings_of(method), **shorter["settings"]})
        assert predict(again, spec) == pytest.approx(shorter["predicted_seconds"])
        assert shorter["predicted_seconds"] <= 1.5 * SHORTER_RUN_SECONDS < seconds
        assert shorter["accuracy"]


def test_the_warning_says_how_long_what_instead_and_what_it_costs(monkeypatch):
    monkeypatch.setattr(
        "privot.synthesis.preflight._measure_flops_per_second",
        lambda device, count=None: NOMINAL_FLOPS_PER_SECOND,
    )
    method = make_method("private-set", {**LARGE_IMAGE_SETTINGS, "noise_multiplier": 3.0})
    plan = method.plan(CIFAR)
    forecast = forecast_run(CIFAR, method, plan, CPU)
    shorter = forecast["shorter_run"]
    warnings = collect_warnings(CIFAR, plan, 1e-5, forecast)
    [warning] = [text for text in warnings if "predicted to take" in text]
    assert all(f"--set {key}={value}" in warning for key, value in shorter["settings"].items())
    assert shorter["accuracy"] in warning
    short = configure_method("merf", {"noise_multiplier": 3.0}, DIGITS, CPU)
    assert "shorter_run" not in forecast_run(DIGITS, short, short.plan(DIGITS), CPU)


def test_a_slow_machine_takes_longer_and_more_steps_do():
    method = make_method("merf")
    forecast = method.forecast(MNIST, method.plan(MNIST))
    slow = predict_cpu_seconds(forecast, NOMINAL_FLOPS_PER_SECOND / 2)
    assert slow > 1.5 * predict_cpu_seconds(forecast)
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
    settings = json.loads((tmp_path / "out.run" / "run.json").read_text())["settings"]
    size = settings["feature_batch_size"]
    # as another device would have other defaults
    monkeypatch.setattr("privot.synthesis.cost.SMALL_IMAGE_SECONDS", 0.1)
    assert configure_method("merf", {"steps": 50}, DIGITS, CPU).feature_batch_size < size
    release = privot.synthesize("digits", "merf", 1.0, **how, resume=True)
    assert release.metadata["settings"]["feature_batch_size"] == size


def test_the_manifest_holds_concrete_settings(tmp_path):
    names = ("images_per_class", "num_random_nets", "nets_per_round", "net_width", "steps")
    quick = dict(zip(names, (2, 4, 2, 4, 4), strict=True))
    how = {"settings": quick, "ledger": tmp_path / "ledger.jsonl"}
    release = privot.synthesize("digits", budget=5.0, **how)
    assert (
        release.metadata["settings"]["net_train_epochs"] == SMALL_IMAGE_SETTINGS["net_train_epochs"]
    )
