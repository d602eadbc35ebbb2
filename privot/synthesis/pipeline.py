"""From a data set, a method and a budget to a release."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from privot.data import Sensitive
from privot.errors import PrivotWarning
from privot.local.dataset import PrivatizedDataset
from privot.methods import Method
from privot.privacy.ledger import Ledger
from privot.privacy.plan import PrivacyTarget
from privot.release import Release
from privot.runtime import Progress, Runtime, ignore_progress
from privot.synthesis.execution import execute_run
from privot.synthesis.prepare import InternalOptions, RunOptions, prepare_run


def synthesize(
    data: Sensitive | PrivatizedDataset | str | Path,
    method: str | Method = "private-set",
    budget: PrivacyTarget | float | None = None,
    *,
    settings: dict[str, Any] | None = None,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    seed: int = 0,
    runtime: Runtime | None = None,
    progress: Progress = ignore_progress,
    resume: bool = False,
    on_warning: Callable[[str], None] | None = None,
    allow_large_delta: bool = False,
    **internal: Unpack[InternalOptions],
) -> Release:
    """Make a private release of a data set.

    >>> import tempfile
    >>> from privot.synthesis import resize
    >>> quick = {"images_per_class": 2, "num_random_nets": 4, "nets_per_round": 2, "net_width": 4}
    >>> quick |= {"steps": 4, "net_train_epochs": 1}
    >>> book = tempfile.mkdtemp() + "/digits.jsonl"
    >>> release = synthesize("digits", budget=5.0, settings=quick, ledger=book)
    >>> release.artifact.tensors["images"].shape, round(release.guarantee.epsilon, 3)
    (torch.Size([20, 1, 8, 8]), 5.0)
    >>> larger = resize(release, 3)
    >>> larger.artifact.tensors["images"].shape, larger.guarantee == release.guarantee
    (torch.Size([30, 1, 8, 8]), True)

    Args:
        data: The data set, or its name or path.
        method: A method, or its name.
        budget: A `Budget`, an `AttackPowerTarget`, or an epsilon at delta 1e-5. A method without a
            guarantee sets the ledger of the data to infinite for good: ``math.inf`` accepts that.
        settings: Settings of the method, where it is a name.
        out: The folder to write the release to; None: none. Only a run with a folder can be
            resumed.
        ledger: A ledger other than that of the data set. A limit in the ledger of the data set
            binds the run all the same.
        seed: Seed of the public randomness. The noise has no seed.
        runtime: Where to compute.
        progress: Receives public facts during the run.
        resume: Resume the unfinished run of ``out``.
        on_warning: Receives warnings before anything is charged; by default they are issued as
            `PrivotWarning`.
        allow_large_delta: Accept a delta above 1e-3 that is not below 1 / number of records.
        internal: Options for tests, attacks and audits; see `InternalOptions`.

    Returns:
        The release.

    Raises:
        SettingError: If data, method, settings and budget do not fit together.
        BudgetError: If the ledger does not allow the run.
        ReleaseError: If the folder cannot be written, or training diverged.
    """
    options = RunOptions(
        settings=settings,
        out=Path(out) if out else None,
        ledger=ledger,
        seed=seed,
        runtime=runtime or Runtime(),
        progress=progress,
        resume=resume,
        on_warning=on_warning or _issue_warning,
        allow_large_delta=allow_large_delta,
        **internal,
    )
    run = prepare_run(data, method, budget, options)
    for text in run.list_warnings():
        options.on_warning(text)
    return execute_run(run)


def _issue_warning(text: str) -> None:
    """Issue a warning that names the line which called `synthesize`."""
    stack_level = 1
    frame = inspect.currentframe()
    while frame and frame.f_globals["__name__"].startswith("privot.synthesis"):
        frame = frame.f_back
        stack_level += 1
    warnings.warn(text, PrivotWarning, stacklevel=stack_level)
