"""Commands of membership attacks: attacks, attack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from privot.cli.app import app
from privot.cli.attack_options import AttackedMethodOptions, CandidateOptions, ShadowOptions
from privot.cli.attack_output import exit_if_refuted, print_attack_report, write_result_file
from privot.cli.console import err_console, explain_interrupt, out_console, print_json
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import ComputeOptions, Confidence, IsPublic, Json, ReadOptions, Seed
from privot.cli.parsing import parse_settings, reuse_declarations
from privot.errors import SettingError
from privot.io import check_writable
from privot.progress import Progress, show_progress_bar

if TYPE_CHECKING:
    from privot.attacks.membership.attack_report import AttackReport
    from privot.attacks.shadows.config import ShadowConfig
    from privot.attacks.shadows.store import ShadowStore
    from privot.data import Public, Sensitive
    from privot.release import Release
    from privot.runtime import Runtime

    Dataset = Sensitive | Public

DEFAULT_NUM_SHADOWS = 64


@app.command("attacks")
def _attacks_command(as_json: Json = False) -> None:
    """List the attacks and what each needs."""
    from privot.attacks.membership.registry import ATTACKS

    rows = [
        {"name": name, "title": attack.title, "needs": list(attack.needs)}
        for name, attack in ATTACKS.items()
    ]
    if as_json:
        return print_json(rows)
    table = Table("attack", "what it is", "needs")
    for row in rows:
        table.add_row(str(row["name"]), str(row["title"]), ", ".join(row["needs"]))
    out_console.print(table, soft_wrap=False)


@app.command("attack")
@expand_option_groups
def _attack_command(
    *,
    attack_name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the attack; see `privot attacks`.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a release; for attacks with shadows also the name of a method."
        ),
    ],
    candidates: CandidateOptions,
    is_public: IsPublic = False,
    shadow_options: ShadowOptions,
    method_options: AttackedMethodOptions,
    epochs: Annotated[
        int, typer.Option(min=1, help="Training epochs of the attack's classifiers.")
    ] = 300,
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    read_options: ReadOptions,
    compute: ComputeOptions,
    as_json: Json = False,
) -> None:
    """Test whether a release reveals who is in the data.

    The attack must first pass its controls. Results go into RELEASE.attacks, for the data owner
    alone, or into RELEASE/attacks if all data is public; `privot report` reads both. Exit code 3
    if the result refutes the certificate, 4 if the two sides differ without the release.
    """
    from privot.attacks.membership.runner import (
        AttackOptions,
        check_attack,
        leave_one_out_attack,
        run_attack,
    )
    from privot.audit.roc import check_probability
    from privot.release import Release

    runtime = compute.build_runtime()
    has_release = Path(target, "manifest.json").exists()
    uses_shadows = _check_target(attack_name, target, has_release, method_options, shadow_options)
    check_probability(confidence, "--confidence")
    release = Release.load(Path(target)) if has_release else None
    references = [Release.load(Path(path)) for path in candidates.reference_releases or ()]
    folder = shadow_options.folder or _name_sibling(target, has_release, "shadows")
    out = folder
    if release:
        out = Path(target, "attacks") if is_public else _name_sibling(target, True, "attacks")
    check_writable(out / attack_name)  # before the work
    members, nonmembers, population = _load_candidates(
        candidates, release, method_options, read_options.to_arguments() | {"public": is_public}
    )
    with show_progress_bar(err_console) as progress:
        shadow_store = None
        if uses_shadows:
            check_attack(attack_name, release, population)  # before the long work
            config = _configure_shadows(
                release or target,
                (members, nonmembers),
                (folder, shadow_options.num_shadows or DEFAULT_NUM_SHADOWS),
                method_options,
                {"epochs": epochs, "seed": seed},
            )
            shadow_store = _prepare_shadows(config, shadow_options, runtime, progress)
        if release:
            result = run_attack(
                attack_name,
                release,
                members,
                nonmembers,
                population=population,
                shadow_store=shadow_store,
                references=references,
                options=AttackOptions(
                    num_candidates=candidates.num_candidates,
                    epochs=epochs,
                    seed=seed,
                    confidence=confidence,
                ),
                runtime=runtime,
                progress=progress,
            )
        else:
            assert shadow_store
            result = leave_one_out_attack(attack_name, shadow_store, confidence, seed)
    _report_result(result, release, out, as_json)


def _report_result(result: AttackReport, release: Release | None, out: Path, as_json: bool) -> None:
    """Write and print the result of an attack, and exit if it refutes the certificate.

    Args:
        result: The result.
        release: The attacked release, or None if a method was attacked.
        out: Folder for the file.
        as_json: Print JSON instead of a table.
    """
    out.mkdir(exist_ok=True, mode=0o755 if result.publishable else 0o700)
    content = {"release": release.digest if release else None, **result.to_json()}
    path = out / f"{result.name}.json"
    write_result_file(path, content, result.publishable)
    if as_json:
        print_json({**result.to_json(), "file": str(path)})
    else:
        print_attack_report(result, path)
    exit_if_refuted(result.verdict)


def _check_target(
    attack_name: str,
    target: str,
    has_release: bool,
    method_options: AttackedMethodOptions,
    shadow_options: ShadowOptions,
) -> bool:
    """Raise unless attack, target and options fit together.

    Args:
        attack_name: Name of the attack.
        target: A release folder or the name of a method.
        has_release: Whether the target is a release folder.
        method_options: Options for a method as the target.
        shadow_options: Options for attacks with shadows.

    Returns:
        Whether the attack compares with shadows.
    """
    from privot.attacks.membership.registry import ATTACKS
    from privot.methods import list_methods

    if attack_name not in ATTACKS:
        raise SettingError(
            f"There is no attack {attack_name!r}. Choose one of {', '.join(ATTACKS)}."
        )
    uses_shadows = "shadows" in ATTACKS[attack_name].needs
    if not has_release and not (uses_shadows and target in list_methods()):
        hint = (
            f"There is no method {target!r} either."
            if uses_shadows
            else f"{attack_name} attacks a release."
        )
        raise SettingError(f"{target} is no release. {hint}")
    if has_release and method_options.is_given:
        raise SettingError(
            "--epsilon, --set, --config, --public-classes and --clients are for a method as the "
            "target; a release states how it was made. Leave them out."
        )
    if not uses_shadows and shadow_options.is_given:
        raise SettingError(
            f"{attack_name} uses no shadows. Leave out --shadows, --folder, --workers and --ray."
        )
    return uses_shadows


def _name_sibling(target: str, has_release: bool, suffix: str) -> Path:
    """Name the folder of shadows or results beside a target.

    Args:
        target: A release folder or the name of a method.
        has_release: Whether the target is a release folder.
        suffix: Suffix of the folder.

    Returns:
        The path.
    """
    path = Path(target).resolve() if has_release else Path(target)
    return path.with_name(f"{path.name}.{suffix}")


def _load_candidates(
    candidates: CandidateOptions,
    release: Release | None,
    method_options: AttackedMethodOptions,
    arguments: dict[str, Any],
) -> tuple[Dataset, Dataset, Dataset | None]:
    """Load the records that an attack distinguishes.

    Args:
        candidates: Names or paths of the records.
        release: The release, whose declarations hold for the records too.
        method_options: Declarations for a method as the target.
        arguments: Keyword arguments for `load_dataset`.

    Returns:
        Members, non-members and the population.
    """
    from privot.data import load_dataset

    spec = release.spec if release else None
    members = load_dataset(
        candidates.member_data,
        **reuse_declarations(candidates.member_data, spec),
        **arguments,
        public_classes=method_options.public_class_sizes,
        num_clients=method_options.num_clients,
    )
    spec = spec or members.spec
    nonmembers = load_dataset(
        candidates.nonmember_data,
        "test",
        **reuse_declarations(candidates.nonmember_data, spec),
        **arguments,
    )
    population = None
    if candidates.population_data:
        population = load_dataset(
            candidates.population_data,
            "test",
            **reuse_declarations(candidates.population_data, spec),
            **arguments,
        )
    return members, nonmembers, population


def _configure_shadows(
    target: Release | str,
    sides: tuple[Dataset, Dataset],
    location: tuple[Path, int],
    method_options: AttackedMethodOptions,
    shadow_arguments: dict[str, Any],
) -> ShadowConfig:
    """Configure the shadows of a release or of a method.

    Args:
        target: The release, or the name of the method.
        sides: Members and non-members.
        location: Folder and number of the shadows.
        method_options: How shadows of a method are made.
        shadow_arguments: Further fields of `ShadowConfig`.

    Returns:
        The configuration.
    """
    from privot.attacks.membership.method_shadows import shadows_for_method, shadows_for_release

    if not isinstance(target, str):
        return shadows_for_release(target, *sides, *location, **shadow_arguments)
    settings = parse_settings(method_options.config, method_options.overrides)
    return shadows_for_method(
        target, settings, method_options.epsilon, *sides, *location, **shadow_arguments
    )


def _prepare_shadows(
    config: ShadowConfig, options: ShadowOptions, runtime: Runtime, progress: Progress
) -> ShadowStore:
    """Prepare the shadows that are not there yet.

    Args:
        config: The configuration of the shadows.
        options: Where and with how many processes they are prepared.
        runtime: Where to compute.
        progress: Receives the progress.

    Returns:
        The shadows.
    """
    from privot.attacks.shadows.runner import prepare_shadows

    with explain_interrupt(config.folder):
        return prepare_shadows(
            config,
            runtime,
            progress,
            num_workers=options.num_workers,
            use_ray=options.use_ray,
        )
