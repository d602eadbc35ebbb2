"""A warm process that forks: each fork does one deed in a fresh state, without seconds of imports, and can be killed for good."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Forks:
    """The near end: starts the warm process and sends it orders."""

    def __init__(self):
        single = {
            f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")
        }  # threads do not survive a fork
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **single,
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                ),
            },
        )

    def do(self, deed, times=1, kill_after=None, **arguments):
        """Fork ``times`` and do the deed in each; ``kill_after`` seconds kill -9 ends it. Returns (exit codes, seconds)."""
        order = {
            "deed": deed,
            "times": times,
            "kill_after": kill_after,
            "arguments": {key: plain(each) for key, each in arguments.items()},
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["codes"], answer["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def plain(value):
    return str(value) if isinstance(value, Path) else value


def _child(order, number):
    from faults import crash_scenarios as deeds

    os.dup2(2, 1)  # the answers' pipe is not the child's
    try:
        getattr(deeds, order["deed"])(number=number, **order["arguments"])
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _serve():
    from faults import crash_scenarios as deeds

    deeds.warm()
    for line in sys.stdin:
        order = json.loads(line)
        start = time.monotonic()
        children = []
        for number in range(order["times"]):
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = _child(order, number)
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            children.append(child)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    _serve()
