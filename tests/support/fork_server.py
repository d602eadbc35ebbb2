"""A warm process that forks: each fork calls one function in a fresh state, without seconds of imports, and can be killed for good."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Forks:
    """The near end: starts the warm process, which calls ``warm()`` of a module, and sends it orders."""

    def __init__(self, module):
        clean = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**clean, **single, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def do(self, function, times=1, kill_after=None, **arguments):
        """Fork ``times`` and call the function of the module in each, with ``number=`` which fork it is.

        ``kill_after`` seconds kill -9 ends it. Returns (exit codes, seconds).
        """
        order = {"function": function, "times": times, "kill_after": kill_after}
        self.process.stdin.write(json.dumps(order | {"arguments": arguments}, default=str) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["codes"], answer["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _run_child(function, number, arguments):
    os.dup2(2, 1)  # the answers' pipe is not the child's
    try:
        function(number=number, **arguments)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(module):
    module = importlib.import_module(module)
    module.warm()
    for line in sys.stdin:
        order = json.loads(line)
        start = time.monotonic()
        children = []
        for number in range(order["times"]):
            child = os.fork()
            if not child:
                code = 1
                try:
                    function = getattr(module, order["function"])
                    code = _run_child(function, number, order["arguments"])
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
    _serve(sys.argv[1])
