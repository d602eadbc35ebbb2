"""Measures, reports and federations."""

import base64
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
from unittest import mock

import numpy as np
import torch
from golden.core import CPU, golden, numbers, numbers_in, tensors_of
from golden.inputs import coarse_accounting, digits, no_weights, normal, public_digits, rng, uniform
from golden.net_runs import make_random_lpips
from golden.privacy_runs import PLANS
from PIL import Image
from support import factories, federation
from support.factories import NO_GUARANTEE, make_attack_result, make_metric_result, make_release
from torch import nn

from privot.data.dataset import Records
from privot.data.spec import Spec
from privot.federated import Answer, Refusal, Request, pack_message, unpack_message
from privot.federated.transcript import read_transcript
from privot.measures import Samples
from privot.measures.adaboost import HistogramAdaBoost
from privot.measures.evaluator import Evaluator, measure
from privot.measures.feature_extractors import FeatureExtractor
from privot.measures.fid_kid import frechet_distance, kernel_distance
from privot.measures.precision_recall import precision_recall
from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.training import Recipe
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.report import OwnerInputs, write_report
from privot.report.comparison import compare
from privot.report.statement import build_statement, format_guarantee

# Functions of the package have the names of some of these modules.
classical = importlib.import_module("privot.measures.classical")
downstream = importlib.import_module("privot.measures.downstream")
inception_score = importlib.import_module("privot.measures.inception_score")
reference = importlib.import_module("privot.measures.reference")
report_context = importlib.import_module("privot.report.context")
similarity = importlib.import_module("privot.measures.image_similarity")


def list_readings(results):
    """Numbers of readings, without the seconds."""
    names = ("value", "standard_error", "num_samples", "reference_size", "publishable")
    return [[getattr(result, name) for name in names] for result in results]


def make_samples(count=60, soft=False):
    images, labels = digits(count)
    more = {"soft_labels": nn.functional.one_hot(labels, 10).float() * 0.9 + 0.01} if soft else {}
    images = (images + 0.1 * normal(*images.shape)).clamp(0, 1)
    return Samples("some", images, labels, 10, publishable=True, **more)


def shorten_training():
    """One epoch for each network that measures."""
    short = {}
    for name, (build, recipe) in downstream.DOWNSTREAM_NETWORKS.items():
        repeats = min(2, recipe.num_repeats)
        recipe = dataclasses.replace(recipe, epochs=1, lr_milestones=(), num_repeats=repeats)
        short[name] = (build, recipe)
    return mock.patch.dict(downstream.DOWNSTREAM_NETWORKS, short)


@golden("measure/classical", classical.CLASSICAL_CLASSIFIERS)
def run_classical(name, folder):
    records = Records(*digits(60))
    return {"guesses": classical.fit_predict(name, records, digits(100, 60)[0], 10, 3)}


@golden("measure/network", downstream.DOWNSTREAM_NETWORKS)
def run_network(name, folder):
    with shorten_training():
        given = (public_digits(50, 60), [name])
        subjects = [make_samples(20, soft) for soft in (False, True)]
        results = [measure(subject, *given, runtime=CPU, seed=2) for subject in subjects]
    return {"readings": list(map(list_readings, results))}


@golden("measure/thirteen")
def run_thirteen_classifiers(folder):
    """The mean over the classifiers, and the one beside real data."""
    few = {"linear_svc": {"max_iter": 20}, "mlp": {"max_iter": 5}, "gbm": {"n_estimators": 3}}
    builders = dict(classical.CLASSICAL_CLASSIFIERS)

    def build_short(seed, name):
        return builders[name](seed).set_params(**few[name])

    quick = {name: functools.partial(build_short, name=name) for name in few}
    with shorten_training(), mock.patch.dict(classical.CLASSICAL_CLASSIFIERS, quick):
        given = (public_digits(100, 60), ["gs_wgan"])
        ceiling = measure(make_samples(40), *given, runtime=CPU)
        more = {"real_data_results": ceiling, "runtime": CPU, "seed": 1}
        results = measure(make_samples(30), *given, **more)
    return {"ceiling": list_readings(ceiling), "readings": list_readings(results)}


