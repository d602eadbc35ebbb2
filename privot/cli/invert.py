"""The verb that asks whether an update leaks: invert."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from privot.cli.options import (
    Device,
    Download,
    IsPublic,
    Json,
    Label,
    Resize,
    Seed,
    app,
    emit,
    err_console,
    out_console,
    say,
    say_caution,
)
from privot.errors import SettingError
from privot.io import vacant
from privot.progress import jsonable, progress_bar, round_up, seconds

if TYPE_CHECKING:
    from privot.attacks.inversion.transcript import Tapped
    from privot.attacks.inversion.transcript_attack import Overheard, Wire
    from privot.runtime import Runtime

FORMS = {"median_mse": ".2g", "psnr": ".1f", "ssim": ".3f"}


@app.command()
def invert(
    data: Annotated[
        str, typer.Option(help="A built-in name or a path: the records whose updates are attacked.")
    ],
    net: Annotated[
        str,
        typer.Option(
            help="lenet (of DLG) or cnn6 (of R-GAP, odd against even labels), fresh for each victim."
        ),
    ] = "lenet",
    attack: Annotated[
        str | None,
        typer.Option(
            help="dlg, idlg, wdlg (the default), cosine, hybrid, ...; a wrong name lists all."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Victims, attacked as one batch.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images behind each update.")] = 1,
    noise: Annotated[
        float,
        typer.Option(
            help="Gaussian noise on the update: a multiplier with --clip, else a standard deviation."
        ),
    ] = 0.0,
    clip: Annotated[
        float | None, typer.Option(help="Norm that each image's gradient is clipped to.")
    ] = None,
    prune: Annotated[
        float, typer.Option(help="Share of smallest entries that are not sent.")
    ] = 0.0,
    bits: Annotated[int | None, typer.Option(help="Entries are rounded to so many bits.")] = None,
    training: Annotated[
        str | None,
        typer.Option(help="SIZE,BATCH,STEPS of a run with this noise: what epsilon would it have?"),
    ] = None,
    naive: Annotated[
        bool, typer.Option("--naive", help="The attacker does not know the defence.")
    ] = False,
    optimiser: Annotated[
        str | None, typer.Option(help="adam, lbfgs or lbfgs-search; else the attack's own.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Gradient evaluations at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="Of the optimiser.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="New starts of victims that were not solved.")
    ] = 0,
    checked: Annotated[
        int, typer.Option(min=0, help="Victims for the certificate and the closed form.")
    ] = 4,
    threshold: Annotated[
        float, typer.Option(help="Mean squared error under which an image counts as leaked.")
    ] = 1e-2,
    wire: Annotated[
        Path | None,
        typer.Option(help="Attack what an owner sent in a federated run, by its server's record."),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="Whose answers of that record; the data is what this owner holds."),
    ] = None,
    aside: Annotated[
        str | None,
        typer.Option(help="Records of others, for the mean image; the test images of a built-in."),
    ] = None,
    shadows: Annotated[
        int, typer.Option(min=5, help="Owners that the attacker imitates with them.")
    ] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for figures, a page, and a strip of pictures; all are the owner's own."
        ),
    ] = None,
    public: IsPublic = False,
    device: Device = "auto",
    seed: Seed = 0,
    label: Label = "label",
    resize: Resize = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Does this gradient leak the image? Tiers: labels, certificate, closed form, search; the worst counts."""
    from privot.attacks.inversion.experiment import Experiment
    from privot.data import load
    from privot.runtime import Runtime

    if wire is None and (owner or aside):
        raise SettingError(
            "--owner and --aside belong to --wire: name the record of a federated run"
        )
    if wire is not None:
        from privot.attacks.inversion.transcript import tapped
        from privot.attacks.inversion.transcript_attack import Wire

        attacks = Wire(
            images=images,
            shadows=shadows,
            checked=checked,
            attack=attack or "hybrid",
            threshold=threshold,
            seed=seed,
        )
        if out is not None:
            vacant(out)
        heard = _overheard(
            attacks,
            data,
            tapped(wire, owner),
            aside,
            Runtime(device),
            download=download,
            label=label,
            resize=resize,
        )
        return _tell(dataclasses.replace(heard, publishable=public), data, out, as_json)
    experiment = Experiment(
        net=net,
        attack=attack or "wdlg",
        images=images,
        batch=batch,
        optimiser=optimiser,
        steps=steps,
        rate=rate,
        restarts=restarts,
        noise=noise,
        clip=clip,
        prune=prune,
        bits=bits,
        adaptive=not naive,
        checked=checked,
        threshold=threshold,
        seed=seed,
        training=_training(training),
    )
    experiment.search()  # settings are refused before anything is read
    if out is not None:
        vacant(out)
    runtime = Runtime(device)
    box = load(data, public=public, label=label, resize=resize, download=download)
    with progress_bar(err_console) as progress:
        found = experiment.run(box, runtime, progress)
    _tell(found, data, out, as_json)


