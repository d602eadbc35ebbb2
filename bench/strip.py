"""The movie strip of a sliced flow's release as a picture: a row a particle, from its start to its end.

python bench/strip.py digits docs/pictures/sliced-flow-mnist-eps10-strip.png
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
    asked = parser.parse_args()
    frames = Release.load(asked.release).artifact.resize_state.get(SNAPSHOTS_KEY)
    if frames is None:
        raise SystemExit(
            f"{asked.release} keeps no strip: it is no sliced flow, or was made with keep=false"
        )
    render_image_grid(frames.float().transpose(0, 1).flatten(0, 1), len(frames)).save(asked.out)


if __name__ == "__main__":
    main()
