"""How much classical classifiers gain when the floats of a generator are rounded to 8 bits.

python bench/rounding.py bench/table1/mnist-merf-1 mnist --count 6000
"""

from __future__ import annotations

from environment import load_public, make_parser, print_header, print_row

from privot.data.dataset import Records
from privot.measures.classical import CLASSICAL_CLASSIFIERS, fit_predict_all
from privot.release import Release


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("release", help="folder of a release")
    parser.add_argument("data", help="its dataset, such as mnist")
    parser.add_argument("--count", type=int, default=6000, help="number of samples")
    options = parser.parse_args()
    test = load_public(options.data, "test")
    images, labels = test.records()
    train = Records(*Release.load(options.release).sample(options.count))
    print(f"\n{options.release}, {options.count} samples\n")
    print_header("classifier", "floats %", "8 bits %")
    names = list(CLASSICAL_CLASSIFIERS)
    predictions = [
        fit_predict_all(names, train, images, test.spec.num_classes, 0, round_to_8_bits=rounded)
        for rounded in (False, True)
    ]
    accuracies = {
        name: [100 * (fitted[name][0] == labels).double().mean().item() for fitted in predictions]
        for name in names
    }
    for name, (floats, rounded) in accuracies.items():
        print_row(name, f"{floats:.1f}", f"{rounded:.1f}")
    means = (sum(column) / len(names) for column in zip(*accuracies.values(), strict=True))
    print_row(f"mean of the {len(names)}", *(f"{accuracy:.1f}" for accuracy in means))


if __name__ == "__main__":
    main()
