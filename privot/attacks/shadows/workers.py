"""Who prepares shadows: this process, several on this host, or a Ray cluster. All write into one folder, a shadow at a time.

``python -m privot.attacks.shadows.workers FOLDER DEVICE PORTION THREADS`` is a worker: it reads numbers of batches, one a line, and answers with
lines of JSON. So nothing is pickled, no script has to be safe to import, and when the one who asked is gone, its workers end.
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

import privot
from privot.attacks.shadows.config import Shadows
from privot.attacks.shadows.store import Prepared, write
from privot.attacks.shadows.train import prepare_batch
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError, SettingError
from privot.runtime import Progress, Runtime, silent

CANDIDATES = "candidates.safetensors"  # in the folder while workers need them
SELDOM = 0.2  # seconds between two words of a worker


def here(shadows: Shadows, todo: list[int], runtime: Runtime, progress: Progress) -> None:
    """One batch after the other, in this process."""
    (shadows.folder / CANDIDATES).unlink(missing_ok=True)  # of workers that were killed
    batches = shadows.batches()
    for number in todo:
        prepare_batch(shadows, batches[number], runtime, progress)


def in_processes(
    shadows: Shadows, todo: list[int], workers: int, runtime: Runtime, progress: Progress
) -> None:
    """Several processes on this host; each is handed the next batch when it has done one."""
    threads = max(1, torch.get_num_threads() // workers)
    words = [
        sys.executable,
        "-m",
        __name__,
        shadows.folder,
        runtime.device,
        runtime.microbatch or 0,
        threads,
    ]
    paths = os.pathsep.join(
        [str(Path(privot.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    waiting = list(todo)
    heard = queue.Queue[tuple[int, dict[str, Any] | None]]()
    running = []

    def listen(worker: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            heard.put((worker, json.loads(line)))
        heard.put((worker, None))

    with _candidates(shadows):
        try:
            for worker in range(min(workers, len(todo))):
                process = subprocess.Popen(
                    list(map(str, words)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": paths},
                )
                running.append(process)
                threading.Thread(target=listen, args=(worker, process), daemon=True).start()
            left = len(running)
            while left:
                worker, word = heard.get()
                stdin = running[worker].stdin
                assert stdin
                if word is None:
                    left -= 1
                    if code := running[worker].wait():
                        raise PrivotError(
                            f"a worker ended with exit code {code}: what was prepared is kept; run again to go on"
                        )
                elif "error" in word:
                    raise PrivotError(word["error"])
                elif "stage" in word:
                    step = (
                        Prepared(shadows.folder).done()
                        if word["stage"] == "shadows"
                        else word["step"]
                    )  # the newest of all workers
                    progress(word["stage"], step, word["of"])
                elif waiting:
                    stdin.write(f"{waiting.pop(0)}\n")
                    stdin.flush()
                else:
                    stdin.close()
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def on_ray(shadows: Shadows, todo: list[int], runtime: Runtime, progress: Progress) -> None:
    """Each batch is a task on a Ray cluster: that of RAY_ADDRESS, or one on this host. All its machines must see the folder."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray tells its makers otherwise
    try:
        import ray
    except ImportError:
        raise SettingError(
            "Ray is not installed: pip install 'privot[ray]', or prepare without it"
        ) from None
    if begun := not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        graphics = 1 if runtime.device != "cpu" and ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=graphics)(_task)
        prepared = Prepared(shadows.folder)
        with _candidates(shadows):
            folder = str(shadows.folder.resolve())
            waiting = [
                task.remote(folder, number, runtime.device, runtime.microbatch) for number in todo
            ]
            try:
                while waiting:
                    done, waiting = ray.wait(waiting, timeout=1)
                    ray.get(done)
                    progress("shadows", prepared.done(), shadows.count)
            finally:
                for each in waiting:
                    ray.cancel(each, force=True)
    finally:
        if begun:
            ray.shutdown()


def _task(folder: str, number: int, device: str, portion: int | None) -> None:
    torch.set_num_threads(1)  # a task has one core
    opened(Path(folder), number, Runtime(device, portion), silent)


def opened(folder: Path, number: int, runtime: Runtime, progress: Progress) -> None:
    """Prepare one batch of the shadows in a folder, with the candidates that lie in it."""
    if not (folder / CANDIDATES).exists():
        raise SettingError(
            f"{folder} cannot be seen from a worker: name a folder that every machine sees"
        )
    plan = Prepared(folder).plan
    arrays = load_file(folder / CANDIDATES)
    kind = Public if plan["public"] else Sensitive
    box = kind(
        arrays["images"],
        arrays["labels"],
        Spec.from_json(plan["candidates"]["spec"]),
        name="the candidates",
    )
    fields = {
        key: plan[key]
        for key in (
            "method",
            "settings",
            "epsilon",
            "count",
            "seed",
            "epochs",
            "samples",
            "at_once",
        )
    }
    shadows = Shadows(folder=folder, box=box, observations=tuple(plan["observations"]), **fields)
    prepare_batch(shadows, shadows.batches()[number], runtime, progress)


@contextmanager
def _candidates(shadows: Shadows) -> Iterator[None]:
    """The candidates lie in the folder for as long as workers need them."""
    kind = np.uint8 if shadows.box._images.dtype == np.uint8 else np.float32
    images = np.ascontiguousarray(shadows.box._images, kind)
    path = shadows.folder / CANDIDATES
    write(path, save({"images": images, "labels": shadows.box._labels}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def main(folder: str, device: str, portion: str, threads: str) -> None:
    """Be a worker until no more is asked."""
    torch.set_num_threads(int(threads))
    last = 0.0

    def say(**word: Any) -> None:
        sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()

    def tell(stage: str, step: int, of: int, **facts: Any) -> None:
        nonlocal last
        if stage == "shadows" or time.monotonic() - last > SELDOM:
            last = time.monotonic()
            say(stage=stage, step=step, of=of)

    say(ready=True)
    for line in sys.stdin:
        try:
            opened(Path(folder), int(line), Runtime(device, int(portion) or None), tell)
        except PrivotError as error:
            say(error=str(error))
            return
        say(ready=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
