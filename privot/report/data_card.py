"""The same facts for machines and catalogues: a record for the OpenDP deployments registry and a Hugging Face data card."""

from __future__ import annotations

import json
import re
from typing import Any

from privot.report.formatting import measured, number

BROKEN = (
    "Implementation broken: a measured attack is stronger than the certificate allows, by a bound that counts the candidates of one "
    "release as independent trials; an audit of the method settles it"
)
PRICE = "paid, with an epsilon of its own on the test data"
NOISE = (
    "Gaussian noise from operating-system entropy, in double precision, rounded to a public grid"
)


def yaml(value: dict[str, Any], indent: int = 0) -> str:
    """Block YAML of nested dictionaries; scalars are quoted as in JSON, so that no name can be read as anything but text.

    >>> print(yaml({"deployment": {"name": "yes: #1", "delta": 1e-5, "curators": ["a"]}}), end="")
    deployment:
      name: "yes: #1"
      delta: 1.0e-05
      curators: ["a"]
    """
    lines = []
    for key, each in value.items():
        if isinstance(each, dict):
            lines.append(f"{'  ' * indent}{key}:\n{yaml(each, indent + 1)}")
        else:
            # Readers of YAML 1.1 take 1e-05 for a word: a number needs its point.
            text = (
                re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(each, ensure_ascii=False))
                if isinstance(each, float)
                else None
            )
            lines.append(f"{'  ' * indent}{key}: {text or json.dumps(each, ensure_ascii=False)}\n")
    return "".join(lines)


def trusted(facts: dict[str, Any]) -> bool:
    """Whether there is a guarantee, and no attack refutes it."""
    return facts["verdict"]["kind"] == "Guarantee" and not facts["broken"]


def _size(facts: dict[str, Any]) -> str:
    """The classes and pixels of images, or the columns of a table."""
    shape = facts["data"]["shape"]
    if facts["content"]["kind"] == "table":
        return f"{shape[-1]} columns"
    return f"{facts['data']['classes']} classes, {'x'.join(map(str, shape))} pixels"


def _product_type(facts: dict[str, Any]) -> str:
    if facts["content"]["kind"] == "real":
        return "Real records"
    return "Machine learning model" if facts["product"] == "generator" else "Synthetic data"


def _tags(facts: dict[str, Any]) -> list[str]:
    kind = facts["content"]["kind"]
    tags = [
        "real-records" if kind == "real" else "synthetic",
        "tabular" if kind == "table" else "images",
    ]
    if trusted(facts):
        return [*tags, "differential-privacy"]
    return tags if facts["verdict"]["kind"] == "Guarantee" else [*tags, "no-privacy-guarantee"]


def registry(facts: dict[str, Any]) -> dict[str, Any]:
    """A draft record with the registry's own keys; what only the owner knows is left empty."""
    proved = trusted(facts)
    line = BROKEN if facts["broken"] else facts["verdict"]["line"]
    slug = re.sub(r"[^a-z0-9]+", "-", facts["name"].lower()).strip("-") or "synthetic-images"
    about = f"{facts['content']['line']}: {_size(facts)}."
    basic = {
        "name": facts["name"],
        "data_curators": [""],
        "description": f"{about} {line}.",
        "intended_use": "",
        "data_product_type": _product_type(facts),
        "data_product_region": "",
        "publication_date": "",
        "data_product_sector": "",
    }
    notes = f"sha256 of manifest.json: {facts['provenance']['digests']['manifest.json']}; checked by `privot verify`."
    administrative = {"registry_authors": [""], "sources": "", "notes": notes}
    if not proved:
        administrative["notes"] = (
            f"{line}. Not a differentially private deployment: do not submit. {notes}"
        )
        return {
            "url_slug": slug,
            "status": "Draft",
            "tier": 1,
            "deployment": {"basic": basic, "administrative": administrative},
        }
    claim = facts["guarantee"]
    said = facts["statement"]
    declared = next(
        each for each in said["not_covered"] if each.startswith("What the owner declared")
    )
    version = facts["provenance"]["versions"].get("privot", "of an unknown version")
    return {
        "url_slug": slug,
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": basic,
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"Sets of labelled images. {said['neighbours']}",
                "unprotected_quantities": declared,
            },
            "privacy_loss": {
                "privacy_unit": claim["unit"],
                "privacy_unit_details": said["neighbours"],
                "privacy_parameters": {"epsilon": claim["epsilon"], "delta": claim["delta"]},
                "privacy_parameters_details": " ".join(said["promise"]),
            },
            "deployment_model": {
                "model_name": "Local" if claim["neighbours"] == "local" else "Central",
                "actors": "",
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Training on the noisy answers, and sampling, are post-processing.",
                "composition": f"{said['checks'][0]} Events: {facts['provenance']['event']}",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "",
                "mechanisms": f"{NOISE}; method {facts['method']['name']}, privot {version}.",
                "justification": "",
            },
            "administrative": administrative,
        },
    }


