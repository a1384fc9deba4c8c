"""The page in a real browser: no complaint, no request, marks in every chart, mouse and keyboard, accessibility."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailopt.cli.main import main
from tests.report import browser, small_reports

CHARTS = "[...document.querySelectorAll('figure.chart')]"
TITLES = f"{CHARTS}.map(figure => figure.querySelector('h3').textContent)"


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Tab]:
    with browser.tab() as page:
        page.size(1280, 900)
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser.program()
    folder = tmp_path_factory.mktemp("report")
    small_reports.everything(folder / "all")
    assert main(["report", str(folder / "all"), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_complaint_or_a_request(tab: browser.Tab, report: Path, scheme: str) -> None:
    tab.scheme(scheme)
    tab.open(report)
    assert tab.complaints() == []
    assert tab.requests() == [report.resolve().as_uri()]
    bright = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    assert (sum(tab.value(bright)) > 3 * 128) == (scheme == "light")


def test_every_chart_has_marks(tab: browser.Tab, report: Path) -> None:
    tab.open(report)
    tab.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    settle(tab)
    empty = f"{CHARTS}.filter(figure => !figure.querySelector('svg .mark')).map(figure => figure.textContent)"
    assert tab.value(empty) == []
    titles = tab.value(TITLES)
    expected = [
        "error", "loss", "accuracy", "Share of coordinates cut to u", "Share of coordinates raised to d",
        "Share of coordinates exactly 0", "Largest magnitude of a gradient", "Where the time went", "Seconds per round",
        "Bytes sent by node 0 per round", "best error", "All points; the best one stands out",
        "MRPC: loss, mean over seeds", "MRPC: the best of so many points, on the tuning seeds",
    ]  # fmt: skip
    assert not {*expected} - {*titles}
    for start in ("Cut to u, by layer", "Raised to d, by layer", "Round ", "Who took part in"):
        assert any(title.startswith(start) for title in titles), start
    paths = "[...document.querySelectorAll('figure.chart path')].map(path => path.getAttribute('d') || '')"
    assert not [path for path in tab.value(paths) if "NaN" in path or "Infinity" in path]


def shown(tab: browser.Tab) -> list[str]:
    """The runs that are selected."""
    return list(tab.value("[...document.querySelectorAll('input[data-run]:checked')].map(b => b.ariaLabel)"))


def lines_of_the_loss(tab: browser.Tab) -> int:
    loss = f"{CHARTS}.find(figure => figure.querySelector('h3').textContent === 'loss')"
    return int(tab.value(f"{loss} ? {loss}.querySelectorAll('path.line').length : 0"))


def settle(tab: browser.Tab) -> None:
    """Wait for two frames: charts are drawn when their size is known."""
    tab.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")


def test_runs_are_selected_by_mouse(tab: browser.Tab, report: Path) -> None:
    tab.open(report)
    before, lines = shown(tab), lines_of_the_loss(tab)
    assert len(before) == 5
    tab.click("input[data-run='0']")
    settle(tab)
    assert shown(tab) == before[1:] and 0 < lines_of_the_loss(tab) < lines
    tab.click("input[data-run='0']")
    settle(tab)
    assert shown(tab) == before and lines_of_the_loss(tab) == lines


def test_runs_are_selected_by_keyboard(tab: browser.Tab, report: Path) -> None:
    tab.open(report)
    before, lines = shown(tab), lines_of_the_loss(tab)
    for _ in range(12):
        tab.press("Tab")
        if tab.value("document.activeElement.dataset.run") == "0":
            break
    else:
        raise AssertionError("Tab does not lead to the first run")
    tab.press(" ", " ")
    settle(tab)
    assert shown(tab) == before[1:] and lines_of_the_loss(tab) < lines
    assert tab.value("document.activeElement.dataset.run") == "0", "the focus is lost when the page is drawn again"
    tab.press("Tab")
    tab.press(" ", " ")
    settle(tab)
    assert shown(tab) == before[2:]


def test_the_mouse_and_the_arrow_keys_read_a_chart(tab: browser.Tab, report: Path) -> None:
    tab.open(report)
    loss = f"{CHARTS}.find(figure => figure.querySelector('h3').textContent === 'loss').querySelector('svg')"
    box = tab.value(f"(() => {{ const s = {loss}; s.scrollIntoView({{block: 'center'}}); "
                    "const b = s.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] })()")  # fmt: skip
    tab.move(box[0] + box[2] / 2, box[1] + box[3] / 2)
    tip = "document.getElementById('tip')"
    assert tab.value(f"{tip}.hidden") is False
    assert tab.value(f"{tip}.textContent").startswith("round ")
    tab.move(5, 5)
    assert tab.value(f"{tip}.hidden") is True
    tab.value(f"{loss}.focus()")
    tab.press("Home")
    assert tab.value(f"{tip}.querySelector('strong').textContent").strip() == "round 1"
    tab.press("ArrowRight")
    assert tab.value(f"{tip}.querySelector('strong').textContent").strip() == "round 2"
    assert "round 2" in tab.value("document.getElementById('said').textContent")
    tab.press("Escape")
    assert tab.value(f"{tip}.hidden") is True


def test_axes_are_linear_or_logarithmic(tab: browser.Tab, report: Path) -> None:
    tab.open(report)
    loss = f"{CHARTS}.find(figure => figure.querySelector('h3').textContent === 'loss')"
    path = f"{loss}.querySelector('path.line').getAttribute('d')"

    def choose(kind: str) -> str:
        tab.value(f"(() => {{ const s = [...document.querySelectorAll('select')].find(s => s.textContent.includes("
                  f"'logarithmic')); s.value = '{kind}'; s.dispatchEvent(new Event('change')) }})()")  # fmt: skip
        settle(tab)
        return str(tab.value(path))

    assert choose("linear") != choose("logarithmic")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(tab: browser.Tab, report: Path, scheme: str) -> None:
    file = os.environ.get("TAILOPT_AXE", "")
    if not file:
        pytest.skip("TAILOPT_AXE does not name axe.min.js: npm pack axe-core, and unpack it")
    tab.scheme(scheme)
    tab.open(report)
    tab.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    settle(tab)
    tab.value(Path(file).read_text(encoding="utf-8") + "; 0")
    each = "v => [v.impact, v.id, v.nodes.length, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary]"
    found = tab.value(f"axe.run().then(r => r.violations.map({each}))")
    assert [violation for violation in found if violation[0] in ("serious", "critical")] == []


def test_hostile_names_stay_text(tab: browser.Tab, tmp_path: Path) -> None:
    hostile = small_reports.HOSTILE
    folder = tmp_path / hostile.replace("/", "∕")
    run = small_reports.recorded(
        folder, 3, algorithm=hostile, task={"name": hostile}, more={hostile: hostile, "__proto__": "x"}
    )
    assert run.config["algorithm"]["name"] == hostile
    row = {"round": 4, "loss": 1.0, "participants": [0], "steps": [1], "weights": [0.0], "metrics": {hostile: 1.0}}
    left_out = {"node": 0, "tensor": hostile, "value": 1.0, "bound": None, "reason": hostile}
    counts = {"elements": 4, "zero": 0, "below": 1, "above": 1, "nonfinite": 0, "squares": 1.0, "largest": 1.0}
    run.append({**row, "excluded": [left_out], "statistics": {hostile: counts}}, {"local": 0.5, hostile: 1.0})
    study = tmp_path / "study"
    small_reports.study(study)
    (study / "table.md").write_text(
        f"# {hostile}\n\n| {hostile} | b |\n| --- | --- |\n| 1 | {hostile} |\n\n{hostile}\n"
    )
    out = tmp_path / "report.html"
    assert main(["report", str(folder), str(study), "--out", str(out), "--title", hostile]) == 0
    tab.open(out)
    assert tab.complaints() == [] and tab.requests() == [out.resolve().as_uri()]
    assert tab.value("document.title") == hostile
    assert tab.value("document.querySelectorAll('img').length") == 0
    assert tab.value("document.querySelectorAll('script').length") == 2
    assert tab.value("document.querySelector('h1').textContent") == hostile
    assert hostile in tab.value("document.getElementById('main').textContent")


def test_the_policy_of_the_page_stops_other_scripts(tab: browser.Tab, report: Path, tmp_path: Path) -> None:
    """If a text ever became markup, its script would not run."""
    page = report.read_text(encoding="utf-8").replace("<main", "<script>document.title = 'broken'</script><main", 1)
    (tmp_path / "changed.html").write_text(page, encoding="utf-8")
    tab.open(tmp_path / "changed.html")
    assert tab.value("document.title") != "broken"
    assert any("Content Security Policy" in text for text in tab.complaints())


def test_a_run_of_ten_thousand_rounds_opens_within_three_seconds(tab: browser.Tab, tmp_path: Path) -> None:
    small_reports.recorded(tmp_path / "run", 10_000, nodes=10)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert tab.open(out) < 3.0
    assert tab.complaints() == []
    x = json.loads(tab.value("JSON.stringify(JSON.parse(document.getElementById('data').textContent).runs[0].rounds)"))
    assert x == 10_000


def test_a_run_without_rounds_and_one_without_anything_to_show(tab: browser.Tab, tmp_path: Path) -> None:
    from tailopt.records.folder import Run

    config: dict[str, Any] = {"algorithm": "avg-sgd"}
    Run.create(tmp_path / "empty", config, {})
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "empty"), "--out", str(out)]) == 0
    tab.open(out)
    assert tab.complaints() == []
    assert "empty" in tab.value("document.getElementById('main').textContent")
