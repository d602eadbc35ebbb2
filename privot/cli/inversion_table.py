"""Prints the result of an inversion as a table with notes."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from privot.cli.console import out_console, print_line
from privot.progress import format_duration, round_up

METRIC_FORMATS = {"median_mse": ".2g", "psnr": ".1f", "ssim": ".3f"}
LABEL_TIER = "labels"
ERROR_BOUND_TIER = "cramer_rao_bound"


def print_inversion_summary(summary: dict[str, Any]) -> None:
    """Print the JSON form of an inversion result."""
    tiers = summary["tiers"]
    table = Table("tier", "victims", "leaked", "median MSE", "PSNR", "SSIM")
    notes = []
    for name, tier in tiers.items():
        if name != LABEL_TIER:
            title = name.replace("_", " ")
            table.add_row(*_format_tier(title, tier))
            notes += _describe_tier(title, tier)
    print_line(summary["title"])
    out_console.print(table, soft_wrap=False)
    for note in notes:
        print_line(note)
    if "psnr_gain" in summary:
        print_line(
            f"traffic    {summary['bytes_down']:,} bytes to {summary['client']}, "
            f"{summary['bytes_up']:,} from it, in {summary['rounds']} rounds"
        )
    labels = tiers[LABEL_TIER]
    origin = "given" if labels["given"] else "recovered from the update"
    print_line(f"labels     {100 * labels['label_accuracy']:.1f} % {origin}")
    if summary["defense"]:
        parameters = [f"{name} {value:g}" for name, value in summary["defense"].items()]
        print_line(f"defense    {', '.join(parameters)}")
    if needed_noise := tiers.get(ERROR_BOUND_TIER, {}).get("noise_std_for_psnr"):
        levels = [f"{value:.2g} for {psnr} dB" for psnr, value in needed_noise.items()]
        print_line(
            f"noise      {', '.join(levels)} (standard deviation on each entry, for all checked)"
        )
    if summary["guarantee"] is not None:
        print_line(f"training   {_format_guarantee(summary['guarantee'])}")
    print_line(f"verdict    {summary['summary']}")


def _format_tier(title: str, tier: dict[str, Any]) -> list[str]:
    """Format the row of one tier."""
    leaked = ""
    if "leak_rate" in tier:
        low = 100 * tier["leak_rate_low"]
        high = 100 * tier["leak_rate_high"]
        leaked = f"{100 * tier['leak_rate']:.0f} % ({low:.0f} to {high:.0f})"
    metrics = [
        f"{tier[key]:{metric_format}}" if tier.get(key) is not None else ""
        for key, metric_format in METRIC_FORMATS.items()
    ]
    return [title, str(tier["victims"]), leaked, *metrics]


def _describe_tier(title: str, tier: dict[str, Any]) -> list[str]:
    """Describe how a tier came out, in at most one line."""
    if "refused" in tier:
        return [f"{title}: {tier['refused']}"]
    if "rank" in tier:
        return [
            f"{title}: the update determines the image in {tier['rank']} of {tier['num_pixels']} "
            "directions"
        ]
    if "steps" in tier:
        return [
            f"{title}: {tier['steps']:.0f} steps on {tier['objective']}, "
            f"{format_duration(tier['seconds'])} in all"
        ]
    return []


def _format_guarantee(guarantee: dict[str, Any]) -> str:
    """Format the guarantee of a training run with the defense."""
    if guarantee["kind"] != "Guarantee":
        return f"no guarantee: {guarantee.get('reason')}"
    epsilon = round_up(guarantee["epsilon"], 3)
    return f"epsilon {epsilon}, delta {guarantee['delta']:g}, {guarantee['neighbours']}"