def _overheard(
    attacks: Wire,
    data: str,
    heard: Tapped,
    aside: str | None,
    runtime: Runtime,
    *,
    download: bool,
    **declared: Any,
) -> Overheard:
    """The attacks on one owner's answers in a record."""
    from privot.data import catalogue, load
    from privot.data.partition import load_own

    declared |= {"shape": heard.terms.shape, "classes": heard.terms.classes}
    box = _held(data, heard, download) if data in catalogue() else load_own(data, **declared)
    if (aside := aside or (data if data in catalogue() else None)) is None:
        raise SettingError(
            "--aside: name records of others, or a built-in data set; the mean image is theirs"
        )
    other = (
        load(aside, "test", download=download)
        if aside in catalogue()
        else load_own(aside, **declared)
    )
    with progress_bar(err_console) as progress:
        return attacks.run(heard, box, other, runtime, progress)


def _held(data: str, heard: Tapped, download: bool) -> Any:
    """What an owner of a built-in data set holds, by the number in its name."""
    from privot.data import describe, load
    from privot.data.partition import held_by
    from privot.privacy.ledger_lookup import open_ledger

    owners = heard.terms.owners
    number = re.search(r"[0-9]+$", heard.name)
    if number is None:
        raise SettingError(
            f"--data {data}: which records has {heard.name!r}? Give its own file, or an owner whose name ends in a number"
        )
    box: Any = load(
        data, download=download, owners=None if (describe(data).owners or 0) >= owners else owners
    )
    return held_by(box, int(number[0]), open_ledger(box.name))


def _tell(found: Any, data: str, out: Path | None, as_json: bool) -> None:
    facts = found.to_json() | {"data": data}
    if out is not None:
        _write(out, found, facts)
    if as_json:
        return emit(facts | ({"folder": str(out)} if out else {}))
    _show(facts)
    if out is not None:
        say(f"written    {out}/inversion.json, strip.png, page.html")
    if not found.publishable:
        say_caution(
            "sensitive records had a part in this: figures and pictures are the owner's own"
        )


def _training(text: str | None) -> Any:
    from privot.attacks.inversion.defense_guarantee import Training

    if text is None:
        return None
    try:
        size, batch, steps = map(int, text.split(","))
    except ValueError:
        raise SettingError(
            f"--training {text!r}: write it as SIZE,BATCH,STEPS, such as 60000,256,1000"
        ) from None
    return Training(size, batch, steps)


def _write(out: Path, found: Any, facts: dict[str, Any]) -> None:
    from privot.attacks.shadows.store import write
    from privot.release.export import picture
    from privot.report.inversion_page import page

    mode = 0o644 if found.publishable else 0o600
    out.mkdir(parents=True, mode=0o755 if found.publishable else 0o700)
    strip = found.strip()
    buffer = io.BytesIO()
    picture(strip.transpose(0, 1).flatten(0, 1), len(strip)).save(buffer, "PNG")
    write(out / "inversion.json", (json.dumps(jsonable(facts), indent=1) + "\n").encode(), mode)
    write(out / "strip.png", buffer.getvalue(), mode)
    write(out / "page.html", page(jsonable(facts), strip, found.heads()), mode)


def _show(facts: dict[str, Any]) -> None:
    tiers = facts["tiers"]
    table = Table("tier", "victims", "leaked", "median MSE", "PSNR", "SSIM")
    notes = []
    for name, each in tiers.items():
        if name == "labels":
            continue
        leaked = (
            f"{100 * each['leaked']:.0f} % ({100 * each['low']:.0f} to {100 * each['high']:.0f})"
            if "leaked" in each
            else ""
        )
        figures = (
            (f"{each[key]:{form}}" if each.get(key) is not None else "")
            for key, form in FORMS.items()
        )
        table.add_row(name, str(each["victims"]), leaked, *figures)
        if "refused" in each:
            notes.append(f"{name}: {each['refused']}")
        elif "rank" in each:
            notes.append(
                f"certificate: the update follows the image in {each['rank']} of {each['of']} directions"
            )
        elif "steps" in each:
            notes.append(
                f"search: {each['steps']:.0f} steps on {each['objective']}, {seconds(each['seconds'])} for all"
            )
    say(facts["title"])
    out_console.print(table, soft_wrap=False)
    for note in notes:
        say(note)
    if "gain" in facts:
        say(
            f"wire       {facts['bytes_down']:,} bytes to {facts['owner']}, {facts['bytes_up']:,} from it, in {facts['rounds']} rounds"
        )
    say(
        f"labels     {100 * tiers['labels']['label_accuracy']:.1f} % {'given' if tiers['labels']['given'] else 'read off the update'}"
    )
    if facts["defence"]:
        say(
            "defence    "
            + ", ".join(f"{name} {value:g}" for name, value in facts["defence"].items())
        )
    if needed := tiers.get("certificate", {}).get("noise_for"):
        say(
            "noise      "
            + ", ".join(f"{value:.2g} for {target} dB" for target, value in needed.items())
            + " (std on each entry, for all checked)"
        )
    if (claim := facts["guarantee"]) is not None:
        stated = "no guarantee: " + str(claim.get("reason"))
        if claim["kind"] == "Guarantee":
            stated = f"epsilon {round_up(claim['epsilon'], 3)}, delta {claim['delta']:g}, {claim['neighbours']}"
        say(f"training   {stated}")
    say(f"verdict    {facts['sentence']}")
