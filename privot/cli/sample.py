"""Commands that show a release: sample, demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.app import app
from privot.cli.console import (
    err_console,
    print_guarantee,
    print_json,
    print_line,
    print_warning,
)
from privot.cli.options import Device, Json, ReleaseFolder, Seed
from privot.progress import round_up, show_progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from privot.release.artifact import Artifact


@app.command("sample")
def _sample_command(
    release: ReleaseFolder,
    count: Annotated[int, typer.Option(help="Number of images, or of rows of a table.")] = 100,
    out: Annotated[
        Path,
        typer.Option(
            help="Images: .npz, .png (a grid), .parquet, or a folder of PNG files. Table: .npz, "
            ".csv or .parquet."
        ),
    ] = Path("samples.npz"),
    latent_scale: Annotated[
        float,
        typer.Option(
            help="Factor on a generator's latents; below 1 images are cleaner and less varied."
        ),
    ] = 1.0,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Sample a release; spends nothing.

    Another device gives the same samples up to rounding.
    """
    from privot.release import Release
    from privot.release.export import check_output_path, write_samples, write_table
    from privot.release.table_columns import infer_table_columns
    from privot.release.verify import refuse_internal_release
    from privot.runtime import Runtime

    loaded = Release.load(release)
    torch_device = Runtime(device).torch_device
    refuse_internal_release(loaded, release)
    columns = infer_table_columns(loaded)
    check_output_path(out, is_table=columns is not None)
    with show_progress_bar(err_console) as progress:
        images, labels = loaded.artifact.sample(
            loaded.spec,
            count,
            seed=seed,
            device=torch_device,
            latent_scale=latent_scale,
            progress=progress,
        )
    facts: dict[str, Any] = {"out": str(out), "count": count}
    if columns is not None:
        write_table(images, columns, out)
        facts["columns"] = [column.name for column in columns]
        text = f"{count} rows of {len(columns)} columns in {out}"
    else:
        write_samples(images, labels, out, loaded.spec.num_classes, loaded.spec.class_names)
        text = f"{count} samples in {out}"
    if loaded.artifact.kind == "set":
        facts |= _count_distinct_images(loaded.artifact, labels)
        text = f"{count} images in {out}: {facts['distinct']} of the {facts['images_in_set']} "
        text += "images of the set, "
        text += "with repetitions" if facts["repeated"] else "each once"
    if as_json:
        return print_json(facts)
    print_line(text)


def _count_distinct_images(artifact: Artifact, labels: Tensor) -> dict[str, Any]:
    """Count how many images of a released set the samples contain."""
    num_distinct = len(artifact.find_sample_indices(labels).unique())
    return {
        "distinct": num_distinct,
        "images_in_set": len(artifact.tensors["labels"]),
        "repeated": num_distinct < len(labels),
    }


@app.command("demo")
def _demo_command(
    out: Annotated[
        Path, typer.Option(help="Folder for the results; an earlier demo is replaced.")
    ] = Path("privot-demo"),
    epsilon: Annotated[float, typer.Option(help="Epsilon of the privacy budget.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Run every step on the embedded digits, in about a minute."""
    from privot.cli.demo import run_demo

    with show_progress_bar(err_console) as progress:
        facts = run_demo(out, epsilon, progress, print_warning)
    if as_json:
        return print_json(facts)
    print_guarantee(facts["guarantee"])
    for result in facts["results"]:
        print_line(
            f"{result['name']:<20} {result['value']:.3f} ± {result['standard_error']:.3f} "
            f"on {result['reference_size']} real test images"
        )
    if facts["verified_epsilon"] is not None:
        epsilon_text = round_up(facts["verified_epsilon"])
        print_line(f"verified   epsilon {epsilon_text} recomputed from the events")
    for name, path in facts["files"].items():
        print_line(f"{name:<10} {path}")
