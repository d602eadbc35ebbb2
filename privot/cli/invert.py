"""The command that tests whether updates leak images: invert."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.app import app
from privot.cli.console import err_console, print_json, print_line, print_warning
from privot.cli.inversion_table import print_inversion_summary
from privot.cli.invert_transcript import TranscriptOptions, attack_transcript
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import Device, IsPublic, Json, ReadOptions, Seed
from privot.errors import SettingError
from privot.io import check_vacant, to_jsonable, write_atomically
from privot.progress import show_progress_bar

if TYPE_CHECKING:
    from privot.attacks.inversion.defense_guarantee import DpSgdRun
    from privot.attacks.inversion.experiment import InversionExperiment
    from privot.attacks.inversion.experiment_result import InversionResult
    from privot.attacks.inversion.transcript_attack import TranscriptResult

RESULT_FILES = ("inversion.json", "snapshots.png", "page.html")


@dataclass(frozen=True)
class SearchOptions:
    """The attacked model and the attack."""

    model: Annotated[
        str,
        typer.Option(
            help="Untrained model: lenet (of DLG) or cnn6 (of R-GAP; odd against even labels)."
        ),
    ] = "lenet"
    attack_name: Annotated[
        str | None,
        typer.Option(
            "--attack",
            help="dlg, idlg, wdlg (the default), cosine, hybrid, ...; a wrong name lists all.",
        ),
    ] = None
    num_images: Annotated[
        int, typer.Option("--images", min=1, help="Number of attacked updates.")
    ] = 300
    batch_size: Annotated[
        int, typer.Option("--batch", min=1, help="Number of images behind each update.")
    ] = 1
    optimizer: Annotated[
        str | None,
        typer.Option(help="adam, lbfgs or lbfgs-search; by default that of the attack."),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Largest number of gradient evaluations.")
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the optimizer; by default its own.")
    ] = None
    restarts: Annotated[
        int, typer.Option(min=0, help="Number of new starts for updates without a solution.")
    ] = 0
    num_checked: Annotated[
        int,
        typer.Option(
            "--checked", min=0, help="Number of updates for the error bound and the closed form."
        ),
    ] = 4
    threshold: Annotated[
        float, typer.Option(help="Mean squared error below which an image counts as leaked.")
    ] = 1e-2


@dataclass(frozen=True)
class DefenseOptions:
    """What clients do to an update before they send it."""

    noise_scale: Annotated[
        float,
        typer.Option(
            help="Gaussian noise on the update: a noise multiplier with --clip-norm, else a "
            "standard deviation."
        ),
    ] = 0.0
    clip_norm: Annotated[
        float | None, typer.Option(help="Norm to which the gradient of each image is clipped.")
    ] = None
    prune_fraction: Annotated[
        float, typer.Option("--prune", help="Fraction of the smallest entries that are not sent.")
    ] = 0.0
    quantization_bits: Annotated[
        int | None, typer.Option(help="Number of bits to which entries are rounded.")
    ] = None
    training_run: Annotated[
        str | None,
        typer.Option(
            "--training",
            help="SIZE,BATCH,STEPS of a training run with this noise, to report its epsilon.",
        ),
    ] = None
    non_adaptive: Annotated[
        bool, typer.Option("--non-adaptive", help="The attacker does not know the defense.")
    ] = False


@app.command("invert")
@expand_option_groups
def _invert_command(
    source: Annotated[
        str,
        typer.Option(
            "--data", help="A built-in name or a path: records whose updates are attacked."
        ),
    ],
    search: SearchOptions,
    defense: DefenseOptions,
    transcript_options: TranscriptOptions,
    read_options: ReadOptions,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for figures, a page and images, for the data owner alone."),
    ] = None,
    is_public: IsPublic = False,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Test whether gradients leak the images behind them.

    The attacks recover labels, bound the error, invert in closed form, and search; the best attack
    counts.
    """
    from privot.attacks.inversion.transcript_attack import TranscriptAttack
    from privot.data import load_dataset
    from privot.runtime import Runtime

    transcript_options.check()
    result: TranscriptResult | InversionResult
    if transcript_options.path is not None:
        attack = TranscriptAttack(
            num_images=search.num_images,
            num_simulated_clients=transcript_options.num_simulated_clients,
            num_checked=search.num_checked,
            attack=search.attack_name or "hybrid",
            threshold=search.threshold,
            seed=seed,
        )
        if out is not None:
            check_vacant(out)
        result = dataclasses.replace(
            attack_transcript(attack, source, transcript_options, read_options, Runtime(device)),
            publishable=is_public,
        )
    else:
        experiment = _build_experiment(search, defense, seed)
        experiment.configure_attack()  # refuses settings before any record is read
        if out is not None:
            check_vacant(out)
        runtime = Runtime(device)
        dataset = load_dataset(source, public=is_public, **read_options.to_arguments())
        with show_progress_bar(err_console) as progress:
            result = experiment.run(dataset, runtime, progress)
    _report_result(result, source, out, as_json)


