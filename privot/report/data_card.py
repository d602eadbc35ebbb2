"""The facts of a report as a Markdown data card, and as a record for the OpenDP registry.

The data card has the front matter of Hugging Face; the record is a draft for the registry of
differential privacy deployments.
"""

from __future__ import annotations

import json
import re
from typing import Any

from privot.report.formatting import format_measurement, format_number

REFUTED_NOTICE = (
    "Implementation broken: a measured attack is stronger than the certificate allows. Its bound "
    "counts the candidates of one release as independent trials, so only an audit of the method "
    "can confirm it"
)
PRIVATE_MEASUREMENT_NOTICE = "measured privately, with an epsilon of its own on the test data"
NOISE_DESCRIPTION = (
    "Gaussian noise from operating-system entropy, in double precision, rounded to a public grid"
)
DECLARED_PREFIX = "What the owner declared"  # of the sentence about declared facts


def dump_yaml(value: dict[str, Any], indent: int = 0) -> str:
    """Write nested dictionaries as block YAML.

    Scalars are quoted as in JSON, so that no text can be read as anything else.

    Args:
        value: The dictionary.
        indent: Level of indentation.

    Returns:
        The YAML.

    >>> print(dump_yaml({"deployment": {"name": "yes: #1", "delta": 1e-5}}), end="")
    deployment:
      name: "yes: #1"
      delta: 1.0e-05
    """
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines.append(f"{'  ' * indent}{key}:\n{dump_yaml(item, indent + 1)}")
            continue
        text = json.dumps(item, ensure_ascii=False)
        if isinstance(item, float):
            # YAML 1.1 reads 1e-05 as text: a number needs a decimal point.
            text = re.sub(r"^(-?\d+)e", r"\1.0e", text)
        lines.append(f"{'  ' * indent}{key}: {text}\n")
    return "".join(lines)


def has_unrefuted_guarantee(context: dict[str, Any]) -> bool:
    """Check that there is a guarantee and that no attack refutes it."""
    return context["verdict"]["kind"] == "Guarantee" and not context["guarantee_refuted"]


def _describe_size(context: dict[str, Any]) -> str:
    """Describe the classes and pixels of images, or the columns of a table."""
    shape = context["data"]["shape"]
    if context["content"]["kind"] == "table":
        return f"{shape[-1]} columns"
    return f"{context['data']['num_classes']} classes, {'x'.join(map(str, shape))} pixels"


def _describe_product_type(context: dict[str, Any]) -> str:
    if context["content"]["kind"] == "real":
        return "Real records"
    return "Machine learning model" if context["artifact"] == "generator" else "Synthetic data"


def _build_tags(context: dict[str, Any]) -> list[str]:
    kind = context["content"]["kind"]
    tags = [
        "real-records" if kind == "real" else "synthetic",
        "tabular" if kind == "table" else "images",
    ]
    if has_unrefuted_guarantee(context):
        tags.append("differential-privacy")
    elif context["verdict"]["kind"] != "Guarantee":
        tags.append("no-privacy-guarantee")
    return tags


def build_registry_record(context: dict[str, Any]) -> dict[str, Any]:
    """Build a draft record with the keys of the registry. What only the owner knows stays empty."""
    line = REFUTED_NOTICE if context["guarantee_refuted"] else context["verdict"]["line"]
    slug = re.sub(r"[^a-z0-9]+", "-", context["name"].lower()).strip("-") or "synthetic-images"
    content = f"{context['content']['line']}: {_describe_size(context)}."
    basic = {
        "name": context["name"],
        "data_curators": [""],
        "description": f"{content} {line}.",
        "intended_use": "",
        "data_product_type": _describe_product_type(context),
        "data_product_region": "",
        "publication_date": "",
        "data_product_sector": "",
    }
    digest = context["provenance"]["digests"]["manifest.json"]
    notes = f"sha256 of manifest.json: {digest}; checked by `privot verify`."
    administrative = {"registry_authors": [""], "sources": "", "notes": notes}
    record = {"url_slug": slug, "status": "Draft"}
    if not has_unrefuted_guarantee(context):
        administrative["notes"] = (
            f"{line}. Not a differentially private deployment: do not submit. {notes}"
        )
        deployment = {"basic": basic, "administrative": administrative}
        return {**record, "tier": 1, "deployment": deployment}
    deployment = {
        "basic": basic,
        **_build_privacy_sections(context),
        "administrative": administrative,
    }
    return {**record, "tier": 3, "deployment": deployment}


