"""Workers that prepare shadows: this process, several processes on this host, or a Ray cluster.

All workers write into one folder, a shadow at a time. A worker process is

    python -m privot.attacks.shadows.workers FOLDER DEVICE MICROBATCH THREADS

It reads the indices of batches, one a line, and writes lines of JSON. So nothing is pickled, no
user script has to be importable, and workers end when the process that started them has ended.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save

from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.store import ShadowStore
from privot.attacks.shadows.train import prepare_batch
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError, SettingError
from privot.io import write_atomically
from privot.runtime import Progress, Runtime, ignore_progress

CANDIDATES_FILE = "candidates.safetensors"  # in the folder while workers need it
PACKAGE_PARENT = Path(__file__).parents[3]  # the folder that holds the package privot
REPORT_INTERVAL = 0.2  # seconds between two progress messages of a worker
PLAN_KEYS = (
    "method",
    "settings",
    "epsilon",
    "num_shadows",
    "seed",
    "epochs",
    "num_samples",
    "shadows_per_batch",
)


def run_locally(
    config: ShadowConfig, pending_batches: list[int], runtime: Runtime, progress: Progress
) -> None:
    """Prepare one batch after the other in this process.

    Args:
        config: What defines the shadows.
        pending_batches: Indices of the batches to prepare.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.
    """
    (config.folder / CANDIDATES_FILE).unlink(missing_ok=True)  # of killed workers
    batches = config.split_batches()
    for batch_index in pending_batches:
        prepare_batch(config, batches[batch_index], runtime, progress)


def run_in_processes(
    config: ShadowConfig,
    pending_batches: list[int],
    num_workers: int,
    runtime: Runtime,
    progress: Progress,
) -> None:
    """Prepare batches in several processes on this host; each gets the next batch when it is free.

    Args:
        config: What defines the shadows.
        pending_batches: Indices of the batches to prepare.
        num_workers: Number of processes.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.

    Raises:
        PrivotError: If a worker fails.
    """
    messages = queue.Queue[tuple[int, dict[str, Any] | None]]()
    workers: list[subprocess.Popen[str]] = []
    with _share_candidates(config):
        try:
            for worker_index in range(min(num_workers, len(pending_batches))):
                process = _start_worker(config, num_workers, runtime)
                workers.append(process)
                threading.Thread(
                    target=_forward_messages, args=(worker_index, process, messages), daemon=True
                ).start()
            _dispatch_batches(config, list(pending_batches), workers, messages, progress)
        finally:
            for process in workers:
                process.terminate()
            for process in workers:
                process.wait()


def _start_worker(
    config: ShadowConfig, num_workers: int, runtime: Runtime
) -> subprocess.Popen[str]:
    """Start a worker process.

    Args:
        config: What defines the shadows.
        num_workers: Number of processes that share the threads of this one.
        runtime: Device and chunk sizes.

    Returns:
        The process.
    """
    num_threads = max(1, torch.get_num_threads() // num_workers)
    arguments = [config.folder, runtime.device, runtime.microbatch_size or 0, num_threads]
    import_paths = [str(PACKAGE_PARENT)]
    if inherited := os.environ.get("PYTHONPATH"):
        import_paths.append(inherited)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_paths)},
    )


def _forward_messages(
    worker_index: int,
    process: subprocess.Popen[str],
    messages: queue.Queue[tuple[int, dict[str, Any] | None]],
) -> None:
    """Put the messages of a worker into a queue, and None when it has ended.

    Args:
        worker_index: Index of the worker.
        process: The worker.
        messages: The queue.
    """
    for line in process.stdout or ():
        messages.put((worker_index, json.loads(line)))
    messages.put((worker_index, None))


def _dispatch_batches(
    config: ShadowConfig,
    pending_batches: list[int],
    workers: list[subprocess.Popen[str]],
    messages: queue.Queue[tuple[int, dict[str, Any] | None]],
    progress: Progress,
) -> None:
    """Send batches to workers that are ready until all batches are done.

    Args:
        config: What defines the shadows.
        pending_batches: Indices of the batches; they are removed from this list.
        workers: The worker processes.
        messages: What they send, None for a worker that has ended.
        progress: Called with the number of complete shadows.
    """
    num_running = len(workers)
    while num_running:
        worker_index, message = messages.get()
        process = workers[worker_index]
        stdin = process.stdin
        assert stdin
        if message is None:
            num_running -= 1
            if exit_code := process.wait():
                raise PrivotError(
                    f"a worker ended with exit code {exit_code}. Complete shadows are stored. Run "
                    "again to resume."
                )
        elif "error" in message:
            raise PrivotError(message["error"])
        elif "stage" in message:
            step = message["step"]
            if message["stage"] == "shadows":  # other workers may have stored more since
                step = ShadowStore(config.folder).count_completed()
            progress(message["stage"], step, message["of"])
        elif pending_batches:
            stdin.write(f"{pending_batches.pop(0)}\n")
            stdin.flush()
        else:
            stdin.close()


def run_on_ray(
    config: ShadowConfig, pending_batches: list[int], runtime: Runtime, progress: Progress
) -> None:
    """Prepare each batch as a task on a Ray cluster whose machines all share the folder.

    The cluster is that of RAY_ADDRESS, or a new one on this host.

    Args:
        config: What defines the shadows.
        pending_batches: Indices of the batches to prepare.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.

    Raises:
        SettingError: If Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # or Ray sends statistics to its makers
    try:
        import ray
    except ImportError:
        raise SettingError(
            "Ray is not installed. Install it by: pip install 'privot[ray]', or prepare without it."
        ) from None
    if is_own_cluster := not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        num_gpus = 1 if runtime.device != "cpu" and ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=num_gpus)(_run_ray_task)
        store = ShadowStore(config.folder)
        with _share_candidates(config):
            folder = str(config.folder.resolve())
            waiting = [
                task.remote(folder, batch_index, runtime.device, runtime.microbatch_size)
                for batch_index in pending_batches
            ]
            try:
                while waiting:
                    done, waiting = ray.wait(waiting, timeout=1)
                    ray.get(done)
                    progress("shadows", store.count_completed(), config.num_shadows)
            finally:
                for future in waiting:
                    ray.cancel(future, force=True)
    finally:
        if is_own_cluster:
            ray.shutdown()


