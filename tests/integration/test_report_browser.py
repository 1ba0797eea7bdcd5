"""The page in a real Chromium: nothing breaks out, nothing overflows, the timeline answers.

All tests share one tab of one Chromium: another takes as long as two pages. Each opens its page
anew, which keeps nothing that the next could see.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample
from lab.devtools import Browser, Tab
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.reports import sleeps_as_ranges

from clusterprof import merge_run
from clusterprof.ingest import find_sources, gather
from clusterprof.report import html, results_json
from clusterprof.results import Results, steps_to_look_at
from clusterprof.study import study

pytestmark = pytest.mark.needs_chromium

EVIL = "</script><img src=x onerror=\"document.title='owned';alert(1)\"><!--<script>"
#: before each script: short names, and how one waits for what the page does
_WORDS = """
  const page = document, view = window, $ = (selector) => document.querySelector(selector);
  const style = (selector) => getComputedStyle($(selector));
  const painted = async () => {
    for (const _ of "12") await new Promise((done) => requestAnimationFrame(done));
  };
  const until = async (holds) => {
    while (!holds()) await new Promise((done) => setTimeout(done, 10));
  };
  const arrived = (leave) => new Promise((done) => {
    addEventListener("hashchange", () => painted().then(done), {once: true});
    leave();
  });
"""


def returned(tab: Tab, script: str) -> Any:
    """What this body of a function returns in the tab's page."""
    return tab.script(f"(async () => {{ {_WORDS} {script} }})()")


@pytest.fixture(scope="module")
def only_tab(browser: Browser) -> Iterator[Tab]:
    """The tab in which all pages are opened."""
    with browser.tab() as opened:
        yield opened


@pytest.fixture
def tab(only_tab: Tab) -> Iterator[Tab]:
    """That tab as a new one, on whose console no page may complain."""
    only_tab.call("Emulation.setEmulatedMedia", media="", features=[])
    yield only_tab
    assert only_tab.complaints() == []


@pytest.fixture
def ask(tab: Tab, tmp_path: Path) -> Callable[..., Any]:
    """`ask(script, width=…)`: what the script returns in the page `report.html`."""

    def run(script: str, width: int = 1280) -> Any:
        tab.open(tmp_path / "report.html", width, 3000)
        return returned(tab, script)

    return run


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    html.write(path, html.render(sample.results(), sample.collectives(), title="runs/one"))
    return path


