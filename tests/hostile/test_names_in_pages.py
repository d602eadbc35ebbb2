"""A name that is markup changes no page: neither its elements nor what it asks for."""

import re
from html.parser import HTMLParser

import pytest
from support.factories import GAUSSIAN, make_attack_result, make_metric_result, make_release
from support.html_payloads import HTML_PAYLOADS

from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan, Stage
from privot.report import OwnerInputs, write_report
from privot.report.formatting import clean_text

FORBIDDEN = "script iframe object embed link form input base a frame video audio source"
FETCHING = ("href", "src", "action", "data", "poster")


class Skeleton(HTMLParser):
    """What a browser would build: elements, attributes, and all that could be fetched or run."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.dangers = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *sorted(name for name, _ in attributes)))
        for name, value in attributes:
            is_local = (value or "").startswith(("data:image/", "#"))
            if name.startswith("on") or (name in FETCHING and not is_local):
                self.dangers.append((tag, name, value))
        is_refresh = dict(attributes).get("http-equiv", "").lower() == "refresh"
        if tag in FORBIDDEN.split() or (tag == "meta" and is_refresh):
            self.dangers.append((tag, "", ""))


def write_pages(folder, name):
    """The public and the internal page of a release with this name wherever a name can stand."""
    stages = [
        Stage(clean_text(name, 30) + str(number), operation, 50.0, 3)
        for number, operation in enumerate((name, "sum"))
    ]
    plan = Plan(tuple(stages), GAUSSIAN.neighbours)
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
    paths = ("out/report.html", "out-internal/internal.html")
    return [(folder / path).read_text() for path in paths]


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    return [Skeleton(page) for page in write_pages(tmp_path_factory.mktemp("harmless"), "plain")]


@pytest.mark.parametrize("number", range(len(HTML_PAYLOADS)))
def test_a_name_is_shown_and_not_obeyed(number, harmless, tmp_path, trust):
    for text, sound in zip(write_pages(tmp_path, HTML_PAYLOADS[number]), harmless, strict=True):
        page = Skeleton(text)
        assert page.dangers == [], "something in the page could run, or be fetched"
        assert page.elements == sound.elements, "the name has become an element or an attribute"
        assert re.search(r"Content-Security-Policy[^>]*default-src 'none'", text)
    trust("D3", "injection payloads shown and not obeyed, in every place of a page", 1, of=1)


def test_the_check_sees_what_is_obeyed(tmp_path):
    """The control: the same pages, with the name left as it is."""
    for text in write_pages(tmp_path, "plain"):
        for name in HTML_PAYLOADS[:2]:
            assert Skeleton(text.replace("plain", name)).dangers
