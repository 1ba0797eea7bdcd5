"""The page as a file: what it says, that it is one file, and that names stay names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import report_sample as sample

from clusterprof import words
from clusterprof.report import html, text
from clusterprof.report.summary import Summary
from clusterprof.results import UNBOUNDED_NS, Finding
from clusterprof.tables import SPANS

EVIL = "</script><img src=x onerror=alert(1)><!--<script>"


class _Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _render(**names: str) -> str:
    operation = names.get("operation", "AllReduce")
    return html.render(
        sample.results(**names), sample.collectives(operation=operation), title="runs/one"
    )


def _tiles(page: str) -> list[tuple[str, str]]:
    """Value and remark of each of the four boxes at the top."""
    found = re.findall(r'<div><dt>.*?</dt><dd class="big[^>]*>(.*?)</dd><dd>(.*?)</dd></div>', page)
    return [(re.sub("<.*?>", "", value), more) for value, more in found]


def test_the_page_begins_with_who_it_is_what_it_costs_what_is_saved_and_the_confidence() -> None:
    page = _render()
    who, cost, saved, confidence = _tiles(page)
    assert who == ("rank 2", "straggler on gpu-07, straggler.host")
    # 29.01% of what eight GPUs do
    assert cost == ("29% of each step", "as much as losing 2.3 of 8 GPUs")
    assert saved == ("17.9 ms ±1.2", "per step: 61.6 ms → 43.7 ms")
    assert confidence[0] == "97%"
    assert confidence[1] == "4 of 5 reports, 3 steady-state steps (7–9), between clocks ±17 µs"
    (missing,) = sample.results()["missing"]
    assert f"rank 4: {missing['reason']}" in _Page(page).text.partition("Findings")[0]


def test_the_boxes_are_about_the_finding_that_the_verdict_begins_with() -> None:
    results = sample.results()
    straggler, copies = results["findings"]
    copies["saved_ns_per_step"], copies["share_of_step"] = 40_000_000, 0.65
    copies["summary"] = "Copying costs 40.0 ms of each 61.6 ms step (65%). It is slow."
    straggler["summary"] = "Rank 2 delays the other ranks by 17.9 ms of each 61.6 ms step (29%)."
    also = f"Also, r{straggler['summary'][1:]}"
    sample.say(results, (copies, copies["summary"][:-12]), (straggler, also))
    page = html.render(results, sample.collectives(), title="x")
    who, cost, *_ = _tiles(page)
    assert who == ("all 4 profiled ranks", "no single straggler, input.pageable_copy")
    assert cost[0] == "65% of each step"
    sample.say(results, (straggler, straggler["summary"]))
    page = html.render(results, sample.collectives(), title="x")
    assert _tiles(page)[0][0] == "rank 2"


def test_without_findings_the_confidence_is_the_number_of_steps() -> None:
    results = sample.results()
    own = {"code": "profiler.perturbation", "severity": "info", "saved_ns_per_step": 0}
    results["findings"] = [sample.pageable() | own]
    sample.say(results, (None, "No findings above severity info in 3 steady-state steps."))
    page = html.render(results, sample.collectives(), title="x")
    assert _tiles(page)[3] == (
        "3 steps", "4 of 5 reports, in steady state (7–9), between clocks ±17 µs"
    )  # fmt: skip
    # the verdict says that there is one of severity info, which stands further down
    assert "No findings but what the profiler cost" in _Page(page).text
    results["findings"] = []
    assert "No findings." in _Page(html.render(results, sample.collectives(), title="x")).text


def test_the_finding_is_the_headline_and_not_that_there_is_no_straggler() -> None:
    results = sample.results()
    results["findings"] = [sample.pageable()]
    results["findings"][0]["summary"] = "Launch-bound: hosts are slow, 5.20 ms of each step (14%)."
    found = results["findings"][0]
    sample.say(results, (None, "No stragglers."), (found, found["summary"]))
    page = html.render(results, sample.collectives(), title="x")
    assert "<h1><span>Launch-bound: hosts are slow, 5.20 ms of each step (14%).</span>" in page
    assert "<span>No stragglers.</span></h1>" in page


def test_the_what_if_panel_has_the_replay_s_numbers_and_none_for_one_finding() -> None:
    page = _render()
    assert page.count('type="checkbox" data-bit') == 2
    assert "alone: 43.7 ms" in page
    assert "Without all of them: 40.8 ms" in _Page(page).text
    results = sample.results()
    assert results["combined"] is not None
    for key in ("findings", "remaining_ns"):
        results["combined"][key] = results["combined"][key][: 1 if key == "findings" else 2]  # type: ignore[literal-required]
    assert 'id="what-if"' not in html.render(results, sample.collectives(), title="x")


def test_a_straggler_by_flight_recorders_alone_costs_at_most_what_others_wait() -> None:
    results = sample.results()
    own = sample.straggler()
    own |= {"code": "straggler.shallow", "severity": "info", "share_of_step": 0.0}
    own |= {"saved_ns_per_step": 0, "saving": None, "confidence": 0.6}
    own["summary"] = "Rank 2 may delay the other ranks."
    sample.say(results, (own, own["summary"]))
    results["findings"], results["ranks"], results["steps"] = [own], [], []
    results["missing"], results["pace"], results["combined"] = [], None, None
    page = html.render(results, sample.collectives().slice(0, 0), title="x")
    who, cost, saved, confidence = _tiles(page)
    assert who == ("rank 2", "straggler on node0, straggler.shallow")
    assert cost == ("at most 28%", "others wait 17.0 ms per step for it")
    assert saved == ("unknown", "a profile of the rank would tell")
    assert confidence == ("60%", "flight recorders of 7 ranks, steps 7–10")
    # nothing of reports that there are not
    assert "No rank was profiled, so there is no timeline." in page
    assert not {"Ranks and clocks", "By operation"} & {*re.findall("<h[23][^>]*>(.*?)</h", page)}
    # where it surely delays the others the box and the card agree
    own |= {"severity": "critical", "share_of_step": 0.28, "saved_ns_per_step": 17_000_000}
    page = html.render(results, sample.collectives().slice(0, 0), title="x")
    assert results["shallow"] is not None
    assert _tiles(page)[2][0].startswith("17.0 ms")
    # of the step that its share is of, and not of the window's
    own["share_of_step"] = 17 / 91
    page = html.render(results, sample.collectives().slice(0, 0), title="x")
    assert _tiles(page)[2][1].startswith("per step: 91.0 ms → 74.0 ms")
    assert Summary(results).stragglers(unprofiled=True) == [2]
    assert Summary(results).stragglers() == []


def test_forty_findings_of_one_code_are_one_card_with_a_table() -> None:
    results = sample.results()
    more: list[Finding] = []
    for rank in range(40):
        own = sample.straggler() | {"code": "straggler.shallow", "severity": "info", "saving": None}
        own |= {"rank": rank, "ranks": [rank], "saved_ns_per_step": 0, "share_of_step": 0.0}
        more.append(own | {"summary": f"Rank {rank} may delay the other ranks {EVIL}."})  # type: ignore[arg-type]
    results["findings"] += more
    page = html.render(results, sample.collectives(), title="x")
    cards = re.findall(r'<article class="finding (\w+)" id="finding-(\d+)">', page)
    assert cards == [("critical", "1"), ("warning", "2"), ("info", "3")]
    assert "39 more findings of this kind: ranks 1–39<" in page
    rows = re.findall(r'<tr id="finding-(\d+)">', page)
    assert rows == [str(number) for number in range(4, 43)]
    assert "Rank 39 may delay the other ranks" in page
    # two or three stand as they are
    results["findings"] = results["findings"][:5]
    page = html.render(results, sample.collectives(), title="x")
    assert len(re.findall(r'<article class="finding', page)) == 5


def test_a_finding_without_moments_leads_to_a_step_and_a_rank_that_it_names() -> None:
    results = sample.results()
    results["findings"] = [sample.pageable() | {"evidence": [], "steps": [9], "ranks": [3]}]
    page = html.render(results, sample.collectives(), title="x")
    assert page.count('href="#timeline&amp;step=9&amp;rank=3"') >= 1
    results["findings"][0]["ranks"] = [77]
    assert "#timeline&amp;step" not in html.render(results, sample.collectives(), title="x")


def test_the_first_finding_does_not_repeat_the_verdict() -> None:
    results = sample.results()
    sentence = "Rank 2 delays the other ranks by 17.9 ms of each 61.6 ms step."
    results["findings"][0]["summary"] = f"{sentence} Cause: it sleeps (clock_nanosleep). Twice."
    found = results["findings"][0]
    sample.say(results, (found, sentence), (found, "Cause: it sleeps."))
    page = html.render(results, sample.collectives(), title="x")
    assert _Page(page).text.count(sentence) == 1
    assert '<p class="summary">Twice.</p>' in page
    assert f"<h1><span>{sentence}</span> <span>Cause: it sleeps.</span></h1>" in page


def test_findings_stand_before_tables_clock_and_warnings() -> None:
    page = _render()
    places = [
        page.index(f'id="{name}"')
        for name in ("findings", "account", "timeline", "clock", "warnings")
    ]
    assert places == sorted(places)
    assert page.index("straggler.host") < page.index("input.pageable_copy")


def test_the_page_loads_nothing_from_anywhere() -> None:
    page = _Page(_render())
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "srcset", "data"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), "links stay on the page"
    policy = next(a for t, a in page.elements if t == "meta" and "http-equiv" in a)["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"@import|url\(", _render())


def test_the_policy_allows_exactly_the_script_of_the_page() -> None:
    source = _render()
    script = _Page(source).scripts[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source


def test_names_out_of_reports_stay_text() -> None:
    results = sample.results(host=EVIL, operation=EVIL)
    results["findings"][0]["summary"] = EVIL
    sample.say(results, (results["findings"][0], EVIL))
    results["findings"][0]["evidence"] = [{EVIL: EVIL}]
    results["warnings"] = [EVIL]
    results["clock"]["method"] = EVIL
    page = _Page(html.render(results, sample.collectives(operation=EVIL), title=EVIL))
    data = [a for tag, a in page.elements if tag == "script" and a.get("type")]
    assert [tag for tag, _ in page.elements].count("script") == len(data) + 1
    assert "img" not in [tag for tag, _ in page.elements]
    assert not any(name.startswith("on") for _, found in page.elements for name in found)
    assert page.text.count("onerror=alert(1)") >= 7
    assert json.loads(page.scripts[0])["operations"] == [EVIL]


def _spans(name: str, row: str = "host", kind: str = "blocked") -> pa.Table:
    """One span of rank 2 in the sample's step 8."""
    begin = sample.results()["steps"][2]["begin_ns"]
    columns = {
        "rank": 2, "step": 8, "row": row, "kind": kind, "name": name, "start_ns": begin,
        "end_ns": begin + 20 * sample.MS, "count": 1, "merged_below_ns": 0,
    }  # fmt: skip
    return pa.table({each: [value] for each, value in columns.items()}).cast(SPANS)