def _run_ray_task(folder: str, batch_index: int, device: str, microbatch_size: int | None) -> None:
    """Prepare one batch in a Ray task.

    Args:
        folder: The folder of the shadows.
        batch_index: Index of the batch.
        device: Device of the runtime.
        microbatch_size: Microbatch size of the runtime.
    """
    torch.set_num_threads(1)  # a task has one core
    prepare_batch_from_folder(
        Path(folder), batch_index, Runtime(device, microbatch_size), ignore_progress
    )


def prepare_batch_from_folder(
    folder: Path, batch_index: int, runtime: Runtime, progress: Progress
) -> None:
    """Prepare one batch with the plan and the candidates that are in the folder.

    Args:
        folder: The folder of the shadows.
        batch_index: Index of the batch.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.

    Raises:
        SettingError: If the folder is not shared with this machine.
    """
    if not (folder / CANDIDATES_FILE).exists():
        raise SettingError(
            f"{folder} is not visible to a worker. Choose a folder that every machine shares."
        )
    plan = ShadowStore(folder).plan
    arrays = load_file(folder / CANDIDATES_FILE)
    dataset_class = Public if plan["public"] else Sensitive
    dataset = dataset_class(
        arrays["images"],
        arrays["labels"],
        Spec.from_json(plan["candidates"]["spec"]),
        name="the candidates",
    )
    config = ShadowConfig(
        folder=folder,
        dataset=dataset,
        observations=tuple(plan["observations"]),
        **{key: plan[key] for key in PLAN_KEYS},
    )
    prepare_batch(config, config.split_batches()[batch_index], runtime, progress)


@contextmanager
def _share_candidates(config: ShadowConfig) -> Iterator[None]:
    """Store the candidates in the folder while workers need them."""
    dtype = np.uint8 if config.dataset._images.dtype == np.uint8 else np.float32
    images = np.ascontiguousarray(config.dataset._images, dtype)
    path = config.folder / CANDIDATES_FILE
    content = save({"images": images, "labels": config.dataset._labels})
    write_atomically(path, content, private=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run_worker(folder: str, device: str, microbatch_size: str, num_threads: str) -> None:
    """Work as a worker process until standard input ends.

    Args:
        folder: The folder of the shadows.
        device: Device of the runtime.
        microbatch_size: Microbatch size of the runtime; 0 for none.
        num_threads: Threads of this process.
    """
    torch.set_num_threads(int(num_threads))
    last_report = 0.0

    def send_message(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        """Send progress to the parent process, seldom.

        Args:
            stage: What is done.
            step: Steps that are done.
            total: Steps in all.
            **facts: Not sent.
        """
        nonlocal last_report
        if stage == "shadows" or time.monotonic() - last_report > REPORT_INTERVAL:
            last_report = time.monotonic()
            send_message(stage=stage, step=step, of=total)

    send_message(ready=True)
    for line in sys.stdin:
        try:
            runtime = Runtime(device, int(microbatch_size) or None)
            prepare_batch_from_folder(Path(folder), int(line), runtime, report_progress)
        except PrivotError as error:
            send_message(error=str(error))
            return
        send_message(ready=True)


if __name__ == "__main__":
    run_worker(*sys.argv[1:])
