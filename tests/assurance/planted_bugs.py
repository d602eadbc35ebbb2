"""The thirty planted bugs: mistakes that were made in software of this kind, each put into the part that must not have it."""

from assurance.mutate import Bug

GATE = "privot.privacy.gate"
SECRET_SIDE = "privot.privacy.secret_side"
QUERIES = "privot.privacy.answers"
SHARDS = "privot.privacy.shard_queries"
CLIPPING = "privot.privacy.clipping"
SENSITIVITY = "privot.privacy.sensitivity"
NOISE = "privot.privacy.noise"
SAMPLING = "privot.privacy.sampling"
PLAN = "privot.privacy.plan"
ACCOUNTING = "privot.privacy.accounting"
GAUSSIAN = "privot.privacy.subsampled_gaussian"
LEDGER = "privot.privacy.ledger"
DRAWN = "rng.normal(tuple(total.shape), total.device)"
POISSON = "return (rng.uniform(count) <= self.sample_rate).nonzero().flatten()"
FIXED = "return rng.permutation(count)[: self.sample_size].sort().values"
CLIPPED = "torch.where(norms > max_norm, max_norm / norms, 1.0)"
STD = "            * clip_norm\n"
ALL = "self._dataset._read_records(slice(None))"

LAW = "tests/privacy/test_noise.py::test_law_and_grid[3.0-0.5]"
STEPS = "tests/privacy/test_noise.py::test_no_step_goes_without_noise"
TABLE = "tests/privacy/test_noise.py::test_every_verb_gets_the_noise_of_the_table"
MOVED = "tests/privacy/test_sensitivity.py::test_no_neighbour_moves_more_than_declared"
AFRESH = "tests/privacy/test_sampling.py::test_the_gate_draws_afresh_for_every_answer"
FEW = "tests/privacy/test_sampling.py::test_law[Poisson(sample_rate=0.03)]"
DOORS = "tests/testing/test_neighbours.py::test_honest_miniatures_make_a_release_and_leak_nothing"
GATES = "tests/privacy/test_gate.py"