def test_names_of_host_calls_stay_text_and_are_cut() -> None:
    name = EVIL + "x" * 10_000
    source = html.render(sample.results(), sample.collectives(), _spans(name), title="x")
    page = _Page(source)
    assert "img" not in [tag for tag, _ in page.elements]
    data = next(json.loads(each) for each in page.scripts if '"spans"' in each)
    assert data["spans"]["names"] == [name[:200]]
    assert data["spans"]["kinds"] == ["blocked"]
    assert "x" * 300 not in source


def test_spans_of_a_row_that_is_not_known_are_left_out() -> None:
    source = html.render(sample.results(), sample.collectives(), _spans("f", "later"), title="x")
    data = next(json.loads(each) for each in _Page(source).scripts if '"spans"' in each)
    assert data["spans"]["names"] == []


@pytest.mark.parametrize(
    ("ranks", "spans", "most"),
    [(64, 250_000, 6e6), pytest.param(1024, 500_000, 12e6, marks=pytest.mark.long)],
)
def test_a_page_full_of_spans_and_calls_keeps_to_its_size_and_says_what_is_merged(
    ranks: int, spans: int, most: float
) -> None:
    results = sample.results()
    results["ranks"] = [{**results["ranks"][0], "rank": rank} for rank in range(ranks)]
    rng = np.random.default_rng(1)
    begin, number = results["steps"][2]["begin_ns"], np.arange(spans)
    start = (
        begin + number // ranks * (sample.STEP_NS * ranks // spans) + rng.integers(0, 900, spans)
    )
    kinds = pa.array(["compute", "transfer", "idle", "copy"])
    table = pa.table(
        {
            "rank": number % ranks,
            "step": np.full(spans, 8),
            "row": ["device"] * spans,
            "kind": kinds.take(pa.array(rng.integers(0, 4, spans))),
            "name": pa.array([f"kernel {k}" for k in range(500)]).take(pa.array(number % 500)),
            "start_ns": start,
            "end_ns": start + rng.integers(1, 9_000, spans),
            "count": rng.integers(1, 20, spans),
            "merged_below_ns": np.full(spans, 9_000),
        }
    ).cast(SPANS)
    calls = sample.collectives(ranks=ranks, calls_per_step=200)
    source = html.render(results, calls, table, title="full")
    assert len(source.encode()) < most
    assert "Spans shorter than 9.0 µs are merged" in source


