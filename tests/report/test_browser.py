"""The page in a real browser: the system's Chromium without a head, cut off from the network.

What a person would trip over: errors of the script, images that are not there, a page that must
be pushed sideways on a telephone.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from allstep.report import write_report
from support.synthetic_runs import BEGAN, lines, write, write_rich

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason=f"no browser: none of {', '.join(NAMES)} is installed"
)

PHONE, DESK = 390, 1280
LONG = "a-run-with-a-name-that-nobody-would-want-to-read-on-a-telephone-0123456789"
# Sideways scrolling of the page; a table that is too wide scrolls by itself.
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
MISSING = "[...document.images].filter(each => !each.complete || !each.naturalWidth).length"
UNSEEN = """[...document.querySelectorAll("svg, .bar, .matrix, .gallery img")].filter(each => {
  const box = each.getBoundingClientRect(); return box.width < 50 || box.height < 10 }).length"""
OUTSIDE = """[...document.querySelectorAll("svg text")].filter(each => {
  const box = each.getBoundingClientRect(), frame = each.closest("svg").getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1 }).map(each => each.textContent)"""
SMALL = """[...document.querySelectorAll("svg text")].filter(each => {
  const box = each.getBoundingClientRect(); return box.height < 9 }).length"""


@dataclass
class Shown:
    """A page, and what was heard from it."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser(peers: None) -> Iterator["Browser"]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        program = playwright.chromium.launch(
            executable_path=PROGRAM, args=["--no-sandbox"], timeout=120_000
        )
        yield program
        program.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with all that a report can show, one with a straggler, one with a long name that
    was killed."""
    folder = tmp_path_factory.mktemp("runs")
    times = {
        "input": [0.02] * 4,
        "compute": [0.3, 0.3, 0.5, 0.3],
        "wait": [0.2, 0.2, 0.01, 0.2],
        "update": [0.02] * 4,
    }
    runs = [
        write_rich(folder / "one", workers=1),
        write_rich(folder / "four", workers=4, times=times, seconds=0.15),
        write(folder / LONG, lines(end=False)),
    ]
    return write_report(runs, folder / "page.html", now=BEGAN + 7200)


def show(
    browser: "Browser", file: Path, width: int, scheme: Any = "light", script: bool = True
) -> Shown:
    """Opens the file from disk; whatever else is asked for is refused and noted."""
    context = browser.new_context(
        viewport={"width": width, "height": 844},
        color_scheme=scheme,
        java_script_enabled=script,
        offline=True,
    )
    context.set_default_timeout(120_000)
    shown = Shown(context.new_page())
    shown.page.on(
        "console", lambda message: shown.complaints.append(f"{message.type}: {message.text}")
    )
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("request", lambda request: shown.fetched.append(request.url))
    shown.page.goto(file.as_uri())
    return shown


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "light"), (DESK, "dark")])
def test_a_page_opens_whole_quiet_and_alone(
    browser: "Browser", file: Path, width: int, scheme: str
) -> None:
    shown = show(browser, file, width, scheme)
    page = shown.page
    assert shown.complaints == []
    assert [address for address in shown.fetched if not address.startswith("data:")] == [
        file.as_uri()
    ]
    assert page.evaluate(OVERFLOW) == 0
    assert page.evaluate("document.images.length") == 2 * (
        1 + 6
    )  # trust ratios and mistakes of two runs
    assert page.evaluate(MISSING) == 0
    assert page.locator("svg").count() == 8
    assert page.evaluate(UNSEEN) == 0
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(SMALL) == 0
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate(OVERFLOW) == 0
    page.context.close()


def test_the_pointer_shows_figures(browser: "Browser", file: Path) -> None:
    shown = show(browser, file, DESK)
    plot = shown.page.locator(".plot").nth(1)
    plot.locator("svg").hover()
    words = plot.locator(".tip").inner_text()
    assert words.startswith("epoch 3.56")  # the middle of the frame
    assert (
        words.count("95.0%") == 3 and words.count("94.0%") == 3
    )  # training and validation of three runs
    shown.page.locator("h1").hover()
    assert plot.locator(".tip").is_hidden()
    assert shown.complaints == []
    shown.page.context.close()


def test_a_page_can_be_read_without_its_script(browser: "Browser", file: Path) -> None:
    page = show(browser, file, PHONE, script=False).page
    assert page.locator("polyline").first.is_visible()
    assert page.locator(".tip:visible").count() == 0
    assert "did not end" in page.locator(".cards").inner_text()
    page.context.close()


def test_colours_stand_out_from_the_ground(browser: "Browser", file: Path) -> None:
    """Text against its card, by the formula of WCAG: 4.5 is what small text needs."""
    contrast = """(selector) => {
      const light = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const ink = light(getComputedStyle(document.querySelector(selector)).color);
      const ground = light(getComputedStyle(document.querySelector(".card")).backgroundColor);
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) }"""
    for scheme in ("light", "dark"):
        page = show(browser, file, DESK, scheme).page
        for selector in (
            "h1",
            ".small",
            ".findings .problem b",
            ".findings .hint b",
            ".findings .good b",
            ".pill.stopped",
            ".gallery b",
        ):
            assert page.evaluate(contrast, selector) >= 4.5, (scheme, selector)
        page.context.close()