BUGS = [
    Bug(
        "noise",
        "nine tenths of it",
        f"{NOISE}:add_noise",
        "(noise_std / grid)",
        "(0.9 * noise_std / grid)",
        (LAW,),
    ),
    Bug(
        "noise",
        "absent at one step in fifty",
        f"{SECRET_SIDE}:SecretSide._run_query",
        "noise_std, grid, self._rng)",
        "noise_std * (step % 50 != 49), grid, self._rng)",
        (STEPS,),
    ),
    Bug(
        "noise",
        "drawn once and reused",
        f"{NOISE}:add_noise",
        DRAWN,
        f"rng.__dict__.setdefault(str(total.shape), {DRAWN})",
        (STEPS,),
    ),
    Bug(
        "noise",
        "the same for all rows",
        f"{NOISE}:add_noise",
        DRAWN,
        "rng.normal((*total.shape[:-2], 1, *total.shape[-1:])[-total.ndim :] if total.ndim > 1 else tuple(total.shape))",
        (f"{TABLE}[200-1.0-rows]",),
    ),
    Bug(
        "noise",
        "float16",
        f"{NOISE}:SecretRandom.normal",
        ".view(shape)",
        ".view(shape).half().double()",
        ("tests/privacy/test_noise.py::test_uniform_lattice_has_53_bits",),
    ),
    Bug(
        "noise",
        "seeded with 0",
        f"{NOISE}:SecretRandom.__init__",
        "self._seed = insecure_seed",
        "self._seed = insecure_seed or 0",
        ("tests/privacy/test_noise.py::test_global_seeds_do_not_reach_the_noise",),
    ),
    Bug(
        "noise",
        "scaled by the batch size",
        f"{SECRET_SIDE}:SecretSide._run_query",
        STD,
        f"{STD[:-1]} / self._dataset._count_records()\n",
        (f"{TABLE}[200-1.0-query_sample]",),
    ),
    Bug(
        "noise",
        "scaled by the data's own norm",
        f"{SECRET_SIDE}:SecretSide._run_query",
        STD,
        f"{STD[:-1]} * min(1.0, float({ALL}.images.flatten(1).norm(dim=1).max()) / clip_norm)\n",
        (f"{TABLE}[400-0.3-query_sample]",),
    ),
    Bug(
        "clip",
        "off",
        f"{CLIPPING}:compute_clip_factors",
        CLIPPED,
        "torch.ones_like(norms)",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "per batch",
        f"{CLIPPING}:compute_clip_factors",
        "dim=1, dtype=torch.float64)",
        "dim=1, dtype=torch.float64).mean().expand(len(rows))",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "after the sum",
        f"{CLIPPING}:sum_clipped_rows",
        "clip_to_grid(rows, clip_norm, grid).sum(0)",
        "clip_to_grid(rows.sum(0, keepdim=True), clip_norm, grid)[0]",
        (f"{MOVED}[sum-add-remove-False]",),
    ),
    Bug(
        "clip",
        "norm over the wrong axis",
        f"{CLIPPING}:clip_rows",
        "compute_clip_factors(rows, clip_norm, unit)[:, None]",
        "compute_clip_factors(rows.T, clip_norm, unit)[None]",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "clip",
        "NaN passes",
        f"{CLIPPING}:compute_clip_factors",
        "torch.where(norms.isfinite(), scale / unit, 0.0)",
        "scale / unit",
        (
            "tests/privacy/test_sensitivity.py::test_parts_that_are_not_finite_contribute_zero[sum-nan]",
        ),
    ),
    Bug(
        "clip",
        "zero divides",
        f"{CLIPPING}:compute_clip_factors",
        "/ norms, 1.0)",
        "/ norms, norms / norms)",
        (
            "tests/privacy/test_sensitivity.py::test_forty_kinds_of_records_keep_shape_and_finiteness[black-all]",
        ),
    ),
    Bug(
        "sensitivity",
        "C for 2C",
        f"{SENSITIVITY}:SENSITIVITY",
        '("sum", REPLACE): 2.0',
        '("sum", REPLACE): 1.0',
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "sensitivity",
        "features of norm sqrt(2)",
        f"{CLIPPING}:compute_clip_factors",
        "torch.linalg.vector_norm(rows,",
        "torch.linalg.vector_norm(rows / math.sqrt(2),",
        (f"{MOVED}[sum-replace-False]",),
    ),
    Bug(
        "sensitivity",
        "weights by client size",
        f"{SHARDS}:ShardQueries.query_clients",
        "clipping.clip_to_grid(values.flatten(0, 1), clip_norm, grid).view(values.shape)",
        "clipping.clip_to_grid(values.flatten(0, 1), clip_norm, grid).view(values.shape) * torch.tensor([self._dataset._client_ids.tolist().count(client) / "
        "self._dataset._count_records() * num_clients for client in queried.tolist()]).view(-1, *(1 for _ in values.shape[1:]))",
        (
            "tests/privacy/test_owners.py::test_another_owner_s_records_and_their_number_move_nothing[learn]",
        ),
    ),
    Bug(
        "sampling",
        "shuffled epochs",
        f"{SAMPLING}:Fixed.draw",
        FIXED,
        "rng.rest = rest if len(rest := getattr(rng, 'rest', ())) >= self.sample_size else rng.permutation(count)\n"
        "    drawn, rng.rest = rng.rest[: self.sample_size], rng.rest[self.sample_size :]\n    return drawn.sort().values",
        (f"{AFRESH}[Fixed(sample_size=3, dataset_size=8)]",),
    ),
    Bug(
        "sampling",
        "fixed size for Poisson",
        f"{SAMPLING}:Poisson.draw",
        POISSON,
        "return rng.permutation(count)[: round(self.sample_rate * count)].sort().values",
        (f"{AFRESH}[Poisson(sample_rate=0.25)]",),
    ),
    Bug(
        "sampling",
        "the first epoch cycled for ever",
        f"{SAMPLING}:Fixed.draw",
        FIXED,
        "rng.first = rng.first if hasattr(rng, 'first') else rng.permutation(count)\n"
        "    rng.first = rng.first.roll(self.sample_size)\n    return rng.first[: self.sample_size].sort().values",
        (f"{AFRESH}[Fixed(sample_size=3, dataset_size=8)]",),
    ),
    Bug(
        "sampling",
        "the rate from the true count",
        f"{SAMPLING}:Poisson.draw",
        "self.sample_rate)",
        "max(1, round(self.sample_rate * count)) / max(count, 1))",
        (FEW,),
    ),
    Bug(
        "sampling",
        "an empty batch skipped",
        f"{SAMPLING}:Poisson.draw",
        POISSON,
        "drawn = (rng.uniform(count) <= self.sample_rate).nonzero().flatten()\n    return drawn if len(drawn) else self.draw(count, rng)",
        (f"{AFRESH}[Poisson(sample_rate=0.25)]",),
    ),
    Bug(
        "accounting",
        "rows of a shared draw counted as independent",
        f"{SHARDS}:ShardQueries.query_random_shards",
        "sampling.draw(num_rows, self._rng)",
        "sampling.draw(1, self._rng).expand(num_rows)",
        ("tests/privacy/test_sampling.py::test_the_gate_draws_a_shard_for_every_row[False]",),
    ),
    Bug(
        "accounting",
        "steps off by one",
        f"{PLAN}:Stage.event",
        "dpa.SelfComposedDpEvent(event, self.steps)",
        "dpa.SelfComposedDpEvent(event, self.steps - 1)",
        ("tests/privacy/test_plan.py::test_event_says_what_will_run",),
    ),
    Bug(
        "accounting",
        "delta not split",
        f"{ACCOUNTING}:_pld_cost",
        "total.get_epsilon_for_delta(target - slack)",
        "total.get_epsilon_for_delta(target)",
        ("tests/privacy/test_accounting.py::test_delta_and_epsilon_allow_for_the_same_rounding",),
    ),
    Bug(
        "accounting",
        "the classical formula at epsilon 10",
        f"{GAUSSIAN}:gaussian_epsilon",
        "float(_cached_gaussian_epsilon(1 / mu, delta))",
        "float(mu * np.sqrt(2 * np.log(1.25 / delta)))",
        ("tests/privacy/test_accounting.py::test_the_classical_formula_is_not_used",),
    ),
    Bug(
        "accounting",
        "a second run not charged",
        f"{LEDGER}:Ledger.compute_spent_cost",
        'if entry["kind"] == "reserve"\n    ]',
        'if entry["kind"] == "reserve"\n    ][-1:]',
        (f"{GATES}::test_two_gates_pay_twice",),
    ),
    Bug(
        "accounting",
        "resume forgets what was asked",
        f"{QUERIES}:PaidQueries._count_earlier_steps",
        "self._ledger.asked_count(self.ticket, name)",
        "0",
        (f"{GATES}::test_a_long_stage_keeps_nothing_and_goes_on_after_its_marks",),
    ),
    Bug(
        "side door",
        "label histogram",
        f"{GATE}:Gate.sum",
        "return self._run_query(stage, clip_norm, sum_chunks)",
        f"return self._run_query(stage, clip_norm, sum_chunks) * {ALL}.labels.bincount(minlength=num_classes)[:, None]",
        (f"{DOORS}[Means]",),
    ),
    Bug(
        "side door",
        "early stop on a private loss",
        f"{SECRET_SIDE}:SecretSide._run_query",
        "step + count)",
        f"step + count) if float({ALL}.images.square().mean()) < 0.2 else stage.steps",
        (f"{DOORS}[Descent]",),
    ),
]
