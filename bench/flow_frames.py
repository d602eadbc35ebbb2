"""Draw the particles of a sliced flow from start to end, one row per particle.

python bench/flow_frames.py digits docs/pictures/sliced-flow-mnist-eps10-strip.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from privot.components.flow_snapshots import SNAPSHOTS_KEY
from privot.release import Release
from privot.runtime.preview import render_image_grid


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    frames = Release.load(options.release).artifact.resize_state.get(SNAPSHOTS_KEY)
    if frames is None:
        raise SystemExit(
            f"{options.release} has no frames: it is no sliced flow, or was made with keep_answers=false"
        )
    render_image_grid(frames.float().transpose(0, 1).flatten(0, 1), len(frames)).save(options.out)


if __name__ == "__main__":
    main()