def test_characters_that_steer_are_replaced_everywhere() -> None:
    page = _render(host="gpu\u202e\x00\udc80", operation="All\u2028Reduce")
    assert "\u202e" not in page
    assert "\x00" not in page
    assert "\u2028" not in page
    page.encode()


def test_the_same_results_give_the_same_page() -> None:
    assert _render() == _render()


def test_a_healthy_run_has_a_clean_page() -> None:
    page = html.render(sample.healthy(), sample.collectives(late=None), title="x")
    who, cost, saved, _ = _tiles(page)
    assert (who[0], cost[0], saved[0]) == ("none", "none", "none")
    assert "4 profiled ranks" in who[1]
    text = _Page(page).text
    assert "article" not in [tag for tag, _ in _Page(page).elements]
    assert "missing" not in text
    assert text.count("<17 µs") == 4


def test_one_rank_alone_does_not_prove_that_there_is_no_straggler() -> None:
    results = sample.healthy()
    results["ranks"] = results["ranks"][:1]
    results["clock"]["ranks"] = results["clock"]["ranks"][:1]
    page = html.render(results, sample.collectives(ranks=1, late=None), title="x")
    assert _tiles(page)[0][0] == "cannot be determined"


def test_without_a_steady_state_step_no_rank_is_cleared() -> None:
    results = sample.healthy()
    for step in results["steps"]:
        step["settled"] = False
    page = html.render(results, sample.collectives(late=None), title="x")
    assert _tiles(page)[0][0] == "cannot be determined"


