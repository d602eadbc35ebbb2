"""The pages in a real browser: they render at any width, in light and dark, ask nothing of anyone and obey no name."""

import re
import shutil

import pytest
import torch
from support.factories import GAUSSIAN, make_attack_result, make_metric_result, make_release
from support.html_payloads import HTML_PAYLOADS
from support.report_pages import write_toy_report

from privot.measures import Samples
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan, Stage
from privot.report import OwnerInputs, compare
from privot.report.formatting import clean_text

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'privot[dev]'"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: install one to test the pages"
)

PAID = "LeNet; through the gate at epsilon 0.1, delta 1e-05, replace neighbours"
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield made
        made.close()


@pytest.fixture
def visit(browser):
    """Open a file; whatever it says on the console, asks for, or pops up is noted, and must be nothing."""
    opened = []
    noted = []

    def go(path, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(page)
        for event in ("console", "pageerror", "dialog", "popup", "download", "websocket"):
            page.on(event, lambda it, event=event: noted.append((event, str(it))))
        page.on("dialog", lambda it: it.dismiss())
        page.on(
            "request",
            lambda it: (
                noted.append(it.url)
                if it.url != path.as_uri() and not it.url.startswith("data:")
                else None
            ),
        )
        page.goto(path.as_uri())
        page.mouse.move(200, 300)
        return page

    yield go
    for page in opened:
        page.close()
    assert noted == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every kind of page: sound, broken, hostile, internal, large, a comparison."""
    root = tmp_path_factory.mktemp("pages")
    results = [
        make_metric_result(),
        make_metric_result("is", 5.0, protocol=PAID),
        make_metric_result("fid", 60.0, better="lower", warning="few samples"),
    ]
    attacks = [make_attack_result()]
    write_toy_report(root / "sound", results=results, attacks=attacks, owner_inputs=OwnerInputs())
    strong = make_attack_result(tpr=(0.9, 0.95), lower=(0.8, 0.9))
    write_toy_report(root / "broken", attacks=[strong])
    stages = tuple(
        Stage(f"{clean_text(name, 30)}{number}", name, 50.0, 3)
        for number, name in enumerate(HTML_PAYLOADS)
    )
    plan = Plan(stages, GAUSSIAN.neighbours)
    settings = {name: name for name in HTML_PAYLOADS}
    hostile = make_release(
        plan,
        Guarantee.from_plan(plan, 1e-5),
        classes=30,
        names=tuple(HTML_PAYLOADS),
        method=HTML_PAYLOADS[0],
        settings=settings,
        data=HTML_PAYLOADS[1],
        seed=HTML_PAYLOADS[2],
        versions=settings,
        ledger={"head": HTML_PAYLOADS[3], "spent_epsilon": HTML_PAYLOADS[4]},
    )
    results = [
        make_metric_result(name, protocol=name, reference=name, warning=name, better=name)
        for name in HTML_PAYLOADS
    ]
    attacks = [make_attack_result(name) for name in HTML_PAYLOADS]
    for number, name in enumerate(HTML_PAYLOADS[:3]):
        folder = root / f"hostile{number}"
        write_toy_report(folder, hostile, name, results=results, attacks=attacks)
    large = make_release(shape=(3, 64, 64), classes=10, names=None, each=10)
    write_toy_report(root / "large", large, owner_inputs=OwnerInputs())
    images = torch.rand(30, 1, 8, 8)
    subjects = []
    for number, name in enumerate(HTML_PAYLOADS[:5]):
        release = make_release(GAUSSIAN.scale_noise(2.0**-number), delta=10.0 ** -(5 + number))
        samples = Samples(name, images, torch.arange(30), 30, tuple(HTML_PAYLOADS), release)
        one = make_metric_result(value=0.5, protocol=PAID, num_samples=number + 1)
        subjects.append((samples, (*results[:4], one)))
    compare(subjects, root / "compared")
    return root


def read_color(element, name):
    """Red, green and blue of a computed style."""
    style = element.evaluate(f"each => getComputedStyle(each).{name}")
    return [int(number) for number in re.findall(r"\d+", style)[:3]]


PAGES = [
    "sound/report",
    "sound-internal/internal",
    "broken/report",
    "hostile0/report",
    "large-internal/internal",
    "compared/comparison",
]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_any_screen(pages, visit, name):
    page = visit(pages / f"{name}.html")
    for width, scheme in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        script = """width => [...document.querySelectorAll('main *')]
            .filter(each => !each.closest('.table, svg'))
            .filter(each => each.getBoundingClientRect().right > width + 1
                || each.getBoundingClientRect().left < -1)
            .map(each => each.outerHTML)"""
        assert page.evaluate(script, width) == []
        paper = read_color(page.locator("body"), "backgroundColor")
        assert (sum(paper) < 200) is (scheme == "dark")
    complete = "[...document.images].every(each => each.complete && each.naturalWidth > 0)"
    assert page.evaluate(complete)


@pytest.mark.parametrize(
    "name", ["hostile0/report", "hostile1/report", "hostile2/report", "compared/comparison"]
)
def test_names_are_shown_and_not_obeyed(pages, visit, name):
    page = visit(pages / f"{name}.html")
    assert page.evaluate("window.pwned") is None
    active = "script, iframe, object, embed, link, form, input, base, a"
    handlers = "[style], [onerror], [onload], [onmouseover]"
    foreign = "img:not([src^='data:image/png;base64,'])"
    for selector in (active, handlers, foreign):
        assert page.locator(selector).count() == 0
    for selector in ("meta[http-equiv]", "style", "h1", "head title"):
        assert page.locator(selector).count() == 1
    seen = re.sub(r"\s+", " ", page.locator("main").text_content())
    for payload in HTML_PAYLOADS[:5] if name.startswith("compared") else HTML_PAYLOADS:
        assert clean_text(payload, 60)[:40] in seen


def test_a_tower_of_accents_stays_in_its_line(pages, visit):
    page = visit(pages / "hostile0" / "report.html")
    lengths = "[...document.querySelectorAll('bdi')].map(each => each.textContent.length)"
    assert max(page.evaluate(lengths)) <= 400
    for text in page.locator("bdi").all_text_contents():
        assert not re.search("[\u0300-\u036f]{3}|[\u202a-\u202e\u2066-\u2069\x00-\x1f]", text)


def test_what_is_broken_is_said_in_red_at_the_top(pages, visit):
    page = visit(pages / "broken" / "report.html")
    banner = page.locator(".banner").first
    assert "Implementation broken" in banner.inner_text()
    assert banner.bounding_box()["y"] < 200
    red, green, blue = read_color(banner, "color")
    assert red > 2 * max(green, blue)
    assert page.locator(".over").count() > 0
    assert visit(pages / "sound" / "report.html").locator(".banner, .over").count() == 0
    banner = visit(pages / "sound-internal" / "internal.html").locator(".banner").first
    assert "Internal: not for publication" in banner.inner_text()


def test_the_style_is_let_in_by_the_policy(pages, visit):
    page = visit(pages / "sound" / "report.html")
    assert page.evaluate("getComputedStyle(document.querySelector('section')).display") == "grid"
    chart = page.locator("svg.chart").first.bounding_box()
    assert chart["width"] > 300
    stroke = page.evaluate("getComputedStyle(document.querySelector('path.certified')).stroke")
    assert stroke not in ("none", "")


def test_a_large_page_is_small_enough(pages):
    assert 100_000 < (pages / "large" / "report.html").stat().st_size < 3_000_000
    assert (pages / "large-internal" / "internal.html").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", ["sound/report", "hostile0/report", "compared/comparison"])
def test_a_page_prints_on_a4(pages, visit, name):
    page = visit(pages / f"{name}.html", scheme="dark")
    paper = page.pdf(prefer_css_page_size=True, print_background=True)
    assert paper.startswith(b"%PDF")
    sizes = {
        tuple(map(float, size.split())) for size in re.findall(rb"/MediaBox \[([\d. ]+)\]", paper)
    }
    assert sizes
    assert all(size[2:] == pytest.approx((595, 842), abs=1.5) for size in sizes)
    page.emulate_media(media="print", color_scheme="dark")
    # dark ink on white paper, whatever the screen
    assert read_color(page.locator("body"), "color") == [27, 33, 38]
