r"""One audit for all methods: the best test there is of which of two neighbouring data sets lies behind all that a run was answered.

The adversary sees every answer y of the gate, before anything is made of it. It knows all other records, which of them were drawn, and the
public half of the run, so it knows three true values: of the answer without the canary, with it, and where the canary was not drawn (which
is so with probability 1 - q). By Neyman and Pearson no test does better than the logarithm of the likelihood ratio, summed over answers:

.. math:: \sum \log\frac{(1-q)\,N(y; f_{out}) + q\,N(y; f_{with})}{(1-q)\,N(y; f_{out}) + q\,N(y; f_{without})}

To know the true values, shadows of the gate are asked whatever the gate is asked, on data sets of their own and with the same draws.
"""

import contextlib
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from support.fakes import FreePlan, NullLedger
from support.tiny_settings import SHAPE, choose_tiny_settings

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.methods import make_method
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours
from privot.privacy.sampling import Full, Poisson, Shards
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis.preflight import resolve_plan

CPU = Runtime("cpu", 8)
CLASSES = 2
OWNERS = 4
DELTA = 1e-5
OPERATIONS = (
    "sum",
    "rows",
    "query_sample",
    "sorted_blocks",
    "split_into_shards",
    "update_shards",
    "query_random_shards",
    "query_clients",
    "sum_over_shards",
)
ALSO = {  # beyond the settings of `quick`: few answers, so that a run is cheap; draws that a canary is in at least once; loud critics
    "dp-gan": {"sample_rate": 0.95, "steps": 2},
    "dp-sinkhorn": {"sample_rate": 0.95, "steps": 2},
    "gs-wgan": {
        "num_critics": 2,
        "steps": 2,
        "batch_size": 6,
        "warmup_rounds": 0,
        "critic_batch_size": 4,
        "critic_learning_rate": 0.3,
        "normalize_gradients": True,
    },
    "g-pate": {
        "num_critics": 2,
        "steps": 2,
        "warmup_rounds": 0,
        "critic_batch_size": 4,
        "critic_learning_rate": 0.3,
    },
    "private-set": {
        "num_random_nets": 2,
        "images_per_class": 1,
        "net_width": 2,
        "nets_per_round": 1,
        "steps": 1,
    },
    "federated-average-gan": {"rounds": 2, "generator_steps": 1, "clip_norm": 0.01},
    "federated-gs-wgan": {
        "pretrain_steps": 1,
        "rounds": 2,
        "batch_per_class": 1,
        "warmup_rounds": 0,
    },
    "merf": {"steps": 2},
    "merf-ae": {"sample_rate": 0.95},
    "sliced-flow": {"steps": 1},
}


def method_for(name, **more):
    """The method with settings so small that a run takes milliseconds; the budget fixes its noise."""
    settings = {
        key: value
        for key, value in (choose_tiny_settings(name) | ALSO.get(name, {})).items()
        if key != "noise_multiplier"
    }
    return make_method(name, settings | more)


