"""The verb that asks whether an update leaks: invert."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from privot.cli.terminal import (
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
from privot.show import jsonable, progress_bar, seconds

FORMS = {"median_mse": ".2g", "psnr": ".1f", "ssim": ".3f"}


@app.command()
def invert(
    data: Annotated[str, typer.Option(help="A built-in name or a path: the records whose updates are attacked.")],
    net: Annotated[str, typer.Option(help="lenet (of DLG) or cnn6 (of R-GAP, odd against even labels), fresh for each victim.")] = "lenet",
    attack: Annotated[str, typer.Option(help="dlg, idlg, wdlg, cosine, hybrid; a wrong name lists all.")] = "wdlg",
    images: Annotated[int, typer.Option(min=1, help="Victims, attacked as one batch.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images behind each update.")] = 1,
    noise: Annotated[float, typer.Option(help="Gaussian noise on the update: a multiplier with --clip, else a standard deviation.")] = 0.0,
    clip: Annotated[float | None, typer.Option(help="Norm that each image's gradient is clipped to.")] = None,
    prune: Annotated[float, typer.Option(help="Share of smallest entries that are not sent.")] = 0.0,
    bits: Annotated[int | None, typer.Option(help="Entries are rounded to so many bits.")] = None,
    training: Annotated[str | None, typer.Option(help="SIZE,BATCH,STEPS of a run with this noise: what epsilon would it have?")] = None,
    naive: Annotated[bool, typer.Option("--naive", help="The attacker does not know the defence.")] = False,
    optimiser: Annotated[str | None, typer.Option(help="adam, lbfgs or lbfgs-search; else the attack's own.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Gradient evaluations at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="Of the optimiser.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="New starts of victims that were not solved.")] = 0,
    checked: Annotated[int, typer.Option(min=0, help="Victims for the certificate and the closed form.")] = 4,
    threshold: Annotated[float, typer.Option(help="Mean squared error under which an image counts as leaked.")] = 1e-2,
    out: Annotated[Path | None, typer.Option(help="Folder for figures, a page, and a strip of pictures; all are the owner's own.")] = None,
    public: IsPublic = False, device: Device = "auto", seed: Seed = 0, label: Label = "label", resize: Resize = None,
    download: Download = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Does this gradient leak the image? Tiers: labels, certificate, closed form, search; the worst counts."""
    from privot.attacks.inversion.experiment import Experiment
    from privot.data import load
    from privot.runtime import Runtime

    experiment = Experiment(
        net=net, attack=attack, images=images, batch=batch, optimiser=optimiser, steps=steps, rate=rate, restarts=restarts, noise=noise,
        clip=clip, prune=prune, bits=bits, adaptive=not naive,
        checked=checked, threshold=threshold, seed=seed, training=_training(training),
    )  # fmt: skip
    experiment.search()  # settings are refused before anything is read
    if out is not None and out.exists():
        raise SettingError(f"{out} is there already: name another folder, or remove it")
    runtime = Runtime(device)
    box = load(data, public=public, label=label, resize=resize, download=download)
    with progress_bar(err_console) as progress:
        found = experiment.run(box, runtime, progress)
    facts = found.to_json() | {"data": data}
    if out is not None:
        _write(out, found, facts)
    if as_json:
        return emit(facts | ({"folder": str(out)} if out else {}))
    _show(facts)
    if out is not None:
        say(f"written    {out}/inversion.json, strip.png, page.html")
    if not found.publishable:
        say_caution("sensitive records had a part in this: figures and pictures are the owner's own")


def _training(text: str | None) -> Any:
    from privot.attacks.inversion.promises import Training

    if text is None:
        return None
    try:
        size, batch, steps = map(int, text.split(","))
    except ValueError:
        raise SettingError(f"--training {text!r}: write it as SIZE,BATCH,STEPS, such as 60000,256,1000") from None
    return Training(size, batch, steps)


def _write(out: Path, found: Any, facts: dict[str, Any]) -> None:
    from privot.attacks.prepared import write
    from privot.export import picture
    from privot.report.inversion import page

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
    table, notes = Table("tier", "victims", "leaked", "median MSE", "PSNR", "SSIM"), []
    for name in ("certificate", "closed form", "search"):
        each = tiers.get(name)
        if each is None:
            continue
        leaked = f"{100 * each['leaked']:.0f} % ({100 * each['low']:.0f} to {100 * each['high']:.0f})" if "leaked" in each else ""
        figures = ((f"{each[key]:{form}}" if each.get(key) is not None else "") for key, form in FORMS.items())
        table.add_row(name, str(each["victims"]), leaked, *figures)
        if "refused" in each:
            notes.append(f"{name}: {each['refused']}")
        elif "rank" in each:
            notes.append(f"certificate: the update follows the image in {each['rank']} of {each['of']} directions")
        elif "steps" in each:
            notes.append(f"search: {each['steps']:.0f} steps on {each['objective']}, {seconds(each['seconds'])} for all")
    say(facts["title"])
    out_console.print(table, soft_wrap=False)
    for note in notes:
        say(note)
    say(f"labels     {100 * tiers['labels']['label_accuracy']:.1f} % {'given' if tiers['labels']['given'] else 'read off the update'}")
    if facts["defence"]:
        say("defence    " + ", ".join(f"{name} {value:g}" for name, value in facts["defence"].items()))
    if needed := tiers.get("certificate", {}).get("noise_for"):
        say(
            "noise      "
            + ", ".join(f"{value:.2g} for {target} dB" for target, value in needed.items())
            + " (std on each entry, for all checked)"
        )
    if (claim := facts["guarantee"]) is not None:
        stated = "no guarantee: " + str(claim.get("reason"))
        if claim["kind"] == "Guarantee":
            stated = f"epsilon {claim['epsilon']:.3g}, delta {claim['delta']:g}, {claim['neighbours']}"
        say(f"training   {stated}")
    say(f"verdict    {facts['sentence']}")