def inert(text: str) -> str:
    r"""Text that Markdown shows and does not obey.

    >>> inert("<b>[x](http://y)")
    '&lt;b&gt;\\[x\\](http\\://y)'
    """
    for sign, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, name)
    return re.sub(r"([\\`*_\[\]|~@$#]|:(?=//)|(?<=www)\.)", r"\\\1", text, flags=re.IGNORECASE)


def _ruler(reading: dict[str, Any]) -> str:
    said = [inert(reading["ruler"]) or "no ruler named"]
    said += [f"**{PRICE}**"] if reading["paid"] else []
    said += [f"**warning**: {inert(reading['warning'])}"] if reading["warning"] else []
    return "; ".join(said)


def card(facts: dict[str, Any]) -> str:
    """A data card: YAML front matter, then what it is, what is promised, what it is good for."""
    front = {
        "pretty_name": facts["name"],
        "license": "unknown",
        "task_categories": [
            "tabular-classification"
            if facts["content"]["kind"] == "table"
            else "image-classification"
        ],
        "tags": _tags(facts),
    }
    data = facts["data"]
    said = facts["statement"]
    made = "taken" if facts["content"]["kind"] == "real" else "made"
    source = f", {made} from {inert(data['name'])}" if data["name"] else ""
    lines = [f"# {inert(facts['name'])}", ""]
    lines += [f"**{BROKEN}.** What the release claims is refuted:", ""] if facts["broken"] else []
    lines += [f"**{inert(facts['verdict']['line'])}**", ""]
    lines += [
        f"{facts['content']['line']} ({_size(facts)}{source}) by {inert(facts['method']['name'])}.",
        "",
    ]
    lines += [
        "## Privacy",
        "",
        *(
            f"- {inert(each)}"
            for each in [*said["promise"], said["neighbours"], *said["checks"]]
            if each
        ),
        "",
    ]
    if said["not_covered"]:
        lines += ["Not covered:", "", *(f"- {inert(each)}" for each in said["not_covered"]), ""]
    if facts["utility"]["readings"]:
        lines += [
            "## Use",
            "",
            "| measure | value | samples | reference | measured with |",
            "|---|---|---|---|---|",
        ]
        for each in facts["utility"]["readings"]:
            value = measured(each["name"], float(each["value"]), float(each["error"]))
            against = f"{inert(each['reference'])}, {number(each['count'])}"
            lines += [
                f"| {inert(each['name'])} | {value} | {number(each['samples'])} | {against} | {_ruler(each)} |"
            ]
        lines += [""]
    lines += [
        "## Verify",
        "",
        "`privot verify FOLDER` recomputes the claim from the recorded events; it needs no data.",
        "",
    ]
    lines += [
        f"- {inert(name)}: `{digest}`" for name, digest in facts["provenance"]["digests"].items()
    ]
    if facts["method"]["citation"]:
        lines += ["", "## Cite", "", "```bibtex", facts["method"]["citation"], "```"]
    return f"---\n{yaml(front)}---\n\n" + "\n".join(lines) + "\n"