@golden("measure/suite")
def run_suite(folder):
    """All that compares images, by a stand-in for the network of FID and by a small network."""

    def features(images, progress):
        return images.flatten(1)[:, 20:28]

    def classify(images, progress):
        return features(images, progress).softmax(1)

    extractor = FeatureExtractor("", "eight pixels", True, features, classify)
    names = ["fid", "kid", "precision", "domain", "is", "imagenet_is", "sliced", "exact"]
    small = functools.partial(ConvNet, width=4, depth=1)
    patches = [
        no_weights(),
        mock.patch.object(reference, "load_inception_extractor", return_value=extractor),
        mock.patch.object(inception_score, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.01)),
        mock.patch.object(inception_score, "VGG11", small),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        data = (public_digits(90, 60), public_digits(80, 150))
        results = Evaluator(*data, runtime=CPU, seed=1).measure(make_samples(50), names)
    return {"readings": list_readings(results)}


@golden("measure/distances")
def run_distances(folder):
    real = normal(60, 5, seed=1)
    fake = 1.2 * normal(50, 5, seed=2) + 0.3
    probabilities = normal(60, 4, seed=5).softmax(1)
    yield "frechet", list(frechet_distance(real, fake, rng(1)))
    yield "kernel", list(kernel_distance(real, fake, rng(2), num_subsets=10, subset_size=20))
    yield "quality", [list(precision_recall(real, fake, k)) for k in (1, 3)]
    yield "sliced", [list(sliced_wasserstein(real, fake, 20, rng(3), p)) for p in (1, 2)]
    yield "exact", list(exact_wasserstein(real, fake))
    yield "score", list(inception_score.inception_score(probabilities, rng(4)))


@golden("measure/similarity")
def run_similarity(folder):
    images, _ = digits(4)
    pair = images, (images + 0.2 * normal(*images.shape)).clamp(0, 1)
    wide = uniform(2, 3, 20, 17), uniform(2, 3, 20, 17, seed=1)
    functions = (similarity.mse, similarity.l2, similarity.psnr, similarity.ssim)
    yield "plain", [function(*given) for function in functions for given in (pair, wide)]
    with mock.patch.object(similarity, "load_lpips_network", make_random_lpips):
        yield "lpips", similarity.lpips(*pair)


@golden("measure/boosting")
def run_boosting(folder):
    images, labels = digits(40)
    model = HistogramAdaBoost(15).fit(images.flatten(1).numpy(), labels.numpy())
    yield "stumps", [list(stump) for stump in model.stumps_]
    yield "guesses", model.predict(images.flatten(1).numpy())


# Reports


def read_page(path):
    """Images and curves in a page; its words are left out."""
    html = path.read_text()
    encoded = [base64.b64decode(text) for text in re.findall(r"base64,([\w+/=]+)", html)]
    images = [np.asarray(Image.open(io.BytesIO(data))) for data in encoded]
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    drawn = [re.findall(r' (?:d|cx|cy|r|x1|x2|y1|y2)="([^"]*)"', chart) for chart in charts]
    return [images, [[parse_numbers(path) for path in chart] for chart in drawn]]


def parse_numbers(text):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def read_numbers(path):
    return numbers(json.loads(path.read_text()))


@golden("report")
def run_report(folder):
    # The number of the format of releases stands in a report; it is no result.
    patch = mock.patch.object(report_context, "RELEASE_FORMAT", 1)
    with coarse_accounting(), no_weights(), patch:
        ledger = Ledger(folder / "ledger.jsonl")
        ledger.set_limit(Budget(20.0))
        ledger.reserve(PLANS["gaussian"], "some")
        releases = {
            "proved": make_release(),
            "none": make_release(claim=NO_GUARANTEE),
            "sampled": make_release(PLANS["poisson"], each=2),
        }
        for name, release in releases.items():
            fid = make_metric_result("fid", 30.0, better="lower")
            score = make_metric_result("is", 8.0, publishable=False)
            more = {
                "results": [make_metric_result(), fid, score],
                "attacks": [make_attack_result(), make_attack_result("other", publishable=False)],
                "owner_inputs": OwnerInputs(factories.make_noise_dataset(1), ledger),
            }
            out = folder / name
            report = write_report(release, out, name=name, **more)
            yield name, read_numbers(out / "report.json")
            yield f"{name} page", read_page(out / "report.html")
            inside = factories.internal_folder(out)
            yield f"{name} inside", read_numbers(inside / "internal.json")
            yield f"{name} owner's page", read_page(inside / "internal.html")
            facts = [len(report.paths), report.guarantee_refuted, report.num_left_out]
            yield f"{name} written", facts
        attacks = [make_attack_result(tpr=(0.9, 0.95), lower=(0.8, 0.9))]
        above = write_report(make_release(), folder / "above", name="above", attacks=attacks)
        report = read_numbers(folder / "above" / "report.json")
        yield "above", [above.guarantee_refuted, report]


