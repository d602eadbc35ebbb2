"""One small deterministic run of everything on the CPU, and SHA-256 digests of its results.

They show that a change which should not alter results, such as a rename or a move, alters none.
`digests.json` holds the digest of each value, and `test_golden.py` computes the digests again.
Store new digests only for a change that is meant to alter results; CHANGELOG.md then says so.

- Only values and shapes are digested, in an order that these files give. Keys of dictionaries,
  names of classes, settings and files, and words of any kind have no part in a digest.
- Labels of runs, such as ``method/merf``, are keys of `digests.json`, and the random numbers of a
  run follow from its label. So a label stays when a thing is renamed: `core.OLD_NAMES` has both.
- Bits differ between types of CPU and versions of libraries. `core.fingerprint` says where the
  digests were taken.

    python tests/golden/runs.py                     # compute all, and compare
    python tests/golden/runs.py --write             # compute all, and store
    python tests/golden/runs.py --write --only net  # those whose label contains a word
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a call as a script

from golden import (  # noqa: F401 (each registers its runs)
    attack_runs,
    inversion_runs,
    measure_runs,
    method_runs,
    net_runs,
    privacy_runs,
    transport_runs,
)
from golden.core import RUNS, compute, fingerprint

STORED = Path(__file__).parent / "digests.json"


def list_changes(digests, stored):
    """Names of values whose digests are not the stored ones."""
    return [name for name in {**stored, **digests} if digests.get(name) != stored.get(name)]


def main():
    parser = argparse.ArgumentParser(description="Compute the digests of all runs.")
    parser.add_argument("--write", action="store_true", help="store them in digests.json")
    parser.add_argument("--only", default="", help="runs whose label contains this word")
    parser.add_argument("--times", action="store_true", help="print the seconds of each run")
    args = parser.parse_args()
    stored = json.loads(STORED.read_text())
    is_same_machine = stored["fingerprint"] == fingerprint()
    if args.write and args.only and not is_same_machine:
        sys.exit("the stored digests were taken elsewhere: write all of them")
    digests = {}
    differ = []
    for label in (label for label in RUNS if args.only in label):
        start = time.perf_counter()
        try:
            digests[label] = compute(label)
        except Exception as error:
            if args.write:
                raise
            differ.append(f"{label}: {type(error).__name__}: {error}")
            continue
        if changes := list_changes(digests[label], stored["digests"].get(label, {})):
            differ.append(f"{label}: {', '.join(changes)}")
        if args.times:
            print(f"{time.perf_counter() - start:7.2f} s  {label}", flush=True)
    print(f"{len(digests)} runs, {sum(map(len, digests.values()))} digests")
    if not args.write:
        if not is_same_machine:
            print("the stored digests were taken elsewhere")
        print("\n".join([f"{len(differ)} runs differ", *differ]))
        return int(bool(differ))
    merged = (stored["digests"] if args.only else {}) | digests
    written = {label: values for label, values in merged.items() if label in RUNS}
    content = {"fingerprint": fingerprint(), "digests": written}
    STORED.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
