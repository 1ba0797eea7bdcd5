"""Exports in Perfetto's own UI: what its trace processor reads, what the page draws.

The UI and a trace are served on loopback; the page may reach nothing else. It asks the UI's own SQL
engine, and what it found is what its last script becomes.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lab import perfetto_ui
from lab.devtools import Browser
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as published
from simulate import Cause, Job, simulate

from clusterprof import merge_run
from clusterprof.cli import main
from clusterprof.columns import integers
from clusterprof.export import tracks
from clusterprof.ingest import find_sources, gather
from clusterprof.run_directory import Window
from clusterprof.study import Study, study
from clusterprof.tables import RankTables

pytestmark = [pytest.mark.needs_chromium, pytest.mark.needs_perfetto_ui]

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--'\u202e\n"
#: seconds; after so long on one thing the page gives up
PAGES_PATIENCE_S = 60

#: the process of each slice
_OF_PROCESS = """from slice s
    left join process_track on process_track.id = s.track_id
    left join thread_track on thread_track.id = s.track_id left join thread using (utid)
    left join process p on p.upid = coalesce(process_track.upid, thread.upid)"""
_QUERIES = {
    "processes": "select name from process where pid > 0",
    "slices": f"""select coalesce(p.name, '') as process, s.category, s.name, count(*) as slices,
        sum(s.dur) as ns, sum(s.dur < 0) as unfinished {_OF_PROCESS} group by 1, 2, 3""",
    "collectives": f"""select s.id, p.name as process, s.ts {_OF_PROCESS}
        where s.category = 'collective'""",
    "flows": "select slice_out, slice_in from flow",
    "errors": "select name, value from stats where severity = 'error' and value > 0",
}
#: what a click on the report's last download saves
_SAVED = """new Promise((done) => {
  URL.createObjectURL = (blob) => { done(blob.text()); return "#"; };
  HTMLAnchorElement.prototype.click = () => {};
  [...document.querySelectorAll("#downloads button")].pop().click();
})"""
# `Actions`, `globals`: the UI puts them there "for better debugging"
_PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>Perfetto</title>
<div id="timeline_data_source" hidden></div><main id="timeline_main" style="height:900px"></main>
<script>
const problems = [], elsewhere = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => elsewhere.push(event.blockedURI));
document.getElementById("timeline_data_source").textContent = location.origin + "/trace";
</script>
<script src="/frontend_bundle.js"></script>
<script>
const until = async (what, holds) => {
  for (const begin = performance.now(); !holds(); ) {
    if (problems.length) throw problems[0];
    if (performance.now() - begin > PATIENCE) throw `no ${what}`;
    await new Promise((done) => setTimeout(done, 50));
  }
};
const engine = () => Object.values(globals.state.engines).find((each) => each.ready);
const ask = async (queryId, query) => {
  globals.dispatch(Actions.executeQuery({engineId: engine().id, queryId, query}));
  await until(queryId, () => globals.queryResults.has(queryId));
  const {error, rows} = globals.queryResults.get(queryId);
  if (error) throw error;
  return rows;
};
// Slices have the colour of their name; all else is grey.
const coloured = (canvas) => {
  if (!canvas.width || !canvas.height) return 0;
  const dots = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < dots.length; i += 4)
    count += Math.max(dots[i], dots[i + 1], dots[i + 2])
      - Math.min(dots[i], dots[i + 1], dots[i + 2]) > 40;
  return count;
};
const answer = (async () => {
  const found = {problems, elsewhere};
  try {
    await until("trace", engine);
    const drawn = () => document.querySelectorAll("#timeline_main .track-content").length;
    const known = () => Object.values(globals.state.tracks);
    await until("tracks", () => known().length && drawn() === known().length);
    found.tracks = known().map((each) => each.name);
    found.groups = document.querySelectorAll("#timeline_main .track-group-panel").length;
    const canvas = document.querySelector(".scrolling-panel-container canvas");
    await until("slices", () => coloured(canvas) > INK);
    for (const [id, query] of Object.entries(QUERIES)) found[id] = await ask(id, query);
    found.title = document.title;
    found.images = document.images.length;
  } catch (error) { problems.push(String(error)); }
  return found;
})();
</script>"""
#: so many dots of the canvas must be coloured: twice what one slice of its whole width has
_INK = 2 * 1200 * 18
_VALUES = {"QUERIES": _QUERIES, "INK": _INK, "PATIENCE": PAGES_PATIENCE_S * 1000}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_OWN_ONLY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[str]:
    """The address of a server of these files on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Security-Policy", _OWN_ONLY)
            kind = _TYPES.get(Path(self.path).suffix, "application/octet-stream")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def opened(browser: Browser) -> Callable[[bytes], dict[str, Any]]:
    """`opened(trace)`: what the UI found in a trace, checked for errors."""

    def run(trace: bytes) -> dict[str, Any]:
        page = _PAGE
        for name, value in _VALUES.items():
            page = page.replace(name, json.dumps(value))
        package = {f"/{path}": content for path, content in perfetto_ui.files().items()}
        # The server is the proxy to everywhere else as well, and knows no way there.
        with (
            served({**package, "/index.html": page.encode(), "/trace": trace}) as own,
            browser.tab(proxyServer=own) as tab,
        ):
            tab.open(f"{own}/index.html", 1280, 1000)
            answer: dict[str, Any] = tab.script("answer")
        assert answer["problems"] == []
        # It looks for a trace processor on this machine, which the page's policy refuses.
        assert set(answer["elsewhere"]) <= {"http://127.0.0.1:9001/status"}
        assert answer["errors"] == []
        assert (answer["title"], answer["images"]) == ("Perfetto", 0)
        return answer

    return run


def exported(made: Study, folder: Path) -> bytes:
    run, target = folder / "run", folder / "trace"
    run.mkdir()
    merge_run.save(made, Window.at(run))
    assert main.run(["export", str(run), "--format", "perfetto", "-o", str(target)]) == 0
    return target.read_bytes()


@pytest.fixture(scope="module")
def straggler(recordings: Path) -> Study:
    """The study of a recording whose rank 2 sleeps before each step."""
    return study(gather(find_sources([recordings / "nsys-2025.3/ddp-host-straggler"])).ranks)


@pytest.mark.long
def test_perfettos_ui_shows_all_that_a_recording_has(
    opened: Callable[[bytes], dict[str, Any]], straggler: Study, tmp_path: Path
) -> None:
    made = straggler
    found = opened(exported(made, tmp_path))

    names = {each.rank: f"rank {each.rank} · {each.info.host}" for each in made.ranks}
    assert sorted(each["name"] for each in found["processes"]) == sorted(names.values())
    slices: Counter[tuple[str, str, str]] = Counter()
    lengths_ns: Counter[tuple[str, str]] = Counter()
    for tables in made.ranks:
        process = names[tables.rank]
        for kind, table in (("device", tables.activity), ("host", tables.host_calls)):
            slices.update((process, kind, name) for name in table["name"].to_pylist())
            ends = (
                made.clock.align(tables.rank, integers(table, at)) for at in ("end_ns", "start_ns")
            )
            lengths_ns[process, kind] += int(np.subtract(*ends).sum())
    for row in made.accounts.to_pylist():
        slices[names[row["rank"]], "step", f"step {row['step']}"] += 1
    shown: Counter[tuple[str, str, str]] = Counter()
    for row in found["slices"]:
        assert row["unfinished"] == 0
        category = "host" if row["category"] == "range" else row["category"]
        shown[row["process"], category, row["name"]] += row["slices"]
        lengths_ns[row["process"], category] -= row["ns"]
    kinds = {"device", "host", "step"}
    assert {each: n for each, n in shown.items() if each[1] in kinds} == slices
    assert {at: n for at, n in lengths_ns.items() if n and at[1] in {"device", "host"}} == {}
    assert len(found["collectives"]) == made.collectives.num_rows > 0
    assert any(row["category"] == "range" and row["name"] == "forward" for row in found["slices"])
    codes = {name for process, category, name in shown if category == "finding" and not process}
    assert codes == {"about this trace", *(each["code"] for each in made.results["findings"])}

    assert found["groups"] == len(names)
    assert found["tracks"].count("steps") == len(names)
    assert {"clusterprof", "NVTX · thread 1619"} <= set(found["tracks"])


@pytest.mark.long
def test_perfettos_ui_opens_the_trace_that_the_report_saves(
    opened: Callable[[bytes], dict[str, Any]],
    browser: Browser,
    straggler: Study,
    tmp_path: Path,
) -> None:
    made = straggler
    page = tmp_path / "report.html"
    merge_run.write_page(made, page, "straggler")
    with browser.tab() as tab:
        tab.open(page, 1280, 900)
        trace = tab.script(_SAVED)
    found = opened(trace.encode())
    names = {f"rank {each.rank} · {each.info.host}" for each in made.ranks}
    assert {each["name"] for each in found["processes"]} == names
    sleeps = [each for each in found["slices"] if each["name"] == "clock_nanosleep"]
    assert max(sleeps, key=lambda each: each["ns"])["process"].startswith("rank 2 ")
    assert not any(each["unfinished"] for each in found["slices"])
    # beside a thread's name the UI shows its number
    shown = {name.rstrip("0123456789").rstrip() for name in found["tracks"]}
    assert {"phases", "host", "device"} <= shown


def test_perfettos_ui_joins_collectives_and_names_that_are_markup_stay_text(
    opened: Callable[[bytes], dict[str, Any]], tmp_path: Path
) -> None:
    ranks, _ = simulate(Job(steps=3, dp=4, causes=(Cause("host", 2, 20_000_000),)))
    made = study([hostile(each) for each in ranks])
    found = opened(with_older_flows(exported(made, tmp_path)))

    name = tracks.shown(EVIL)
    assert {each["name"] for each in found["processes"]} == {
        tracks.shown(f"rank {rank} · {EVIL}") for rank in range(4)
    }
    assert {each["name"] for each in found["slices"] if each["category"] == "device"} == {name}
    started = [row for row in made.collectives.to_pylist() if row["start_ns"] is not None]
    first = min(row["aligned_start_ns"] for row in started)
    members = defaultdict(set)
    for row in started:
        rank = tracks.shown(f"rank {row['rank']} · {EVIL}")
        members[row["collective"]].add((rank, row["aligned_start_ns"] - first))
    begin = min(each["ts"] for each in found["collectives"])
    where = {each["id"]: (each["process"], each["ts"] - begin) for each in found["collectives"]}
    # each member leads to the one that arrived next
    then = {each["slice_out"]: each["slice_in"] for each in found["flows"]}
    joined = []
    for at in then.keys() - set(then.values()):
        chain = [at]
        while chain[-1] in then:
            chain.append(then[chain[-1]])
        joined.append({where[each] for each in chain})
    assert sorted(map(sorted, joined)) == sorted(map(sorted, members.values()))


def hostile(tables: RankTables) -> RankTables:
    """The same with a name of kernels and of the host that would like to be markup."""
    at = tables.activity.schema.get_field_index("name")
    field = tables.activity.schema.field(at)
    names = pa.array([EVIL] * tables.activity.num_rows, pa.string()).cast(field.type)
    activity = tables.activity.set_column(at, field, names)
    return replace(tables, info=replace(tables.info, host=EVIL), activity=activity)


def with_older_flows(trace: bytes) -> bytes:
    """The same with flows in the field that Perfetto read before version 22, and reads still."""
    made = published.Trace.FromString(trace)
    for packet in made.packet:
        if packet.HasField("track_event"):
            packet.track_event.flow_ids_old.extend(packet.track_event.flow_ids)
            packet.track_event.ClearField("flow_ids")
    return made.SerializeToString()