@golden("report/compare")
def run_comparison(folder):
    fid = make_metric_result("fid", 20.0, better="lower")
    kid = make_metric_result("kid", 0.1, num_samples=5)
    two = Samples.from_release(make_release(claim=NO_GUARANTEE), "two", 7, seed=1)
    three = Samples("three", uniform(9, 1, 8, 8), torch.arange(9) % 3, 3)
    subjects = [
        (
            Samples.from_release(make_release(), "one", 12),
            [make_metric_result(), fid],
        ),
        (two, [make_metric_result(value=0.95), kid]),
        (three, [make_metric_result(value=0.5, publishable=False)]),
    ]
    page = compare(subjects, folder / "out")
    return {"numbers": read_numbers(page.with_name("comparison.json")), "page": read_page(page)}


@golden("report/statement")
def run_statement(folder):
    """The numbers in the words of the promise."""
    spec = Spec((1, 8, 8), 3, 60, (20, 20, 20))
    for name in ("gaussian", "client", "laplace", "response"):
        guarantee = Guarantee.from_plan(PLANS[name], 1e-6)
        promise = " ".join(build_statement(guarantee, spec)["promise"])
        yield name, [sorted(numbers_in(promise)), numbers_in(format_guarantee(guarantee))]


# Federations


@golden("federated/run")
def run_federation(folder):
    """Three owners and a server in one process: what is sent, released and charged."""
    agreed = federation.terms(rounds=2)
    clients = federation.wards(folder)
    server = federation.serving(agreed, clients, transcript_path=folder / "wire")
    release = federation.play(server, clients)
    messages = [unpack_message(entry.message) for entry in read_transcript(folder / "wire")]
    yield "tensors", tensors_of(release)
    yield "samples", release.sample(10)
    yield "guarantee", numbers(release.guarantee)
    yield "requests", [sent.images for sent in messages if isinstance(sent, Request)]
    yield "answers", [sent.gradients for sent in messages if isinstance(sent, Answer)]
    yield "charges", [numbers(client.ledger.entries()) for client in clients.values()]
    yield "spent", [client.spent() for client in clients.values()]
    yield "plan", [[stage.noise_multiplier, stage.steps] for stage in agreed.plan().stages]


@golden("federated/dropout")
def run_dropout(folder):
    """Rounds ask two owners of three, and one of them never answers."""
    agreed = federation.terms(rounds=4, clients_per_round=2)
    clients = federation.wards(folder)
    server = federation.serving(agreed, clients)
    federation.consent(server, clients)
    counts = []
    while not server.is_finished:
        requests = server.pack_requests()
        counts.append(len(requests))
        for name, request in requests.items():
            if name != "ward 1":
                server.receive(name, clients[name].reply(request))
        server.end_round()
    release = server.build_release()
    return {"asked": counts, "tensors": tensors_of(release), "samples": release.sample(10)}


@golden("federated/messages")
def run_messages(folder):
    """The tensors in packed messages to the byte, and whether each comes back as it was."""
    run = federation.RUN
    agreed = federation.terms()
    request = Request(run, 3, federation.images(agreed))
    messages = [agreed, request, federation.plausible(agreed, 2), Refusal(run, -1, "no")]
    packed = [pack_message(message) for message in messages]
    yield "bodies", [raw[8 + int.from_bytes(raw[:8], "little") :] for raw in packed]
    yield "again", [pack_message(unpack_message(raw)) == raw for raw in packed]
    read = unpack_message(packed[0])
    counts = [*read.shape, read.num_classes, read.num_clients]
    yield "terms", [*counts, *numbers(read.settings)]
    yield "answer", unpack_message(packed[2]).gradients
