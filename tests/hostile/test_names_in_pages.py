"""A name that is markup changes no page: each page has the elements and attributes of one with a harmless name, and asks for nothing."""

import re
from html.parser import HTMLParser

import pytest
from support.factories import GAUSSIAN, make_attack_result, make_metric_result, make_release
from support.html_payloads import HTML_PAYLOADS

from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan, Stage
from privot.report import OwnerInputs, write_report
from privot.report.formatting import clean_text

FORBIDDEN = {
    "script",
    "iframe",
    "object",
    "embed",
    "link",
    "form",
    "input",
    "base",
    "a",
    "frame",
    "video",
    "audio",
    "source",
}


class Skeleton(HTMLParser):
    """What a browser would build: elements with the names of their attributes; and all that could be fetched or run."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.found = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *sorted(name for name, _ in attributes)))
        for name, value in attributes:
            if name.startswith("on") or (
                name in ("href", "src", "action", "data", "poster")
                and not (value or "").startswith(("data:image/", "#"))
            ):
                self.found.append((tag, name, value))
        if tag in FORBIDDEN or (
            tag == "meta" and dict(attributes).get("http-equiv", "").lower() == "refresh"
        ):
            self.found.append((tag, "", ""))


def pages(folder, name):
    """The public and the internal page of a release in which this name stands wherever a name can stand."""
    plan = Plan(
        (
            Stage(clean_text(name, 30) + "0", name, 50.0, 3),
            Stage(clean_text(name, 30) + "1", "sum", 50.0, 3),
        ),
        GAUSSIAN.neighbours,
    )
    odd = make_release(
        plan,
        Guarantee.from_plan(plan, 1e-5),
        names=(name + "0", name + "1", name + "2"),
        method=name,
        settings={name: name},
        data=name,
        seed=name,
        versions={name: name},
        ledger={"head": name, "spent_epsilon": 3.0},
    )
    numbers = {
        "results": [make_metric_result(name, protocol=name, reference=name, warning=name)],
        "attacks": [make_attack_result(name)],
    }
    write_report(odd, folder / "out", name=name, **numbers, owner_inputs=OwnerInputs())
    return [
        (folder / place).read_text() for place in ("out/report.html", "out-internal/internal.html")
    ]


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    return [Skeleton(page) for page in pages(tmp_path_factory.mktemp("harmless"), "plain")]


@pytest.mark.parametrize("number", range(len(HTML_PAYLOADS)))
def test_a_name_is_shown_and_not_obeyed(number, harmless, tmp_path, trust):
    for text, sound in zip(pages(tmp_path, HTML_PAYLOADS[number]), harmless, strict=True):
        page = Skeleton(text)
        assert page.found == [], "something in the page could run, or be fetched"
        assert page.elements == sound.elements, "the name has become an element or an attribute"
        assert re.search(r"Content-Security-Policy[^>]*default-src 'none'", text), (
            "the page must forbid what it does not need"
        )
    trust("D3", "injection payloads shown and not obeyed, in every place of a page", 1, of=1)


def test_the_check_sees_what_is_obeyed(harmless, tmp_path):
    """The control: the same pages, with the name left as it is."""
    for text in pages(tmp_path, "plain"):
        for name in HTML_PAYLOADS[:2]:
            assert Skeleton(text.replace("plain", name)).found
