"""Writes and prints the results of membership attacks and audits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from privot.cli.console import (
    NO_VERDICT_EXIT_CODE,
    err_console,
    escape_unprintable,
    exit_if_broken,
    out_console,
    print_line,
    print_warning,
)
from privot.io import to_jsonable, write_atomically
from privot.progress import round_down, round_up

if TYPE_CHECKING:
    from privot.attacks.membership.attack_report import AttackReport
    from privot.audit import Verdict


def write_result_file(path: Path, content: dict[str, Any], publishable: bool) -> None:
    """Write results as JSON; only the user can read them unless they may be published.

    Args:
        path: The file.
        content: The results.
        publishable: Whether other users may read the file.
    """
    text = json.dumps(to_jsonable(content), indent=1) + "\n"
    write_atomically(path, text.encode(), private=not publishable)


def print_secrecy_warning() -> None:
    """Warn that results depend on sensitive records."""
    print_warning("These results depend on sensitive records. They are for the data owner alone.")


def print_attack_report(report: AttackReport, path: Path) -> None:
    """Print the result of an attack and the file that holds it."""
    print_line(report.control.summary)
    table = Table("false positives", "true positives", "at least", "at most", "false alarms")
    for point in report.operating_points.points:
        few = " (few)" if point.has_few_false_positives else ""
        table.add_row(
            f"{100 * point.target_fpr:.3g} %",
            f"{100 * point.tpr:.3g} %",
            f"{round_down(100 * point.tpr_lower_bound, 3)} %",
            f"{round_up(100 * point.tpr_upper_bound, 3)} %",
            f"{point.num_false_positives}{few}",
        )
    out_console.print(table, soft_wrap=False)
    interval = ""
    if report.auc_interval:
        interval = (
            f", {report.auc_interval.low:.4f} to {report.auc_interval.high:.4f}, the mean over "
            f"{report.auc_interval.num_models} targets"
        )
    print_line(f"AUC        {report.auc:.4f}{interval}")
    if report.blind_auc is not None:
        print_line(f"blind      {report.blind_auc:.4f}, the AUC without access to the release")
    advantage = report.advantage
    print_line(f"advantage  {100 * advantage.value:.2f} % +- {100 * advantage.standard_error:.2f}")
    print_line(f"verdict    {report.verdict.summary}")
    print_line(f"file       {escape_unprintable(path)}")
    if report.warning:
        print_warning(report.warning)
    if not report.publishable:
        print_secrecy_warning()


def exit_if_refuted(verdict: Verdict) -> None:
    """Exit with an error if the verdict refutes the certificate, or if the trials were unfair."""
    from privot.audit.verdict import NO_VERDICT

    exit_if_broken(verdict.is_broken)
    if verdict.status == NO_VERDICT:
        print_line(
            "privot: no verdict: members and non-members differ by more than membership. Take both "
            "from one random split.",
            err_console,
            "red",
        )
        sys.exit(NO_VERDICT_EXIT_CODE)
