"""The thirty planted bugs: mistakes that were made in software of this kind, each put into the part that must not have it."""

from planting import Bug

GATE = "privot.privacy.gate"
NOISE = "privot.privacy.noise"
DRAWS = "privot.privacy.sampling"
PLAN = "privot.privacy.plan"
PRICES = "privot.privacy.accounting"
LEDGER = "privot.privacy.ledger"
DRAWN = "secret.normal(tuple(steps.shape), steps.device)"
POISSON = "return (secret.uniform(count) <= self.rate).nonzero().flatten()"
FIXED = "return secret.order(count)[: self.drawn].sort().values"
STD = "stage.noise * SENSITIVITY[stage.verb, self.plan.neighbours] * bound"
CLIPPED = "torch.where(norms > bound * (1 - 1e-12), bound * (1 - 1e-12) / norms, 1.0)"

LAW = "tests/privacy/test_noise.py::test_law_and_grid[3.0-0.5]"
STEPS = "tests/privacy/test_noise.py::test_no_step_goes_without_noise"
TABLE = "tests/privacy/test_noise.py::test_every_verb_gets_the_noise_of_the_table"
MOVED = "tests/privacy/test_sensitivity.py::test_no_neighbour_moves_more_than_declared"
AFRESH = "tests/privacy/test_sampling.py::test_the_gate_draws_afresh_for_every_answer"
FEW = "tests/privacy/test_sampling.py::test_law[Poisson(rate=0.03)]"
DOORS = "tests/contract/test_side_doors.py::test_honest_miniatures_pass"
GATES = "tests/privacy/test_gate.py"

