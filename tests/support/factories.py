"""Small releases, readings and attacks for the tests of the report, and how to read one."""

import json
import re

import numpy as np
import torch

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.measures.result import MetricResult
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release import Release
from privot.release.artifact import Artifact
from privot.report import AttackResult

GAUSSIAN = Plan(
    (Stage("means", "sum", 8.0), Stage("gradients", "sum", 20.0, 40)), Neighbours.REPLACE
)
NO_GUARANTEE = NoGuarantee("no noise was added: the budget was infinite")
CLASS_NAMES = ("cat", "dog", "ship")


def make_release(
    plan=GAUSSIAN,
    claim=None,
    shape=(1, 8, 8),
    classes=3,
    names=CLASS_NAMES,
    each=4,
    delta=1e-5,
    **facts,
):
    """A set of noise images, ``each`` of a class, with a certificate that its plan proves."""
    images = torch.rand(each * classes, *shape, generator=torch.Generator().manual_seed(0))
    product = Artifact.from_images(images, torch.arange(each * classes) % classes)
    known = {
        "method": "handmade",
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "seed": 0,
        "data": "mnist",
        **facts,
    }
    return Release(
        product,
        claim or Guarantee.from_plan(plan, delta),
        Spec(shape, classes, class_names=names),
        known,
    )


def make_metric_result(name="cnn_accuracy", value=0.9, publishable=True, **more):
    fields = {
        "standard_error": 0.003,
        "num_samples": 6000,
        "reference": "mnist/test",
        "reference_size": 10000,
        "protocol": "LeNet-5, 50 epochs",
    } | more
    return MetricResult(name=name, value=value, publishable=publishable, **fields)


def make_attack_result(
    name="nearest",
    fpr=(0.01, 0.1),
    tpr=(0.012, 0.12),
    lower=(0.001, 0.08),
    confidence=0.95,
    publishable=True,
):
    return AttackResult(name, fpr, tpr, lower, confidence, publishable)


def make_noise_dataset(seed, count=50):
    images = np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)
    return Sensitive(images, np.arange(count) % 3, Spec((1, 8, 8), 3), name="box")


def internal_folder(folder):
    """The folder of the internal face."""
    return folder.with_name(f"{folder.name}-internal")


def read_json(folder, name="report.json"):
    return json.loads((folder / name).read_text())


def read_visible_text(folder, name="report.html"):
    """What a reader sees."""
    html = re.sub(r"<(style|title)>.*?</\1>", "", (folder / name).read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", html))


def parse_data_card(source):
    """Nested ``key: JSON`` lines; anything else fails."""
    root = {}
    stack = []
    for line in source.splitlines():
        indent, key, value = re.fullmatch(r"( *)([a-z_]+):(?: (.+))?", line).groups()
        stack = [*stack[: len(indent) // 2], key]
        holder = root
        for each in stack[:-1]:
            holder = holder[each]
        holder[key] = json.loads(value) if value else {}
    return root
