"""Preparation of shadows: in this process, in several processes or on a Ray cluster."""

from __future__ import annotations

from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.store import ShadowStore
from privot.attacks.shadows.workers import run_in_processes, run_locally, run_on_ray
from privot.data.dataset import Public
from privot.privacy.ledger_lookup import record_internal_runs
from privot.runtime import Progress, Runtime, ignore_progress


def prepare_shadows(
    config: ShadowConfig,
    runtime: Runtime | None = None,
    progress: Progress = ignore_progress,
    *,
    num_workers: int = 1,
    use_ray: bool = False,
) -> ShadowStore:
    """Prepare the shadows that the folder does not have yet; an interrupted run is resumed.

    Args:
        config: What defines the shadows.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.
        num_workers: Number of processes on this host.
        use_ray: Whether to run on a Ray cluster instead.

    Returns:
        The complete folder.

    Raises:
        SettingError: If the folder belongs to another run, or no shadow can be made.
        PrivotError: If a worker process fails.

    privacy: the ledger of each sensitive data set lists the missing runs before the first of them
    begins.
    """
    runtime = runtime or Runtime()
    with config.open_store() as store:
        pending_batches = [
            batch_index
            for batch_index, batch in enumerate(config.split_batches())
            if not all(store.observation_path(shadow).exists() for shadow in batch)
        ]
        progress("shadows", store.count_completed(), config.num_shadows)
        if not pending_batches:
            return store
        _record_runs(config, store, pending_batches)
        if use_ray:
            run_on_ray(config, pending_batches, runtime, progress)
        elif num_workers > 1:
            run_in_processes(config, pending_batches, num_workers, runtime, progress)
        else:
            run_locally(config, pending_batches, runtime, progress)
    return store


def _record_runs(config: ShadowConfig, store: ShadowStore, pending_batches: list[int]) -> None:
    """List the missing runs in the ledgers of the sensitive data sets.

    Args:
        config: What defines the shadows.
        store: Their folder.
        pending_batches: Batches that are not complete.
    """
    names = config.source_names
    if names is None:
        names = () if isinstance(config.dataset, Public) else (config.dataset.name,)
    batches = config.split_batches()
    num_runs = sum(
        not store.release_path(shadow).exists()
        for batch_index in pending_batches
        for shadow in batches[batch_index]
    )
    if names and num_runs:
        plan, target = config.resolve_plan()
        record_internal_runs(names, "shadow", config.method, num_runs, plan, target.delta)