def test_without_a_collective_in_time_there_is_no_drawing() -> None:
    page = html.render(sample.results(), sample.collectives().slice(0, 0), title="x")
    assert 'id="timeline"' in page
    assert 'id="canvas"' not in page
    assert "timeline-data" not in page.partition("<script>")[0]


def test_results_of_nothing_still_make_a_page() -> None:
    results = sample.healthy()
    results["ranks"], results["steps"], results["clock"]["ranks"] = [], [], []
    results["collectives"] = {"matched": 0, "incomplete": 0, "unmatched": 0, "by_operation": []}
    page = html.render(results, sample.collectives().slice(0, 0), title="x")
    assert _tiles(page)[0][0] == "cannot be determined"


def test_each_rank_has_a_bar_of_its_mean_step_and_what_its_parts_are() -> None:
    page = _Page(_render())
    bars = [a for t, a in page.elements if t == "svg" and a.get("class") == "bar"]
    assert len(bars) == 4
    assert re.search(r"[\d.]+ ms: [a-z ]+ \d+%, [a-z ]+ \d+%, ", page.text)


def test_an_offset_within_its_bound_is_not_given_as_a_number() -> None:
    results = sample.results()
    results["clock"]["ranks"][3]["offset_ns"] = -1_500_000
    text = _Page(html.render(results, sample.collectives(), title="x")).text
    assert text.count("none measurable") == 2
    assert "-1.50 ms ±8.4 µs" in text


