"""Draw the particles of a sliced flow from start to end, one row for each particle.

python bench/flow_frames.py digits docs/pictures/sliced-flow-mnist-eps10-strip.png
"""

from __future__ import annotations

from pathlib import Path

from environment import make_parser

from privot.components.flow_snapshots import SNAPSHOTS_KEY
from privot.release import Release
from privot.runtime.preview import render_image_grid


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("release", type=Path, help="folder of the release")
    parser.add_argument("out", type=Path, help="the .png to write")
    options = parser.parse_args()
    snapshots = Release.load(options.release).artifact.resize_state.get(SNAPSHOTS_KEY)
    if snapshots is None:
        raise SystemExit(
            f"{options.release} has no snapshots: its method is not sliced-flow, or it was made "
            "with keep_answers=false."
        )
    images = snapshots.float().transpose(0, 1).flatten(0, 1)
    render_image_grid(images, len(snapshots)).save(options.out)


if __name__ == "__main__":
    main()