def test_a_hostile_name_stays_text_and_the_script_still_runs(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    results = sample.results(host=EVIL, operation=EVIL)
    results["verdict"] = EVIL
    results["findings"][0]["next"] = EVIL
    results["findings"][0]["evidence"] = [{EVIL: EVIL}]
    results["missing"][0]["reason"] = EVIL
    results["warnings"] = [EVIL]
    path = tmp_path / "report.html"
    html.write(path, html.render(results, sample.collectives(operation=EVIL), title=EVIL))
    page = ask("return page.documentElement.outerHTML")
    assert 'data-timeline="drawn"' in page
    assert "<img" not in page
    assert "<title>owned" not in page
    assert page.count("<script") == page.count('<script type="application/json"') + 1
    assert "&lt;img src=x onerror" in page


def test_a_hostile_name_stays_text_in_the_timelines_tooltip(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    table = sample.collectives(operation=EVIL)
    html.write(tmp_path / "report.html", html.render(sample.results(), table, title="x"))
    found = ask(
        """
        $("#canvas").dispatchEvent(new view.KeyboardEvent("keydown", {key: "ArrowRight"}));
        return {images: page.images.length, children: $("#tip").children.length,
                title: $("#tip b").textContent, page: page.title};
        """
    )
    assert found["images"] == 0
    assert found["children"] == 2
    assert found["title"].startswith(EVIL + " on rank")
    assert found["page"] == "x: clusterprof"


@pytest.mark.parametrize("width", long_but([400], [1280]))
@pytest.mark.usefixtures("report")
def test_the_page_never_scrolls_sideways(ask: Callable[..., Any], width: int) -> None:
    found = ask(
        """
        for (const each of page.querySelectorAll("details")) each.open = true;
        const out = [...page.querySelectorAll("main *")]
          .filter((each) => !each.closest(".box, svg, .unseen"))
          .filter((each) => each.getBoundingClientRect().right > view.innerWidth + 0.5)
          .map((each) => each.outerHTML.slice(0, 80));
        const wide = $("#clock .box"), first = wide.querySelector("tbody th");
        wide.scrollLeft = 200;
        const stays = first.getBoundingClientRect().left - wide.getBoundingClientRect().left;
        return {width: view.innerWidth, taken: page.documentElement.scrollWidth, out, stays};
        """,
        width=width,
    )
    assert found["width"] == width
    assert found["taken"] <= width
    assert found["out"] == []
    assert 0 <= found["stays"] < 3, "a table's first column stays when the rest is scrolled"


def test_long_names_do_not_widen_the_page(ask: Callable[..., Any], tmp_path: Path) -> None:
    results = sample.results(host="h" * 300, operation="O" * 300)
    results["verdict"] = "v" * 300
    results["findings"][0]["next"] = "n" * 300
    results["warnings"] = ["w" * 300]
    table = sample.collectives(operation="O" * 300)
    html.write(tmp_path / "report.html", html.render(results, table, title="t" * 300))
    found = ask("return page.documentElement.scrollWidth", width=400)
    assert found <= 400


@pytest.mark.usefixtures("report")
def test_the_page_fetches_nothing(ask: Callable[..., Any]) -> None:
    assert ask('return view.performance.getEntriesByType("resource").map((e) => e.name)') == []


def test_without_scripts_the_tables_are_there_and_a_sentence_for_the_timeline(
    tab: Tab, report: Path
) -> None:
    tab.open(report, 1280, 3000, scripts=False)
    found = returned(
        tab,
        """
        return {said: $("#timeline .unscripted").innerText, rows: page.querySelectorAll(
                  "#account tbody tr").length, map: style("#overview").display,
                canvas: style("#stage").display, tools: style(".tools").display,
                copy: style("button.copy").display, script: page.documentElement.className};
        """,
    )
    assert found["script"] == ""
    assert "did not run" in found["said"]
    assert found["rows"] >= 4
    assert {found[each] for each in ("map", "canvas", "tools", "copy")} == {"none"}


@pytest.mark.usefixtures("report")
def test_pointing_at_a_bar_tells_operation_bytes_wait_and_who_was_last(
    ask: Callable[..., Any],
) -> None:
    # In the typical step, half way into rank 0's long wait: its lane is the first.
    found = ask(
        """
        const canvas = $("#canvas"), box = canvas.getBoundingClientRect();
        const at = {clientX: box.left + box.width * 0.25, clientY: box.top + 48, bubbles: true};
        canvas.dispatchEvent(new view.PointerEvent("pointermove", at));
        const tip = $("#tip").getBoundingClientRect();
        const shown = {
          tip: $("#tip").innerText, visible: style("#tip").visibility, under: tip.top >= box.bottom,
        };
        canvas.dispatchEvent(new view.PointerEvent("pointerleave", {}));
        return {...shown, after: style("#tip").visibility};
        """
    )
    tip = " ".join(found["tip"].split())
    assert found["visible"] == "visible"
    assert found["after"] == "hidden"
    assert found["under"], "the tooltip must not hide the lanes"
    assert re.match(r"AllReduce .*rank 0 .*33\.6 MB .*step 8 ", tip)
    assert re.search(r"wait (19|20)\.\d{3} ms ±0\.0\d\d ms", tip)
    assert re.search(r"last rank 2, \w+ \d+\.\d{3} ms", tip)


@pytest.mark.usefixtures("report")
def test_the_keyboard_walks_from_call_to_call_and_rank_to_rank(ask: Callable[..., Any]) -> None:
    found = ask(
        """
        const texts = [];
        for (const key of ["ArrowRight", "ArrowDown", "ArrowRight"]) {
          $("#canvas").dispatchEvent(new view.KeyboardEvent("keydown", {key}));
          texts.push($("#announcement").textContent);
        }
        return texts;
        """
    )
    assert len(set(found)) == 3
    assert all(line.startswith("AllReduce on rank") for line in found)
    assert "number 24" in found[1]
    assert "number 25" in found[2]


@pytest.mark.usefixtures("report")
def test_choosing_a_step_and_zooming_change_what_is_drawn(ask: Callable[..., Any]) -> None:
    found = ask(
        """
        const step = $("#step"), frames = [];
        const options = [...step.options].map((option) => option.text);
        const take = async () => { await painted(); frames.push($("#canvas").toDataURL()); };
        const choose = (value) => { step.value = value; step.dispatchEvent(new Event("change")); };
        await take();
        choose("0");
        await take();
        $("#closer").click();
        await take();
        $("#later").click();
        await take();
        choose("2");
        await take();
        const same = frames.map((each) => frames.indexOf(each));
        return {options, frames: same, ink: frames[0].length};
        """
    )
    assert [int(n) for o in found["options"] for n in re.findall(r"\d+", o)] == [6, 7, 8, 9]
    assert len(found["options"]) == 5, "and all of them"
    assert found["frames"] == [0, 1, 2, 3, 0]
    assert found["ink"] > 5000


def in_scheme(tab: Tab, scheme: str) -> None:
    """As for a reader who prefers `light` or `dark`."""
    preferred = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=preferred)


def test_dark_mode_follows_the_reader(tab: Tab, report: Path) -> None:
    tab.open(report, 1280, 3000)
    brightness = {}
    for scheme in ("light", "dark"):
        in_scheme(tab, scheme)
        colour = returned(tab, "return getComputedStyle(page.body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", colour)))
    assert brightness["light"] > 600
    assert brightness["dark"] < 150