def test_evidence_is_a_table_with_moments_counted_from_the_steps_begin() -> None:
    text = _Page(_render()).text
    names = ["what", "rank", "step", "into the step", "communicator", "late"]
    assert " ".join(names) in text
    assert text.count(sample.straggler()["evidence"][0]["what"]) == 3
    assert "7 33.0 ms …c4d5e6f7 20.1 ms" in text
    assert re.search("host name.*host kind.*host duration", text)
    assert "clock_nanosleep os 20.1 ms" in text


def test_every_header_cell_has_a_scope_and_every_drawing_a_name() -> None:
    elements = _Page(_render()).elements
    for (tag, attributes), (following, _) in pairwise([*elements, ("", {})]):
        if tag == "th":
            assert attributes.get("scope") in {"col", "row"}
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            assert attributes.get("aria-label") or following == "title"


@pytest.mark.parametrize(
    ("ranks", "count", "most"),
    [(64, 150, 6_000_000), pytest.param(1024, 12, 12_000_000, marks=pytest.mark.long)],
)
def test_the_page_of_a_large_run_stays_small(ranks: int, count: int, most: int) -> None:
    results = sample.results()
    begins = [step["begin_ns"] for step in results["steps"]]
    begins += [begins[-1] + k * sample.STEP_NS for k in range(1, count)]
    results["steps"] = [
        {
            "step": 6 + number,
            "settled": number > 0,
            "begin_ns": begins[number],
            "duration_ns": sample.STEP_NS,
            "ranks": [sample.account(rank, late=rank == 2) for rank in range(ranks)],
        }
        for number in range(count)
    ]
    table = sample.collectives(ranks=ranks, calls_per_step=100)
    page = html.render(results, table, title="large")
    assert len(page.encode()) < most
    assert json.loads(_Page(page).scripts[0])["lane"]