BUGS = [
    Bug(
        "noise",
        "nine tenths of it",
        f"{NOISE}:noisy",
        "(noise_std / grid)",
        "(0.9 * noise_std / grid)",
        (LAW,),
    ),
    Bug(
        "noise",
        "absent at one step in fifty",
        f"{GATE}:Gate._ask",
        "noise_std, grid, self._secret)",
        "noise_std * (step % 50 != 49), grid, self._secret)",
        (STEPS,),
    ),
    Bug(
        "noise",
        "drawn once and reused",
        f"{NOISE}:noisy",
        DRAWN,
        f"secret.__dict__.setdefault(str(steps.shape), {DRAWN})",
        (STEPS,),
    ),
    Bug(
        "noise",
        "the same for all rows",
        f"{NOISE}:noisy",
        DRAWN,
        "secret.normal((*steps.shape[:-2], 1, *steps.shape[-1:])[-steps.ndim :] if steps.ndim > 1 else tuple(steps.shape))",
        (f"{TABLE}[200-1.0-rows]",),
    ),
    Bug(
        "noise",
        "float16",
        f"{NOISE}:Secret.normal",
        ".view(shape)",
        ".view(shape).half().double()",
        ("tests/privacy/test_noise.py::test_uniform_lattice_has_53_bits",),
    ),
    Bug(
        "noise",
        "seeded with 0",
        f"{NOISE}:Secret.__init__",
        "= insecure_seed, 0",
        "= insecure_seed or 0, 0",
        ("tests/privacy/test_noise.py::test_global_seeds_do_not_reach_the_noise",),
    ),
    Bug(
        "noise",
        "scaled by the batch size",
        f"{GATE}:Gate._ask",
        STD,
        f"{STD} / self._data._count()",
        (f"{TABLE}[200-1.0-answer]",),
    ),
    Bug(
        "noise",
        "scaled by the data's own norm",
        f"{GATE}:Gate._ask",
        STD,
        f"{STD} * min(1.0, float(self._data._take(slice(None)).images.flatten(1).norm(dim=1).max()) / bound)",
        (f"{TABLE}[400-0.3-answer]",),
    ),
    Bug(
        "clip",
        "off",
        f"{GATE}:_factor",
        CLIPPED,
        "torch.ones_like(norms)",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "per batch",
        f"{GATE}:_factor",
        "dim=1, dtype=torch.float64)",
        "dim=1, dtype=torch.float64).mean().expand(len(parts))",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "after the sum",
        f"{GATE}:_total",
        "_steps(parts, bound, grid).sum(0)",
        "_steps(parts.sum(0, keepdim=True), bound, grid)[0]",
        (f"{MOVED}[sum-add-remove-False]",),
    ),
    Bug(
        "clip",
        "norm over the wrong axis",
        f"{GATE}:_clip",
        "_factor(parts, bound, unit)[:, None]",
        "_factor(parts.T, bound, unit)[None]",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "NaN passes",
        f"{GATE}:_factor",
        "torch.where(norms.isfinite(), scale / unit, 0.0)",
        "scale / unit",
        (
            "tests/privacy/test_sensitivity.py::test_parts_that_are_not_finite_contribute_zero[sum-nan]",
        ),
    ),
    Bug(
        "clip",
        "zero divides",
        f"{GATE}:_factor",
        "/ norms, 1.0)",
        "/ norms, norms / norms)",
        (
            "tests/privacy/test_sensitivity.py::test_forty_kinds_of_records_keep_shape_and_finiteness[black-all]",
        ),
    ),
    Bug(
        "sensitivity",
        "C for 2C",
        f"{GATE}:SENSITIVITY",
        '("sum", REPLACE): 2.0',
        '("sum", REPLACE): 1.0',
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "sensitivity",
        "features of norm sqrt(2)",
        f"{GATE}:_factor",
        "torch.linalg.vector_norm(parts,",
        "torch.linalg.vector_norm(parts / math.sqrt(2),",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "sensitivity",
        "weights by client size",
        f"{GATE}:Gate.deal",
        "_steps(found.flatten(0, 1), bound, grid).view(found.shape)",
        "_steps(found.flatten(0, 1), bound, grid).view(found.shape) * torch.tensor([self._data._owners.tolist().count(each) / "
        "self._data._count() * len(everyone) for each in asked.tolist()]).view(-1, *(1 for _ in found.shape[1:]))",
        (
            "tests/privacy/test_owners.py::test_another_owner_s_records_and_their_number_move_nothing[learn]",
        ),
    ),
    Bug(
        "sampling",
        "shuffled epochs",
        f"{DRAWS}:Fixed.draw",
        FIXED,
        "secret.rest = rest if len(rest := getattr(secret, 'rest', ())) >= self.drawn else secret.order(count)\n"
        "    drawn, secret.rest = secret.rest[: self.drawn], secret.rest[self.drawn :]\n    return drawn.sort().values",
        (f"{AFRESH}[Fixed(drawn=3, size=8)]",),
    ),
    Bug(
        "sampling",
        "fixed size for Poisson",
        f"{DRAWS}:Poisson.draw",
        POISSON,
        "return secret.order(count)[: round(self.rate * count)].sort().values",
        (f"{AFRESH}[Poisson(rate=0.25)]",),
    ),
    Bug(
        "sampling",
        "the first epoch cycled for ever",
        f"{DRAWS}:Fixed.draw",
        FIXED,
        "secret.first = getattr(secret, 'first', None) if hasattr(secret, 'first') else secret.order(count)\n"
        "    secret.first = secret.first.roll(self.drawn)\n    return secret.first[: self.drawn].sort().values",
        (f"{AFRESH}[Fixed(drawn=3, size=8)]",),
    ),
    Bug(
        "sampling",
        "the rate from the true count",
        f"{DRAWS}:Poisson.draw",
        "self.rate)",
        "max(1, round(self.rate * count)) / max(count, 1))",
        (FEW,),
    ),
    Bug(
        "sampling",
        "an empty batch skipped",
        f"{DRAWS}:Poisson.draw",
        POISSON,
        "drawn = (secret.uniform(count) <= self.rate).nonzero().flatten()\n    return drawn if len(drawn) else self.draw(count, secret)",
        (f"{AFRESH}[Poisson(rate=0.25)]",),
    ),
    Bug(
        "accounting",
        "rows of a shared draw counted as independent",
        f"{GATE}:Gate.route",
        "stage.sampling.draw(rows, self._secret)",
        "stage.sampling.draw(1, self._secret).expand(rows)",
        ("tests/privacy/test_sampling.py::test_the_gate_draws_a_shard_for_every_row[False]",),
    ),
    Bug(
        "accounting",
        "steps off by one",
        f"{PLAN}:Stage.event",
        "dpa.SelfComposedDpEvent(one, self.steps)",
        "dpa.SelfComposedDpEvent(one, self.steps - 1)",
        ("tests/privacy/test_plan.py::test_event_says_what_will_run",),
    ),
    Bug(
        "accounting",
        "delta not split",
        f"{PRICES}:cost",
        "total.get_epsilon_for_delta(target - slack)",
        "total.get_epsilon_for_delta(target)",
        ("tests/privacy/test_accounting.py::test_delta_and_epsilon_allow_for_the_same_rounding",),
    ),
    Bug(
        "accounting",
        "the classical formula at epsilon 10",
        f"{PRICES}:_gaussian",
        "float(_gaussian_epsilon(1 / mu, target))",
        "mu * math.sqrt(2 * math.log(1.25 / target))",
        ("tests/privacy/test_accounting.py::test_the_classical_formula_is_not_used",),
    ),
    Bug(
        "accounting",
        "a second run not charged",
        f"{LEDGER}:Ledger.spent",
        'if each["kind"] == "reserve"]',
        'if each["kind"] == "reserve"][-1:]',
        (f"{GATES}::test_two_gates_pay_twice",),
    ),
    Bug(
        "accounting",
        "resume forgets what was asked",
        f"{GATE}:Gate.__init__",
        "ledger.taken(ticket, name)",
        "0",
        (f"{GATES}::test_a_long_stage_keeps_nothing_and_goes_on_after_its_marks",),
    ),
    Bug(
        "side door",
        "label histogram",
        f"{GATE}:Gate.sum",
        "return self._ask(stage, bound, total)",
        "return self._ask(stage, bound, total) * self._data._take(slice(None)).labels.bincount(minlength=self.spec.classes)[:, None]",
        (f"{DOORS}[Means]",),
    ),
    Bug(
        "side door",
        "early stop on a private loss",
        f"{GATE}:Gate._ask",
        "step + count)",
        "step + count) if float(self._data._take(slice(None)).images.square().mean()) < 0.2 else stage.steps",
        (f"{DOORS}[Descent]",),
    ),
]