def test_on_paper_timeline_and_heatmap_are_light_and_fine_and_then_as_before(
    tab: Tab, report: Path
) -> None:
    tab.open(report, 1280, 900)
    in_scheme(tab, "dark")
    look = """
        await painted().then(painted);
        const canvas = $("#canvas"), copy = page.createElement("canvas");
        const ink = copy.getContext("2d", {willReadFrequently: true});
        ink.drawImage(canvas, 0, 0);  // its head is bare
        const fine = ["#heatmap", "#canvas"].map((each) => $(each).width / $(each).clientWidth);
        return [...fine.map(Math.round), ink.getImageData(4, 4, 1, 1).data[0]];
    """
    before = returned(tab, look)
    assert before[-1] < 60
    on_paper = returned(tab, f"""dispatchEvent(new Event("beforeprint")); {look}""")
    assert on_paper[:2] == [3, 3]
    assert on_paper[-1] > 240
    assert returned(tab, f"""dispatchEvent(new Event("afterprint")); {look}""") == before
    paper = base64.b64decode(tab.call("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    wide = [int(width) for width in re.findall(rb"/Subtype /Image\s*/Width (\d+)", paper)]
    assert max(wide) > 2000
    assert 2 <= len(re.findall(rb"/Type /Page\b", paper)) <= 6


def test_the_heatmap_answers_to_pointer_keys_and_buttons_and_leads_to_the_timeline(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    host = f"node {EVIL}"
    html.write(
        tmp_path / "report.html",
        html.render(sample.results(host=host), sample.collectives(), title="x"),
    )
    found = ask(
        """
        const canvas = $("#heatmap"), read = () => $("#heat-read").textContent;
        const first = read(), box = canvas.getBoundingClientRect();
        // the lowest row, near its end
        const at = {clientX: box.left + box.width * 0.3, clientY: box.bottom - 12, bubbles: true};
        canvas.dispatchEvent(new view.PointerEvent("pointermove", at));
        const pointed = read();
        const buttons = [...page.querySelectorAll("#heat-measures button")];
        const names = buttons.map((each) => each.textContent);
        buttons[1].click();
        const pressed = buttons.map((each) => each.getAttribute("aria-pressed"));
        const press = (key) => canvas.dispatchEvent(new view.KeyboardEvent("keydown", {key}));
        press("ArrowLeft");
        const most = read();
        press("ArrowUp");
        const above = read();
        press("Enter");
        return {first, pointed, names, pressed, most, above, hash: view.location.hash,
                images: page.images.length, drawn: page.documentElement.dataset.heatmap};
        """
    )
    assert found["drawn"] == "drawn"
    assert found["images"] == 0
    assert found["first"].startswith("highest: rank 2, step ")
    assert re.match(r"rank 3, step \d+.*: wait caused ", found["pointed"])
    assert found["names"][:4] == ["wait caused", "idle", "exposed wait", "step time"]
    assert found["pressed"][:2] == ["false", "true"]
    assert found["most"].startswith("rank 2, step ")
    assert found["above"].startswith("rank 1, step ")
    assert re.fullmatch(r"#timeline&rank=1&step=\d+", found["hash"])


@pytest.mark.usefixtures("report")
def test_what_the_profiler_disturbed_is_pale_in_the_heatmap(ask: Callable[..., Any]) -> None:
    found = ask(
        """
        const idle = [...page.querySelectorAll("#heat-measures button")]
          .find((each) => each.textContent === "idle");
        idle.click();
        const canvas = $("#heatmap"), ratio = view.devicePixelRatio;
        const copy = page.createElement("canvas");
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const ink = copy.getContext("2d", {willReadFrequently: true});
        ink.drawImage(canvas, 0, 0);
        // the third row of cells, beside their numbers; the first column's step is not steady
        const [left, wide] = [60, (canvas.width / ratio - 60) / 4];
        const cell = (row, column) => [...ink.getImageData(
          (left + (column + .25) * wide) * ratio, (22 + (row + .3) * 22) * ratio, 1, 1).data];
        return {disturbed: cell(2, 0), steady: cell(2, 1)};
        """
    )
    assert sum(found["disturbed"][:3]) > sum(found["steady"][:3]) + 150


@pytest.mark.usefixtures("report")
def test_idle_is_hatched_in_the_bars_and_headings_of_what_is_opened_are_printed(
    ask: Callable[..., Any], tab: Tab
) -> None:
    bars = ask(
        """
        return [...page.querySelectorAll("#account .ranked svg.bar")].map((bar) => {
          const own = view.getComputedStyle(bar);
          const wide = bar.getBoundingClientRect().width / bar.parentElement.clientWidth;
          return [own.backgroundImage, wide];
        });
        """
    )
    assert len(bars) == 4
    assert all(image.startswith("repeating-linear-gradient") for image, _ in bars)
    assert all(share > 0.5 for _, share in bars)
    tab.call("Emulation.setEmulatedMedia", media="print")
    shown = returned(
        tab,
        """
        dispatchEvent(new Event("beforeprint"));
        return [...page.querySelectorAll(".finding summary, #explanations summary")]
          .map((each) => getComputedStyle(each).display);
        """,
    )
    assert shown
    assert "none" not in shown


def many(ranks: int) -> Results:
    """The sample's results of so many ranks, eight on a host; rank 2 is the straggler."""
    results = sample.results()
    for step in results["steps"]:
        step["ranks"] = [sample.account(rank, late=rank == 2) for rank in range(ranks)]
    one, clock = results["ranks"][0], results["clock"]["ranks"][1]
    results["ranks"] = [
        {**one, "rank": rank, "host": f"gpu-{rank // 8:02}", "world_size": ranks}
        for rank in range(ranks)
    ]
    results["clock"]["ranks"] = [{**clock, "rank": rank} for rank in range(ranks)]
    return results


def test_a_long_table_shows_both_ends_and_finds_sorts_and_filters_all_its_rows(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    table = sample.collectives(ranks=40)
    html.write(tmp_path / "report.html", html.render(many(40), table, title="x"))
    found = ask(
        """
        const body = $("#account tbody"), tools = $("#account .ranked .tools");
        const ranks = () => [...body.rows].map((row) => row.cells[0].textContent);
        const first = ranks();
        const [all, named] = tools.querySelectorAll("input[type=checkbox]");
        all.click();
        const shown = ranks();
        const head = [...page.querySelectorAll("#account .ranked th[scope=col]")].at(-4);
        head.querySelector("button").click();
        const sorted = [head.getAttribute("aria-sort"), ...ranks().slice(0, 2)];
        all.click();
        const search = tools.querySelector("input[type=search]");
        const look = async (text) => {
          const before = String(ranks());
          search.value = text;
          search.dispatchEvent(new Event("input"));
          await until(() => String(ranks()) !== before);
          return ranks();
        };
        const spans = await look("8-9, 30"), host = await look("GPU-03"), none = await look("no");
        await look("");
        named.click();
        return {first, shown, sorted, spans, host, none, named: ranks()};
        """
    )
    assert len(found["first"]) == 17
    # it waits least of all
    assert found["first"][0] == "2"
    assert found["first"][8].startswith("24 more ranks between these by exposed wait")
    assert sorted(map(int, found["shown"])) == [*range(40)]
    assert found["sorted"] == ["descending", "39", "38"]
    assert sorted(found["spans"]) == ["30", "8", "9"]
    assert sorted(map(int, found["host"])) == [*range(24, 32)]
    assert found["none"] == []
    assert found["named"] == ["2"]


def test_a_table_is_downloaded_whole_and_no_name_becomes_a_formula(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    results = many(40)
    results["ranks"][20]["device"] = '=cmd|"x"'
    html.write(
        tmp_path / "report.html", html.render(results, sample.collectives(ranks=40), title="x")
    )
    found = ask(
        """
        const saved = [];
        view.URL.createObjectURL = (blob) => { saved.push(blob); return "#"; };
        view.HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
        $("#clock .csv").click();
        return {name: saved[1], text: await saved[0].text()};
        """
    )
    assert found["name"] == "clocks-of-ranks.csv"
    lines = found["text"].split("\r\n")
    assert len(lines) == 42
    assert sum('"\'=cmd|""x"""' in line for line in lines) == 1


@pytest.mark.usefixtures("report")
def test_results_and_their_parts_can_be_saved_from_the_page(ask: Callable[..., Any]) -> None:
    found = ask(
        """
        const saved = {}, blobs = [];
        view.URL.createObjectURL = (blob) => { blobs.push(blob); return "#"; };
        const click = function () { saved[this.download] = blobs.pop(); };
        view.HTMLAnchorElement.prototype.click = click;
        for (const button of page.querySelectorAll("#downloads button")) {
          const name = button.textContent.split(" ")[0];
          button.click();
          await until(() => saved[name]);
          saved[name] = await saved[name].text();
        }
        return saved;
        """
    )
    assert found["results.json"].encode() == results_json.dumps(sample.results())
    assert found["findings.csv"].splitlines()[1].startswith("straggler.host,critical,2,7 8 9,")
    steps = found["steps.csv"].splitlines()
    assert ",rank,duration_ns,compute_ns," in steps[0]
    assert len(steps) == 1 + 4 * 4
    assert found["collectives.csv"].splitlines()[1].startswith("AllReduce,0x55e1a2b3c4d5e6f7,")


def test_the_timeline_is_saved_as_a_trace_that_perfetto_opens(
    ask: Callable[..., Any], straggler_page: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_bytes(straggler_page.read_bytes())
    made = json.loads(
        ask(
            """
            const blobs = [], button = [...page.querySelectorAll("#downloads button")].pop();
            view.URL.createObjectURL = (blob) => { blobs.push(blob); return "#"; };
            view.HTMLAnchorElement.prototype.click = () => {};
            button.click();
            await until(() => blobs.length);
            return blobs[0].text();
            """
        )
    )
    events = made["traceEvents"]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"
    }
    ranks = {key[1]: name for key, name in names.items() if key[0] == "process_name"}
    assert [*ranks.values()] == [f"rank {rank} · vm" for rank in range(4)]
    rows = {key[1:]: name for key, name in names.items() if key[0] == "thread_name"}
    assert set(rows.values()) == {"phases", "host", "host 2", "device", "data"}
    slices = [e for e in events if e["ph"] == "X"]
    sleeps = [e for e in slices if e["name"] == "clock_nanosleep"]
    steady = [e for e in sleeps if 19_000 < e["dur"] < 21_000]
    assert {(ranks[e["pid"]], rows[e["pid"], e["tid"]]) for e in steady} == {
        ("rank 2 · vm", "host")
    }
    assert len(steady) >= len(made["otherData"]["steps"]) - 1
    # what stands in one line is drawn one behind the other
    ends: dict[tuple[int, int], float] = {}
    for each in sorted(slices, key=lambda e: e["ts"]):
        line = each["pid"], each["tid"]
        assert each["ts"] >= ends.get(line, 0) - 1.1, each
        ends[line] = each["ts"] + each["dur"]


@pytest.fixture(scope="module")
def straggler_page(recordings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a recording whose rank 2 sleeps before each step."""
    made = study(gather(find_sources([recordings / "nsys-2025.3/ddp-host-straggler"])).ranks)
    page = tmp_path_factory.mktemp("page") / "report.html"
    merge_run.write_page(made, page, "straggler")
    return page


#: what is in the details after the address of the page has changed
_DETAILS = """
    const canvas = $("#canvas");
    const details = async (hash) => {
      await arrived(() => { view.location.hash = hash; });
      return $("#details").innerText;
    };
"""


def test_the_address_leads_to_the_sleep_of_the_straggler_and_a_click_says_the_same(
    ask: Callable[..., Any], straggler_page: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_bytes(straggler_page.read_bytes())
    found = ask(
        _DETAILS
        + """
        const asked = await details("#timeline&step=8&rank=2&row=1&at=5");
        const link = $("#details a[href^='#timeline']").getAttribute("href");
        const finding = $("#details a[href^='#finding']").textContent;
        const idle = await details("#timeline&step=8&rank=2&row=3&at=9");
        const alone = await details("#timeline&step=8&rank=2");
        await arrived(() => { view.location.hash = "#timeline&step=8"; });
        $("#reset").click();
        const box = canvas.getBoundingClientRect();
        // the third lane's second row: its host
        const at = {clientX: box.left + 170, clientY: box.top + 40 + 2 * 87 + 22, bubbles: true};
        canvas.dispatchEvent(new view.PointerEvent("pointermove", at));
        const tip = $("#tip").innerText;
        canvas.dispatchEvent(new view.PointerEvent("pointerdown", at));
        canvas.dispatchEvent(new view.PointerEvent("pointerup", at));
        const clicked = $("#details").innerText;
        await until(() => view.location.hash.includes("&row="));
        return {asked, link, finding, idle, alone, tip, clicked, hash: view.location.hash};
        """
    )
    for details in (found["asked"], found["tip"], found["clicked"]):
        text = " ".join(details.split())
        assert text.startswith("clock_nanosleep on rank 2 ")
        assert re.search(r"length 20\.\d{3} ms", text)
        assert "phase data" in text
        assert re.search(r"device meanwhile idle 1\d\.\d\d ms", text)
    assert found["finding"] == "straggler.host"
    assert re.match(r"#timeline&step=8(&with=9)?&rank=2&row=1&of=8&at=", found["link"])
    assert re.match(r"#timeline&step=8.*&rank=2&row=1", found["hash"])
    idle = " ".join(found["idle"].split())
    assert idle.startswith("idle on rank 2 ")
    assert "host meanwhile clock_nanosleep" in idle
    assert found["alone"].startswith("clock_nanosleep on rank 2")


def test_a_rank_s_address_leads_to_the_range_in_which_its_host_makes_no_call(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    ranks, _ = simulate(Job(causes=(Cause("host", 2, 12_000_000),)))
    ranks[2] = sleeps_as_ranges(ranks[2], {"forward": -20_000, "sparse": 0})
    made = study(ranks)
    merge_run.write_page(made, tmp_path / "report.html", "x")
    step = steps_to_look_at(made.results)[0]
    found = ask(_DETAILS + f"""return details("#timeline&step={step}&rank=2");""")
    assert found.startswith("sparse on rank 2")
    assert "phase\nforward" in found


def test_pointing_draws_the_calls_and_not_the_spans_again(tab: Tab, straggler_page: Path) -> None:
    tab.open(straggler_page, 1280, 900)
    found = returned(
        tab,
        """
              const canvas = $("#canvas"), frames = [], rectangles = [];
              let count = 0;
              const of = CanvasRenderingContext2D.prototype, fill = of.fillRect;
              of.fillRect = function (...at) {
                if (this.canvas === canvas) count++;
                return fill.apply(this, at);
              };
              const drawn = async () => {
                await painted();
                frames.push(canvas.toDataURL());
                rectangles.push(count);
                count = 0;
              };
              const box = canvas.getBoundingClientRect();
              const move = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type,
                {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
              document.getElementById("closer").click();
              await drawn();
              document.getElementById("reset").click();
              await drawn();
              move("pointermove", 170, 40 + 2 * 87 + 22);
              await drawn();
              move("pointerleave", 0, 0);
              await drawn();
              return {frames: frames.map((each) => frames.indexOf(each)), rectangles};
        """,
    )
    zoomed, whole, pointed, left = found["rectangles"]
    assert found["frames"] == [0, 1, 2, 1]
    assert max(pointed, left) < min(zoomed, whole) / 4


def test_findings_lead_to_ranks_and_moments_and_codes_to_what_they_mean(
    ask: Callable[..., Any], straggler_page: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_bytes(straggler_page.read_bytes())
    found = ask(
        """
        const links = [...page.querySelectorAll("a[href]")].map((a) => a.getAttribute("href"));
        const bare = links.filter((each) => !each.startsWith("#timeline"));
        const missing = bare.filter((each) => !page.getElementById(each.slice(1)));
        await arrived(() => $("#finding-1 h3 a.code").click());
        const meaning = page.getElementById("code-straggler.host");
        await arrived(() => $("#finding-1 td a").click());
        return {missing, moments: links.length - bare.length, open: meaning.open,
                text: meaning.innerText, pinned: $("#details b").textContent};
        """
    )
    assert found["missing"] == []
    assert found["moments"] > 3
    assert found["open"]
    assert "When it is wrong" in found["text"]
    assert "on rank " in found["pinned"]


def test_of_many_ranks_lanes_are_chosen_by_name_number_and_host(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    html.write(
        tmp_path / "report.html", html.render(many(120), sample.collectives(ranks=120), title="x")
    )
    found = ask(
        """
        const preset = $("#preset"), search = $("#search");
        const names = [...preset.options].map((each) => each.text);
        const find = (text) => {
          search.value = text;
          search.dispatchEvent(new Event("change"));
          return [preset.selectedOptions[0].text, search.getAttribute("aria-invalid")];
        };
        const answers = [find("3-5, 9"), find("gpu-02"), find("nothing")];
        preset.value = String(names.findIndex((each) => each.startsWith("all ranks")));
        preset.dispatchEvent(new Event("change"));
        const tall = [$("#canvas").getBoundingClientRect().height, $("#lanes").scrollHeight];
        $("#canvas").dispatchEvent(new view.KeyboardEvent("keydown", {key: "?", bubbles: true}));
        return {names, answers, tall, help: $("#help").open, keys: $("#help").innerText};
        """
    )
    assert found["names"][0] == "stragglers and peers (8)"
    assert "one rank per host (15)" in found["names"]
    assert found["answers"] == [
        ["selected ranks (4)", "false"],
        ["selected ranks (8)", "false"],
        ["selected ranks (0)", "true"],
    ]
    canvas, whole = found["tall"]
    assert canvas < whole, "the lanes scroll below their axis"
    assert found["help"]
    assert "measure" in found["keys"]


@pytest.mark.usefixtures("report")
def test_ticking_findings_off_shows_the_step_that_the_replay_leaves(
    ask: Callable[..., Any],
) -> None:
    found = ask(
        """
        const texts = [], boxes = [...page.querySelectorAll("#what-if input")];
        for (const box of [boxes[0], boxes[1], boxes[0]]) {
          box.click();
          texts.push($(".remains").textContent);
        }
        return texts;
        """
    )
    assert [" ".join(text.split()) for text in found] == [
        "43.7 ms per step instead of 61.6 ms, 29% less",
        "40.8 ms per step instead of 61.6 ms, 34% less",
        "60.1 ms per step instead of 61.6 ms, 2.4% less",
    ]


# --- accessible to all

#: every rule of axe (RULES: or of some) that the page breaks as it stands, and with the glossary
_CHECKED = """
  const where = (each) => each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200));
  const broken = async () =>
    (await axe.run(RULES)).violations.map((each) => `${each.id}: ${where(each).join(" | ")}`);
  const found = await broken();
  $("#helps").click();
  found.push(...await broken());
  return found;
"""
#: in the dark nothing but the colours is another
_RULES = {"light": "{}", "dark": '{runOnly: ["color-contrast"]}'}


@pytest.fixture
def pipeline_page(recordings: Path, tmp_path: Path) -> Path:
    """The page of a recording whose ranks have stages."""
    made = study(gather(find_sources([recordings / "nsys-2024.2/pipeline"])).ranks)
    merge_run.write_page(made, tmp_path / "report.html", "pipeline")
    return tmp_path / "report.html"


@pytest.mark.parametrize("name", long_but(["straggler_page"], ["pipeline_page"]))
def test_axe_finds_no_barrier_on_the_page_in_light_and_in_dark(
    tab: Tab, request: pytest.FixtureRequest, name: str
) -> None:
    page: Path = request.getfixturevalue(name)
    package = find_spec("axe_playwright_python")
    assert package is not None
    assert package.submodule_search_locations is not None
    axe = (Path(package.submodule_search_locations[0]) / "axe.min.js").read_text("utf-8")
    for scheme, rules in _RULES.items():
        in_scheme(tab, scheme)
        tab.open(page, 1280, 900)
        tab.script(f"{axe};true")
        assert returned(tab, _CHECKED.replace("RULES", rules)) == [], scheme


# --- fingers, in real time


def test_two_fingers_zoom_the_timeline_about_the_moments_below_them(
    tab: Tab, straggler_page: Path
) -> None:
    tab.open(straggler_page, 390, 844, touch=True)
    top = tab.script(
        """(() => {
          const canvas = document.getElementById("canvas");
          canvas.scrollIntoView({block: "center"});
          const box = canvas.getBoundingClientRect();
          return box.top + 90;
        })()"""
    )
    # the panel, as timeline.js places it on a narrow screen
    left, wide = tab.script(
        "[document.getElementById('canvas').getBoundingClientRect().left + 106,"
        " document.getElementById('drawing').clientWidth - 106 - 8]"
    )
    tab.fingers("touchStart", (left + 0.4 * wide, top))
    for kind, out in [("touchStart", 0.0), *(("touchMove", part) for part in (0.1, 0.15, 0.2))]:
        places = [(left + share * wide, top) for share in (0.4 - out, 0.6 + out)]
        tab.fingers(kind, *places)
    tab.fingers("touchEnd")
    found = returned(
        tab,
        """
        const number = name => +location.hash.match(`&${name}=([0-9.-]+)`)?.[1];
        await until(() => 2.5 * (number("to") - number("from")) < 48.8);  // the last move is in it
        await painted();
        return {hash: location.hash, pinned: !$("#details").hidden,
                shown: style("#tip").visibility, zoom: visualViewport.scale};
        """,
    )
    state = dict(re.findall(r"&(\w+)=([\d.-]+)", found["hash"]))
    view = float(state["from"]), float(state["to"])
    # what lay between the fingers, a fifth of the view, takes three fifths now
    whole = 3 * (view[1] - view[0])
    assert whole == pytest.approx(48.8 * 1.02, rel=0.05)
    assert view[0] == pytest.approx(whole / 3, rel=0.03)
    # the page itself is not enlarged, and nothing was clicked
    assert (found["zoom"], found["pinned"], found["shown"]) == (1, False, "hidden")
