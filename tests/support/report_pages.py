"""Reports of small releases, written with a word less."""

import re

from support.factories import make_release

from privot.report import write_report

PUBLIC_FILES = ("report.html", "report.json", "registry.yaml", "README.md")
INTERNAL_FILES = ("internal.html", "internal.json")


def write_toy_report(folder, release=None, name="toy", **inputs):
    return write_report(release or make_release(), folder, name=name, **inputs)


def list_image_sources(page):
    return set(re.findall(r'src="(data:[^"]+)"', page.read_text()))
