"""The page in a real browser: at both widths it asks for nothing, logs nothing and draws every chart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from autotune.orchestrator.report import page as report_page
from tests.orchestrator.report.browser import CHROMIUM, Page, page
from tests.orchestrator.report.runs import recovered, searched

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

OF_LAUNCH = {"peaks", "parts", "timeline", "model", "losses", "spent"}
OF_SEARCH = {"peaks", "parts", "history", "importance", "parallel", "pareto", "spent"}
_DRAWN = "[...document.querySelectorAll('.chart:has(.main-svg .trace)')].map(chart => chart.id)"
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_GROUND = "getComputedStyle(document.body).backgroundColor"
_TITLES = "[...document.querySelectorAll('#chart-{} .xtitle, #chart-{} .ytitle')].map(t => t.textContent)"


# Of each place that may scroll: whether it is wider than the screen shows, and whether it says so.
_SIGNS = """[...document.querySelectorAll('.scroll')].map(each =>
  [each.scrollWidth > each.clientWidth + 1, getComputedStyle(each, '::before').content.includes('scroll')])"""
_CUT = """[...document.querySelectorAll('.chart')].flatMap(chart => {
  const box = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('.legendtext')].filter(text => {
    const place = text.getBoundingClientRect();
    return place.width && (place.right > box.right || place.left < box.left || place.top < box.top);
  }).map(text => `${chart.id}: ${text.textContent}`);
})"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = recovered(tmp_path_factory.mktemp("launch"))
    report_page.write_new(run, force=True)
    return run.path / report_page.NAME


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = searched(tmp_path_factory.mktemp("search"))
    report_page.write_new(run, force=True)
    return run.path / report_page.NAME


async def _drawn(opened: Page, file: Path, *, width: int, dark: bool = False) -> set[str]:
    await opened.open(file, width=width, dark=dark)
    assert opened.requests == [file.resolve().as_uri()]
    assert opened.problems == []
    assert await opened.value("document.documentElement.dataset.drawn") == "true"
    assert await opened.value(_OVERFLOW) <= 0
    return {name.removeprefix("chart-") for name in await opened.value(_DRAWN)}


def test_on_a_telephone_every_chart_is_drawn_and_nothing_is_asked_for(launch: Path, search: Path) -> None:
    async def look() -> None:
        async with page() as opened:
            assert await _drawn(opened, launch, width=390) >= OF_LAUNCH
            assert await opened.value(_CUT) == []
            signs = await opened.value(_SIGNS)
            assert [True, True] in signs and all(wide == marked for wide, marked in signs)
            assert await _drawn(opened, search, width=390) >= OF_SEARCH
            assert await opened.value(_CUT) == []

    asyncio.run(look())


def test_on_a_desk_every_chart_is_drawn_and_can_be_used(launch: Path, search: Path) -> None:
    async def use() -> None:
        async with page() as opened:
            assert await _drawn(opened, launch, width=1440) >= OF_LAUNCH
            light = await opened.value(_GROUND)
            assert await opened.value("document.title") != "broken"
            titles = await opened.value(_TITLES.replace("{}", "timeline"))
            assert sorted(titles) == ["in use, GiB", "since the attempt began, s"]
            await opened.value("document.querySelector('#pick-attempt button').click()")
            assert await opened.value(_TITLES.replace("{}", "parts")) == ["memory of attempt #1, MiB"]

            assert await _drawn(opened, search, width=1440, dark=True) >= OF_SEARCH
            assert await opened.value(_GROUND) != light
            speeds = "[...document.querySelectorAll('#trials tbody tr')].map(r => +r.cells[3].dataset.value)"
            before = await opened.value(speeds)
            await opened.value("document.querySelectorAll('#trials th')[3].click()")
            assert await opened.value(speeds) == sorted(before) != before
            await opened.value("document.querySelectorAll('#trials th')[3].click()")
            assert await opened.value(speeds) == sorted(before, reverse=True)
            assert opened.problems == []

    asyncio.run(use())


def test_without_scripts_verdict_story_and_evidence_are_readable(launch: Path) -> None:
    async def read() -> None:
        async with page() as opened:
            await opened.open(launch, width=1440, scripts=False)
            inner_text = "document.querySelector('#{}').innerText"
            assert "Training complete after 2 attempts" in await opened.value(inner_text.format("verdict"))
            assert "gpu-oom in backward" in await opened.value(inner_text.format("story"))
            assert "events.jsonl" in await opened.value(inner_text.format("evidence"))
            assert await opened.value("document.documentElement.dataset.drawn") is None

    asyncio.run(read())