def test_the_page_is_written_by_rename(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(path, html.render(sample.results(), sample.collectives(), title="runs/one"))
    assert path.read_text("utf-8") == _render()
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


# Colours: contrast as WCAG 2 defines it; colour blindness after Machado, Oliveira and
# Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009),
# at full severity; differences as CIE 1976 colour difference, of which 2.3 is just noticeable.

_EYES = {
    "anyone": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopes": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopes": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def _colours() -> list[dict[str, str]]:
    """The page's named colours: light, dark and paper."""
    blocks = re.findall(r":root(?:\S*) \{(.*?)\}", _render(), re.DOTALL)
    found = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks]
    assert len(found) == 3
    return [{**found[0], **each} for each in found]


def _linear(colour: str) -> tuple[float, float, float]:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    values = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return red, green, blue


def _contrast(one: str, other: str) -> float:
    light = sorted(
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (_linear(one), _linear(other))
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def _lab(colour: str, eye: str) -> tuple[float, float, float]:
    rgb = _linear(colour)
    red, green, blue = (
        max(sum(weight * part for weight, part in zip(row, rgb, strict=True)), 0)
        for row in _EYES[eye]
    )
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_all_text_has_enough_contrast_in_light_dark_and_on_paper() -> None:
    for colours in _colours():
        for shade in ("ink", "soft", "link", "critical", "warning", "info", "late"):
            for ground in ("page", "card", "track"):
                assert _contrast(colours[shade], colours[ground]) >= 4.5, (shade, ground)


@pytest.mark.parametrize("eye", _EYES)
def test_the_tones_of_an_account_can_be_told_apart_by(eye: str) -> None:
    for colours in _colours():
        for one, other in combinations(("compute", "wait", "transfer", "copies", "track"), 2):
            pairs = zip(_lab(colours[one], eye), _lab(colours[other], eye), strict=True)
            assert sum((a - b) ** 2 for a, b in pairs) ** 0.5 >= 25, (one, other)


#: the tones that can stand side by side in a row of bars, and how far apart their lightness is
_DEVICE = ("compute", "wait", "transfer", "copies", "track"), 14
_HOST = ("blocked", "cuda", "cuda_wait", "thread_wait", "python", "op"), 8


@pytest.mark.parametrize(("tones", "apart"), [_DEVICE, _HOST], ids=["device", "host"])
def test_the_tones_of_a_row_differ_in_greyscale(tones: tuple[str, ...], apart: int) -> None:
    for colours in _colours():
        light = sorted((_lab(colours[tone], "anyone")[0], tone) for tone in tones)
        for (one, dark), (other, bright) in pairwise(light):
            assert other - one >= apart, (dark, bright)
        assert _contrast(colours["idle"], colours["card"]) >= 3


def test_the_footer_names_no_file_beside_the_page() -> None:
    # `merge --html FILE` writes none
    page = html.render(sample.results(), sample.collectives(), title="x")
    footer = page[page.index("<footer>") : page.index("</footer>")]
    assert "parquet" not in footer
    assert 'href="#provenance"' in footer
    assert 'id="provenance"' in page


def test_a_saving_that_rests_on_other_repairs_says_which() -> None:
    page = html.render(sample.results(), sample.collectives(), title="x")
    assert "<small>saved per step</small>" in page
    assert "<small>saved per step once straggler.host is repaired, as much alone</small>" in page
    made = sample.results()
    made["findings"][1]["saved_alone_ns"] = 13_450_000
    page = html.render(made, sample.collectives(), title="x")
    assert "saved per step once straggler.host is repaired, 13.4 ms alone</small>" in page
    assert "with straggler.host (rank 2) repaired: savings add up. Alone it would save" in page


def test_no_length_stands_for_an_unknown_clock() -> None:
    made = sample.results()
    for one in made["clock"]["ranks"][2:]:
        one["uncertainty_ns"] = UNBOUNDED_NS
    free = words.ranks([one["rank"] for one in made["clock"]["ranks"][2:]])
    page = html.render(made, sample.collectives(), title="x")
    for shown in (text.render(made), page):
        assert f"{free} cannot be aligned" in " ".join(shown.split())
        assert "3600 s" not in shown
        assert "7200 s" not in shown
        assert "36000000000" not in shown
    for one in made["clock"]["ranks"][1:]:
        one["uncertainty_ns"] = UNBOUNDED_NS
    assert "rank 0's own; ranks 1–" in " ".join(text.render(made).split())


def test_the_groups_have_a_table_with_the_reason_for_each_and_names_that_stay_text() -> None:
    made = sample.results(operation="<b>AllReduce</b>")
    page = html.render(made, sample.collectives(), title="x")
    assert '<h3 id="groups">Groups</h3>' in page
    assert "0–3 of 5" in page
    assert "&lt;b&gt;AllReduce&lt;/b&gt; 9 times per step" in page
    assert "<b>AllReduce</b>" not in page
    made["topology"]["groups"] = []
    assert 'id="groups"' not in html.render(made, sample.collectives(), title="x")


def test_the_pauses_of_a_run_have_a_table_and_names_stay_text() -> None:
    results = sample.paused()
    results["pauses"]["entries"][1]["name"] = "<script>save"
    page = html.render(results, sample.collectives(), title="run")
    table = page[page.index('id="pauses"') :]
    table = table[: table.index("</section>")]
    assert "every 500 steps (&lt;script&gt;save)" in table
    assert "restart after attempt 1" in table
    assert "9.3% of the run" in table
    assert 'id="pauses"' not in _render()