def _build_privacy_sections(context: dict[str, Any]) -> dict[str, Any]:
    """Build the sections of the registry record that describe differential privacy."""
    guarantee = context["guarantee"]
    statement = context["statement"]
    declared = next(
        sentence for sentence in statement["not_covered"] if sentence.startswith(DECLARED_PREFIX)
    )
    version = context["provenance"]["versions"].get("privot", "of an unknown version")
    method = context["method"]["name"]
    return {
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": f"Sets of labelled images. {statement['neighbours']}",
            "unprotected_quantities": declared,
        },
        "privacy_loss": {
            "privacy_unit": guarantee["unit"],
            "privacy_unit_details": statement["neighbours"],
            "privacy_parameters": {"epsilon": guarantee["epsilon"], "delta": guarantee["delta"]},
            "privacy_parameters_details": " ".join(statement["promise"]),
        },
        "deployment_model": {
            "model_name": "Local" if guarantee["neighbours"] == "local" else "Central",
            "actors": "",
            "release_type": "One release",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "post_processing": (
                "Training on the noisy query results, and sampling, are post-processing."
            ),
            "composition": f"{statement['checks'][0]} Events: {context['provenance']['event']}",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": "",
            "mechanisms": f"{NOISE_DESCRIPTION}; method {method}, privot {version}.",
            "justification": "",
        },
    }


def escape_markdown(text: str) -> str:
    r"""Escape text so that Markdown shows it literally.

    >>> escape_markdown("<b>[x](http://y)")
    '&lt;b&gt;\\[x\\](http\\://y)'
    """
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(char, entity)
    return re.sub(r"([\\`*_\[\]|~@$#]|:(?=//)|(?<=www)\.)", r"\\\1", text, flags=re.IGNORECASE)


def _describe_protocol(result: dict[str, Any]) -> str:
    """Describe the protocol of a result, with notices."""
    phrases = [escape_markdown(result["protocol"]) or "no protocol named"]
    if result["privately_measured"]:
        phrases.append(f"**{PRIVATE_MEASUREMENT_NOTICE}**")
    if result["warning"]:
        phrases.append(f"**warning**: {escape_markdown(result['warning'])}")
    return "; ".join(phrases)


def render_data_card(context: dict[str, Any]) -> str:
    """Render a data card: YAML front matter, the guarantee, utility and how to verify."""
    is_table = context["content"]["kind"] == "table"
    front_matter = {
        "pretty_name": context["name"],
        "license": "unknown",
        "task_categories": ["tabular-classification" if is_table else "image-classification"],
        "tags": _build_tags(context),
    }
    lines = [
        *_render_title(context),
        *_render_privacy_section(context["statement"]),
        *_render_utility_section(context["utility"]["results"]),
        "## Verify",
        "",
        "`privot verify FOLDER` recomputes the guarantee from the recorded events; it needs no "
        "data.",
        "",
        *(
            f"- {escape_markdown(name)}: `{digest}`"
            for name, digest in context["provenance"]["digests"].items()
        ),
    ]
    if context["method"]["citation"]:
        lines += ["", "## Cite", "", "```bibtex", context["method"]["citation"], "```"]
    return f"---\n{dump_yaml(front_matter)}---\n\n" + "\n".join(lines) + "\n"


def _render_title(context: dict[str, Any]) -> list[str]:
    """Render the title, the verdict and a line about the content."""
    lines = [f"# {escape_markdown(context['name'])}", ""]
    if context["guarantee_refuted"]:
        lines += [f"**{REFUTED_NOTICE}.** What the release claims is refuted:", ""]
    source = ""
    if context["data"]["name"]:
        verb = "taken" if context["content"]["kind"] == "real" else "made"
        source = f", {verb} from {escape_markdown(context['data']['name'])}"
    content = f"{context['content']['line']} ({_describe_size(context)}{source})"
    return [
        *lines,
        f"**{escape_markdown(context['verdict']['line'])}**",
        "",
        f"{content} by {escape_markdown(context['method']['name'])}.",
        "",
    ]


def _render_privacy_section(statement: dict[str, Any]) -> list[str]:
    """Render the promise and what it does not cover."""
    sentences = [*statement["promise"], statement["neighbours"], *statement["checks"]]
    lines = ["## Privacy", ""]
    lines += [f"- {escape_markdown(sentence)}" for sentence in sentences if sentence]
    lines.append("")
    if statement["not_covered"]:
        lines += ["Not covered:", ""]
        lines += [f"- {escape_markdown(sentence)}" for sentence in statement["not_covered"]]
        lines.append("")
    return lines


def _render_utility_section(results: list[dict[str, Any]]) -> list[str]:
    """Render a table of metric results; nothing without results."""
    if not results:
        return []
    lines = [
        "## Use",
        "",
        "| metric | value | samples | reference | protocol |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        value = format_measurement(
            result["name"], float(result["value"]), float(result["standard_error"])
        )
        reference = escape_markdown(result["reference"])
        cells = [
            escape_markdown(result["name"]),
            value,
            format_number(result["num_samples"]),
            f"{reference}, {format_number(result['reference_size'])}",
            _describe_protocol(result),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