def _build_experiment(
    search: SearchOptions, defense: DefenseOptions, seed: int
) -> InversionExperiment:
    """Build the attack on updates of untrained models.

    Args:
        search: The model and the attack.
        defense: What clients do to an update.
        seed: Seed of models, noise and search.

    Returns:
        The experiment.
    """
    from privot.attacks.inversion.experiment import InversionExperiment

    return InversionExperiment(
        model=search.model,
        attack=search.attack_name or "wdlg",
        num_victims=search.num_images,
        batch_size=search.batch_size,
        optimizer=search.optimizer,
        steps=search.steps,
        learning_rate=search.learning_rate,
        restarts=search.restarts,
        noise_scale=defense.noise_scale,
        clip_norm=defense.clip_norm,
        prune_fraction=defense.prune_fraction,
        bits=defense.quantization_bits,
        is_adaptive=not defense.non_adaptive,
        num_checked=search.num_checked,
        threshold=search.threshold,
        seed=seed,
        training=_parse_training_run(defense.training_run),
    )


def _parse_training_run(text: str | None) -> DpSgdRun | None:
    """Parse SIZE,BATCH,STEPS of a training run."""
    from privot.attacks.inversion.defense_guarantee import DpSgdRun

    if text is None:
        return None
    try:
        size, batch_size, steps = map(int, text.split(","))
    except ValueError:
        raise SettingError(
            f"--training {text!r} is invalid. Write it as SIZE,BATCH,STEPS, such as 60000,256,1000."
        ) from None
    return DpSgdRun(size, batch_size, steps)


def _report_result(
    result: TranscriptResult | InversionResult, source: str, out: Path | None, as_json: bool
) -> None:
    """Write and print the result of an inversion.

    Args:
        result: The result.
        source: Name or path of the records.
        out: Folder for the files; None to write none.
        as_json: Print JSON instead of a table.
    """
    facts = result.to_json() | {"data": source}
    if out is not None:
        _write_files(out, result, to_jsonable(facts))
    if as_json:
        return print_json(facts | ({"folder": str(out)} if out else {}))
    print_inversion_summary(facts)
    if out is not None:
        print_line(f"written    {out}/{', '.join(RESULT_FILES)}")
    if not result.publishable:
        print_warning(
            "These results depend on sensitive records. Figures and images are for the data owner "
            "alone."
        )


def _write_files(
    out: Path, result: TranscriptResult | InversionResult, facts: dict[str, Any]
) -> None:
    """Write figures, images and a page; only the user can read them unless they are public.

    Args:
        out: The new folder.
        result: The result.
        facts: The result as JSON values.
    """
    from privot.report.inversion_page import render_inversion_page
    from privot.runtime.preview import render_image_grid

    out.mkdir(parents=True, mode=0o755 if result.publishable else 0o700)
    snapshots = result.stack_snapshots()
    png = io.BytesIO()
    grid = render_image_grid(snapshots.transpose(0, 1).flatten(0, 1), len(snapshots))
    grid.save(png, "PNG")
    contents = (
        (json.dumps(facts, indent=1) + "\n").encode(),
        png.getvalue(),
        render_inversion_page(facts, snapshots, result.list_column_titles()),
    )
    for name, content in zip(RESULT_FILES, contents, strict=True):
        write_atomically(out / name, content, private=not result.publishable)