def pair(method):
    """The worst neighbours that we know of: eight records, black and white by turns, and a white one more or in the place of a black one.

    As (spec, box without, box with). Of owners, the first has all black or all white records.
    """
    images = np.stack([np.full(SHAPE, turn // 2 % 2, np.float32) for turn in range(8)])
    labels = np.arange(8) % CLASSES
    owners = None
    for spec in (
        Spec(SHAPE, CLASSES),
        Spec(SHAPE, CLASSES, 8, (4, 4)),
        Spec(SHAPE, CLASSES, num_clients=OWNERS),
    ):
        with contextlib.suppress(PrivotError):
            plan = method.plan(spec)
            if all(stage.operation != "sorted_blocks" or spec.size for stage in plan.stages):
                break
    there = images.copy()
    marks = labels.copy()
    if plan.neighbours is Neighbours.ADD_REMOVE:
        there = np.concatenate([images, np.ones((1, *SHAPE), np.float32)])
        marks = np.append(labels, 1)
    elif plan.neighbours is Neighbours.CLIENT:
        owners = np.arange(8) % OWNERS
        images[owners == 0] = 0
        there[owners == 0] = 1
    else:
        there[0] = 1
    boxes = [
        Sensitive(*each, replace(spec, size=None, class_sizes=None), client_ids=owners)
        for each in ((images, labels), (there, marks))
    ]
    for box in boxes:
        box.spec = spec  # a size that is declared under add-remove neighbours is one that both data sets may have been taken for
    return spec, *boxes


class Enough(Exception):
    """The last answer was given; what is made of it cannot tell more."""


class Spied:
    """A gate whose every question is put to its shadows as well; ``score`` is what the adversary makes of the answers so far."""

    def __init__(self, gate, shadows):
        self._gate = gate
        self._shadows = shadows
        self.score = 0.0

    def __getattr__(self, name):
        found = getattr(self._gate, name)
        return (
            found if name not in OPERATIONS else lambda *given, **how: self._asked(name, given, how)
        )

    def _asked(self, verb, given, how):
        real = self._gate._rng
        real.noised = None
        value = getattr(self._gate, verb)(*given, **how)
        for shadow in self._shadows.values():
            shadow._rng.told = real
            getattr(shadow, verb)(*given, **how)
        if real.noised is not None:
            self._weigh(verb, given[0], *real.noised)
            if not any(self._gate.count_remaining_queries(each) for each in self._gate._stages):
                raise Enough
        return value

    def _weigh(self, verb, name, seen, noise_std):
        sampling = self._gate._stages[name].sampling
        share = (
            sampling.sample_rate
            if isinstance(sampling, Poisson)
            else 1 / sampling.num_shards
            if isinstance(sampling, Shards)
            else 1.0
        )
        rows = (
            seen.flatten(0, -1)[None] if verb != "query_random_shards" else seen.flatten(1)
        )  # each row of these has a draw of its own
        far = {
            key: -(rows - shadow._rng.true.view_as(rows)).square().sum(1) / (2 * noise_std**2)
            for key, shadow in self._shadows.items()
        }
        out = (
            far["out"] + math.log(1 - share)
            if share < 1
            else torch.full_like(far["with"], -math.inf)
        )
        told = [torch.logaddexp(out, far[each] + math.log(share)) for each in ("with", "without")]
        self.score += float((told[0] - told[1]).sum())


class Told:
    """The secret of a shadow: it draws what ``told`` has drawn, but for the canary, and adds no noise."""

    def __init__(self, role):
        self.role = role
        self.told = None
        self.true = None


def _noisy(share):
    real = secret_side_module.add_noise

    def noisy(steps, noise_std, grid, secret):
        if isinstance(secret, Told):
            secret.true = steps * grid
            return secret.true
        value = real(steps, noise_std * share, grid, secret)
        secret.noised = value, noise_std * max(share, 1e-3)  # whoever knows of a bug uses it
        return value

    return noisy


def _poisson(draw):
    def drawn(self, count, secret):
        if not isinstance(secret, Told):
            secret.drawn = draw(self, count, secret)
            return secret.drawn
        others = secret.told.drawn[secret.told.drawn < 8]  # the canary is the ninth
        return torch.cat([others, torch.tensor([8])]) if secret.role == "with" else others

    return drawn


def _shards(draw):
    def drawn(self, count, secret):
        if not isinstance(secret, Told):
            secret.drawn = draw(self, count, secret)
            return secret.drawn
        if secret.role != "out":
            return torch.zeros(count, dtype=torch.int64)  # the canary's own
        other = 1 + torch.randint(
            self.num_shards - 1, (count,)
        )  # what would have been drawn in its place
        return torch.where(secret.told.drawn == 0, other, secret.told.drawn)

    return drawn


@contextlib.contextmanager
def spying(share=1.0):
    """While true values are overheard; ``share`` of the noise is really added."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(secret_side_module, "add_noise", _noisy(share)))
        # The adversary knows the secret order, too: that of the arrays.
        stack.enter_context(
            mock.patch.object(
                Gate, "_get_secret_order", lambda gate: torch.arange(gate._dataset._count_records())
            )
        )
        stack.enter_context(mock.patch.object(Poisson, "draw", _poisson(Poisson.draw)))
        stack.enter_context(mock.patch.object(Shards, "draw", _shards(Shards.draw)))
        yield


def claimed(name, epsilon=4.0):
    """(method, its plan for this budget, the two boxes); without a budget the noise is 2, and no price need be computed."""
    method = method_for(name, **({"noise_multiplier": 2.0} if epsilon is None else {}))
    spec, *boxes = pair(method)
    return (
        method,
        method.plan(spec)
        if epsilon is None
        else resolve_plan(spec, method, Budget(epsilon, DELTA))[0],
        boxes,
    )


def score(method, plan, boxes, there):
    """Of one run in the world with the canary, or in the one without."""
    unpriced = FreePlan(plan.stages, plan.neighbours)

    def opened(box):
        return Gate(box, unpriced, NullLedger(), NullLedger(), runtime=CPU)

    sampled = any(not isinstance(stage.sampling, Full) for stage in plan.stages)
    shadows = {
        role: opened(boxes[role == "with"]) for role in ("without", "with", *["out"] * sampled)
    }
    for role, shadow in shadows.items():
        shadow._rng = Told(role)
    spied = Spied(opened(boxes[there]), shadows)
    with contextlib.suppress(Enough):
        method.fit(spied, Streams(0, CPU), ignore_progress)
    assert all(spied._gate.count_remaining_queries(each) == 0 for each in spied._gate._stages), (
        "a run of the plan asked less than it was planned for"
    )
    return spied.score


def scores(name, runs, share=1.0, epsilon=4.0):
    """Of so many runs a side: (with the canary, without it), and the plan."""
    method, plan, boxes = claimed(name, epsilon)
    with spying(share):
        found = [
            np.array([score(method, plan, boxes, there) for _ in range(runs)])
            for there in (True, False)
        ]
    return *found, plan
