"""How much the classical classifiers gain when images are rounded to 8 bits, as in a file, instead of the floats of a generator.

python bench/rounding.py bench/table1/mnist-merf-1 mnist --count 6000
"""

from __future__ import annotations

import argparse

import privot
from privot.data.dataset import Public, Records
from privot.measures.classical import CLASSICAL_CLASSIFIERS, fit_predict_all
from privot.release import Release


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=6000)
    asked = parser.parse_args()
    test = privot.load(asked.data, "test", public=True)
    assert isinstance(test, Public)
    images, labels = test.records()
    train = Records(*Release.load(asked.release).sample(asked.count))
    print(
        f"\n{asked.release}, {asked.count} samples\n\n| classifier | floats % | 8 bits % |\n|---|---|---|"
    )
    totals = [0.0, 0.0]
    found = [
        fit_predict_all(
            list(CLASSICAL_CLASSIFIERS),
            train,
            images,
            test.spec.num_classes,
            0,
            round_to_8_bits=rounded,
        )
        for rounded in (False, True)
    ]
    for name in CLASSICAL_CLASSIFIERS:
        scores = [100 * (each[name][0] == labels).double().mean().item() for each in found]
        totals = [
            total + score / len(CLASSICAL_CLASSIFIERS)
            for total, score in zip(totals, scores, strict=True)
        ]
        print(f"| {name} | {scores[0]:.1f} | {scores[1]:.1f} |", flush=True)
    print(f"| mean of the twelve | {totals[0]:.1f} | {totals[1]:.1f} |")


if __name__ == "__main__":
    main()
