"""The pages in a real browser: they render at any width, in light and dark, ask nothing of anyone and obey no name."""

import re
import shutil

import pytest
import torch
from support.factories import GAUSSIAN, make_attack_result, make_metric_result, make_release
from support.html_payloads import HTML_PAYLOADS

from privot.measures import Samples
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan, Stage
from privot.report import OwnerInputs, compare, write_report
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
def shown(tmp_path_factory):
    """Every kind of page: sound, broken, without guarantee, internal, hostile, large, a comparison."""
    root = tmp_path_factory.mktemp("pages")
    numbers = {
        "results": [
            make_metric_result(),
            make_metric_result("is", 5.0, protocol=PAID),
            make_metric_result("fid", 60.0, better="lower", warning="few samples"),
        ],
        "attacks": [make_attack_result()],
    }
    write_report(make_release(), root / "sound", name="Toy", **numbers, owner_inputs=OwnerInputs())
    write_report(
        make_release(),
        root / "broken",
        name="Toy",
        attacks=[make_attack_result(tpr=(0.9, 0.95), lower=(0.8, 0.9))],
    )
    stages = tuple(
        Stage(clean_text(name, 30) + str(place), name, 50.0, 3)
        for place, name in enumerate(HTML_PAYLOADS)
    )
    plan = Plan(stages, GAUSSIAN.neighbours)
    settings = {name: name for name in HTML_PAYLOADS}
    odd = make_release(
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
    numbers = {
        "results": [
            make_metric_result(name, protocol=name, reference=name, warning=name, better=name)
            for name in HTML_PAYLOADS
        ],
        "attacks": [make_attack_result(name) for name in HTML_PAYLOADS],
    }
    for place, name in enumerate(HTML_PAYLOADS[:3]):
        write_report(odd, root / f"hostile{place}", name=name, **numbers)
    write_report(
        make_release(shape=(3, 64, 64), classes=10, names=None, each=10),
        root / "large",
        name="Large",
        owner_inputs=OwnerInputs(),
    )
    images = torch.rand(30, 1, 8, 8)
    subjects = [
        Samples(
            name,
            images,
            torch.arange(30),
            30,
            tuple(HTML_PAYLOADS),
            make_release(GAUSSIAN.scale_noise(2.0**-place), delta=10.0 ** -(5 + place)),
        )
        for place, name in enumerate(HTML_PAYLOADS[:5])
    ]
    many = [
        make_metric_result(value=0.5, protocol=PAID, num_samples=place + 1) for place in range(5)
    ]
    compare(
        [(each, (*numbers["results"][:4], one)) for each, one in zip(subjects, many, strict=True)],
        root / "compared",
    )
    return root


PAGES = [
    "sound/report",
    "sound-internal/internal",
    "broken/report",
    "hostile0/report",
    "large-internal/internal",
    "compared/comparison",
]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_any_screen(shown, visit, name):
    page = visit(shown / f"{name}.html")
    for width, scheme in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            """width => [...document.querySelectorAll('main *')].filter(each => !each.closest('.table, svg')).filter(each => {
            const box = each.getBoundingClientRect(); return box.right > width + 1 || box.left < -1 }).map(each => each.outerHTML)""",
            width,
        )
        assert outside == []
        paper = map(
            int,
            re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[
                :3
            ],
        )
        assert (sum(paper) < 200) is (scheme == "dark")
    assert page.evaluate(
        "[...document.images].every(each => each.complete && each.naturalWidth > 0)"
    )


@pytest.mark.parametrize(
    "name", ["hostile0/report", "hostile1/report", "hostile2/report", "compared/comparison"]
)
def test_names_are_shown_and_not_obeyed(shown, visit, name):
    page = visit(shown / f"{name}.html")
    assert page.evaluate("window.pwned") is None
    assert (
        page.locator(
            "script, iframe, object, embed, link, form, input, base, a, [style], [onerror], [onload], [onmouseover]"
        ).count()
        == 0
    )
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert page.locator("meta[http-equiv]").count() == 1
    assert (
        page.locator("style").count()
        == page.locator("h1").count()
        == page.locator("head title").count()
        == 1
    )
    seen = re.sub(r"\s+", " ", page.locator("main").text_content())
    for each in HTML_PAYLOADS[:5] if name.startswith("compared") else HTML_PAYLOADS:
        assert clean_text(each, 60)[:40] in seen


def test_a_tower_of_accents_stays_in_its_line(shown, visit):
    page = visit(shown / "hostile0" / "report.html")
    assert (
        page.evaluate(
            "Math.max(...[...document.querySelectorAll('bdi')].map(each => each.textContent.length))"
        )
        <= 400
    )
    for each in page.locator("bdi").all_text_contents():
        assert not re.search("[\u0300-\u036f]{3}|[\u202a-\u202e\u2066-\u2069\x00-\x1f]", each)


def test_what_is_broken_is_said_in_red_at_the_top(shown, visit):
    page = visit(shown / "broken" / "report.html")
    banner = page.locator(".banner").first
    assert "Implementation broken" in banner.inner_text()
    assert banner.bounding_box()["y"] < 200
    red, green, blue = map(
        int, re.findall(r"\d+", banner.evaluate("each => getComputedStyle(each).color"))[:3]
    )
    assert red > 2 * max(green, blue)
    assert page.locator(".over").count() > 0
    assert visit(shown / "sound" / "report.html").locator(".banner, .over").count() == 0


def test_internal_pages_say_so_at_the_top(shown, visit):
    page = visit(shown / "sound-internal" / "internal.html")
    assert "Internal: not for publication" in page.locator(".banner").first.inner_text()


def test_the_style_is_let_in_by_the_policy(shown, visit):
    page = visit(shown / "sound" / "report.html")
    assert page.evaluate("getComputedStyle(document.querySelector('section')).display") == "grid"
    chart = page.locator("svg.chart").first.bounding_box()
    assert chart["width"] > 300
    assert page.evaluate(
        "getComputedStyle(document.querySelector('path.certified')).stroke"
    ) not in ("none", "")


def test_a_large_page_is_small_enough(shown):
    assert 100_000 < (shown / "large" / "report.html").stat().st_size < 3_000_000
    assert (shown / "large-internal" / "internal.html").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", ["sound/report", "hostile0/report", "compared/comparison"])
def test_a_page_prints_on_a4(shown, visit, name):
    page = visit(shown / f"{name}.html", scheme="dark")
    paper = page.pdf(prefer_css_page_size=True, print_background=True)
    assert paper.startswith(b"%PDF")
    sizes = {
        tuple(map(float, each.split())) for each in re.findall(rb"/MediaBox \[([\d. ]+)\]", paper)
    }
    assert sizes
    assert all(each[2:] == pytest.approx((595, 842), abs=1.5) for each in sizes)
    page.emulate_media(media="print", color_scheme="dark")
    assert (
        page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 33, 38)"
    )  # dark ink on white paper, whatever the screen
