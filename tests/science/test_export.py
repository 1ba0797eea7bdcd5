"""What a merged run is written as for other tools: read back by those tools' own definitions."""

from __future__ import annotations

import csv
import json
import re
import shlex
import statistics
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import pytest
from lab.tiers import long_but
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as published
from prometheus_client.parser import text_string_to_metric_families
from simulate import Cause, Job, middle, simulate, with_clock

from clusterprof import merge_run, words
from clusterprof.cli import export, main
from clusterprof.export import chrome, flat_tables, merged_tables, perfetto, tracks
from clusterprof.report import results_json
from clusterprof.run_directory import Window
from clusterprof.study import Study, study
from clusterprof.tables import RankTables

RIGHT_TO_LEFT = "\u202egnp.exe"


def saved(made: Study, folder: Path) -> Path:
    folder.mkdir()
    merge_run.save(made, Window.at(folder))
    return folder


@pytest.fixture(scope="module")
def straggler() -> Study:
    """Rank 2's host is late; rank 1's clock is off and drifts."""
    ranks, _ = simulate(Job(steps=3, causes=(Cause("host", 2, 20_000_000),)))
    ranks[1] = with_clock(ranks[1], 5_000_000, 20.0, middle(ranks))
    return study(ranks)


@pytest.fixture
def run(straggler: Study, tmp_path: Path) -> Path:
    return saved(straggler, tmp_path / "run")


def exported(run: Path, form: str, target: Path, *more: str) -> Path:
    status = main.run(["export", str(run), "--format", form, "-o", str(target), *more])
    assert status == 0
    return target


@dataclass
class Slice:
    """A slice or an instant of a trace; times are UTC."""

    name: str
    category: str
    track: int
    begin: int
    end: int
    flows: list[int]
    values: dict[str, Any]


class Trace:
    """A trace as Perfetto's trace processor understands it, with what it would complain of."""

    def __init__(self, file: Path) -> None:
        trace = published.Trace()
        trace.ParseFromString(file.read_bytes())
        self.attributes: dict[str, Any] = {}
        self.tracks: dict[int, Any] = {}
        self.processes: dict[int, str] = {}
        self.slices: list[Slice] = []
        names: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
        cleared = {1}
        events = []
        for packet in trace.packet:
            sequence = packet.trusted_packet_sequence_id
            if packet.sequence_flags & packet.SEQ_INCREMENTAL_STATE_CLEARED:
                cleared.add(sequence)
            assert sequence in cleared
            for kind in ("event_names", "event_categories", "debug_annotation_names"):
                for each in getattr(packet.interned_data, kind):
                    assert each.iid not in names[sequence, kind]
                    names[sequence, kind][each.iid] = each.name
            for each in packet.trace_attributes.attribute:
                self.attributes[each.key] = getattr(each, each.WhichOneof("value"))
            if packet.HasField("clock_snapshot"):
                clocks = {c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks}
                assert clocks[6] == 0
                self.utc_ns = clocks.get(1, 0)  # a rank of an archive has none of its own
            if packet.HasField("track_descriptor"):
                found = packet.track_descriptor
                assert found.uuid not in self.tracks
                self.tracks[found.uuid] = found
                if found.HasField("process"):
                    self.processes[found.uuid] = found.process.process_name
            if packet.HasField("track_event"):
                events.append((packet.timestamp, len(events), sequence, packet.track_event))
        open_: dict[int, list[Slice]] = defaultdict(list)
        for time, _, sequence, event in sorted(events, key=lambda each: each[:2]):
            assert event.track_uuid in self.tracks
            if event.type == event.TYPE_SLICE_END:
                open_[event.track_uuid].pop().end = time + self.utc_ns
                continue
            name = event.name or names[sequence, "event_names"][event.name_iid]
            found = Slice(
                name=name, track=event.track_uuid, begin=time + self.utc_ns,
                end=time + self.utc_ns, flows=list(event.flow_ids),
                category=[*event.categories, *(
                    names[sequence, "event_categories"][iid] for iid in event.category_iids
                )][0],
                values={
                    each.name or names[sequence, "debug_annotation_names"][each.name_iid]:
                    getattr(each, each.WhichOneof("value")) for each in event.debug_annotations
                },
            )  # fmt: skip
            self.slices.append(found)
            if event.type == event.TYPE_SLICE_BEGIN:
                open_[event.track_uuid].append(found)
        assert not any(open_.values())

    def process(self, of: Slice) -> str:
        track = self.tracks[of.track]
        if track.HasField("thread"):
            own = [t for t in self.tracks.values() if t.process.pid == track.thread.pid]
            return own[0].process.process_name
        return self.processes.get(track.parent_uuid, "")

    def name(self, of: Slice) -> str:
        track = self.tracks[of.track]
        return track.thread.thread_name or track.name

    def of(self, rank: str, category: str) -> list[Slice]:
        return [
            each for each in self.slices
            if each.category == category and self.process(each) == rank
        ]  # fmt: skip


def times(table: pa.Table, begin: str = "start_ns") -> Counter:
    return Counter(zip(table[begin].to_pylist(), table["end_ns"].to_pylist(), strict=True))


# --- perfetto


def test_perfetto_has_a_process_a_rank_and_all_that_ran_on_it_on_one_clock(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    assert sorted(trace.processes.values()) == [f"rank {rank} · node0" for rank in range(4)]
    for tables in straggler.ranks:
        name = f"rank {tables.rank} · node0"
        device = trace.of(name, "device")
        clock = straggler.clock
        begin = clock.align(tables.rank, tables.activity["start_ns"].to_numpy())
        end = clock.align(tables.rank, tables.activity["end_ns"].to_numpy())
        names = tables.activity["name"].to_pylist()
        expected = Counter(zip(names, begin.tolist(), end.tolist(), strict=True))
        assert Counter((each.name, each.begin, each.end) for each in device) == expected
        host = trace.of(name, "host") + trace.of(name, "range")
        assert len(host) == tables.host_calls.num_rows
    assert straggler.clock.offset_ns.any()


def test_steps_carry_their_account(straggler: Study, run: Path, tmp_path: Path) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    accounts = straggler.accounts.to_pylist()
    found = [each for each in trace.slices if each.category == "step"]
    assert {(trace.process(e), e.name, e.begin, e.values["idle_ns"]) for e in found} == {
        (
            f"rank {row['rank']} · node0",
            f"step {row['step']}",
            row["aligned_begin_ns"],
            row["idle_ns"],
        )
        for row in accounts
    }


def test_a_flow_joins_the_members_of_each_collective(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    members: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for each in trace.slices:
        if each.category == "collective":
            (flow,) = each.flows
            members[flow].append((trace.process(each), each.begin))
    expected: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for row in straggler.collectives.to_pylist():
        if row["start_ns"] is not None:
            member = f"rank {row['rank']} · node0", row["aligned_start_ns"]
            expected[row["collective"] + 1].append(member)
    assert {k: sorted(v) for k, v in members.items()} == {k: sorted(v) for k, v in expected.items()}
    waits = Counter(each.values.get("wait_ns") for each in trace.slices if each.flows)
    assert waits == Counter(straggler.collectives["wait_ns"].to_pylist())


def test_findings_are_instants_where_their_evidence_is(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    (finding,) = [f for f in straggler.results["findings"] if f["code"] == "straggler.host"]
    shown = [each for each in trace.slices if each.name == "straggler.host"]
    assert sorted(each.begin for each in shown) == sorted(
        each["time_ns"] for each in finding["evidence"] if "time_ns" in each
    )
    assert {each.values["rank"] for each in shown} == {"rank 2 · node0"}
    assert {each.values["summary"] for each in shown} == {finding["summary"]}


def test_the_trace_says_how_far_its_clock_may_be_wrong(run: Path, tmp_path: Path) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    assert trace.attributes["clusterprof.clock.reference_rank"] == 0
    assert trace.attributes["clusterprof.clock.uncertainty.rank 1 · node0"].startswith("±")
    assert trace.attributes["clusterprof.left_out"] == "nothing"
    (about,) = [each for each in trace.slices if each.name == "about this trace"]
    assert about.values == {**trace.attributes}


def test_the_shortest_are_left_out_where_not_all_fits_and_the_trace_says_so(
    straggler: Study, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = merged_tables.read(Window.at(run))
    whole = exported(run, "perfetto", tmp_path / "whole")
    limit = whole.stat().st_size * 4 // 5
    chosen = tracks.survey(merged, limit)
    with (tmp_path / "half").open("wb") as file:
        perfetto.write(merged, file, chosen)
    assert 0 < (tmp_path / "half").stat().st_size <= limit
    trace = Trace(tmp_path / "half")
    assert len(trace.slices) < len(Trace(whole).slices)
    assert " are left out, which are shorter than " in trace.attributes["clusterprof.left_out"]
    kept = [each for each in trace.slices if each.category in ("device", "host", "range")]
    left = int(chosen.notes[0].split()[0].replace(",", ""))
    all_ = sum(t.activity.num_rows + t.host_calls.num_rows for t in straggler.ranks)
    assert len(kept) == all_ - left
    assert min(each.end - each.begin for each in kept) >= chosen.shortest_ns["device"]
    # steps stay before collectives, and these before the rest
    assert {"step", "collective"} <= {each.category for each in trace.slices}
    assert len([each for each in trace.slices if each.flows]) == straggler.collectives.num_rows
    tiny = tracks.survey(merged, 1)
    assert len(tiny.notes) == 3


@pytest.mark.parametrize(
    "name",
    long_but([RIGHT_TO_LEFT, "x" * 10_000, "\ud800"], ["a\"b'c\\", "", "a\0b\nc"]),
)
def test_any_name_is_one_short_line(name: str, straggler: Study, tmp_path: Path) -> None:
    ranks = [renamed(each, name) for each in straggler.ranks]
    run = saved(replace(straggler, ranks=tuple(ranks)), tmp_path / "run")
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    shown = {each.name for each in trace.slices if each.category == "device"}
    assert len(shown) == 1
    assert len(min(shown)) <= tracks.LONGEST_NAME
    assert not set(min(shown)) & {"\u202e", "\0", "\n"}
    hosts = {name.partition(" · ")[2] for name in trace.processes.values()}
    assert len(hosts) == 1


def renamed(tables: RankTables, name: str) -> RankTables:
    plain = name.encode("utf-8", "replace").decode()
    field = tables.activity.schema.field("name")
    names = pa.array([plain] * tables.activity.num_rows, pa.string()).cast(field.type)
    return replace(tables, activity=tables.activity.set_column(3, field, names))


def test_a_run_with_one_rank_or_without_a_gpu_or_without_collectives_is_shown(
    tmp_path: Path,
) -> None:
    on_host, _ = simulate(Job(steps=2, dp=2, on_host=True))
    one, _ = simulate(Job(steps=2))
    alone = [replace(one[0], collective_calls=one[0].collective_calls.slice(0, 0))]
    bare = [
        replace(each, activity=each.activity.slice(0, 0), host_calls=each.host_calls.slice(0, 0))
        for each in alone
    ]
    for number, ranks in enumerate((on_host, alone, bare)):
        run = saved(study(ranks), tmp_path / f"run{number}")
        trace = Trace(exported(run, "perfetto", tmp_path / f"t{number}"))
        assert len(trace.processes) == len(ranks)
        steps = [each for each in trace.slices if each.category == "step"]
        assert {trace.process(each) for each in steps} == set(trace.processes.values())


@pytest.mark.parametrize("count", long_but([64], [1024]))
def test_many_ranks_stay_within_the_size(straggler: Study, tmp_path: Path, count: int) -> None:
    ranks, most_mb = list(straggler.ranks), max(count // 128, 1)
    many = [
        replace(ranks[number % 4], info=replace(ranks[number % 4].info, rank=number))
        for number in range(count)
    ]
    results = straggler.results | {
        "ranks": [straggler.results["ranks"][0] | {"rank": number} for number in range(count)],
        "clock": straggler.results["clock"]
        | {"ranks": [straggler.results["clock"]["ranks"][0] | {"rank": n} for n in range(count)]},
    }
    run = tmp_path / "run"
    run.mkdir()
    merge_run.save(replace(straggler, ranks=(), results=results), Window.at(run))
    for tables in many:
        folder = run / "tables" / f"{tables.rank:05d}"
        folder.mkdir(parents=True)
        for name in ("activity", "host_calls"):
            file = run / "tables" / f"{tables.rank % 4:05d}" / f"{name}.parquet"
            if tables.rank < 4:
                merge_run.write_table(getattr(tables, name), file)
            else:
                (folder / f"{name}.parquet").hardlink_to(file)
    made = exported(run, "perfetto", tmp_path / "t", "--max-mb", str(most_mb))
    assert 250_000 * most_mb < made.stat().st_size <= 1_000_000 * most_mb


def test_slices_that_cross_are_on_tracks_side_by_side() -> None:
    start, end = np.array([0, 5, 10, 12, 20]), np.array([10, 15, 20, 14, 20])
    assert tracks.lanes(start, end).tolist() == [0, 1, 0, 0, 0]
    random = np.random.default_rng(1)
    for _ in range(200):
        start = np.sort(random.integers(0, 30, 12))
        end = start + random.integers(0, 9, 12)
        order = np.lexsort((-end, start))
        start, end = start[order], end[order]
        lane = tracks.lanes(start, end)
        for each in range(lane.max() + 1):
            assert nested(list(zip(start[lane == each], end[lane == each], strict=True)))
        assert (lane.max() == 0) == nested(list(zip(start, end, strict=True)))


def nested(slices: Sequence[tuple[int, int]]) -> bool:
    return not any(a < c < b < d for a, b in slices for c, d in slices)


def test_more_at_once_than_any_profiler_records_is_left_out() -> None:
    many = np.arange(tracks.MOST_LANES + 3)
    lane = tracks.lanes(many, many + 1000)
    assert lane.tolist() == [*range(tracks.MOST_LANES), -1, -1, -1]


def test_numbers_of_any_size_are_read_as_they_were() -> None:
    values = np.array([0, 1, 127, 128, 2**40, 2**62, -1, -(2**63)])
    rows = perfetto.messages(1, len(values), perfetto.numbers(30, values))
    for value, row in zip(values.tolist(), rows, strict=True):
        event = published.TrackEvent()
        event.ParseFromString(row[2:].tobytes())
        assert event.counter_value == value
        event.ParseFromString(perfetto.number(30, value))
        assert event.counter_value == value


# --- perfetto-archive


def test_an_archive_s_offsets_put_each_rank_s_whole_trace_on_one_clock(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    made = exported(run, "perfetto-archive", tmp_path / "t.zip")
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "files")
    text = (tmp_path / "files" / "perfetto_manifest.json").read_text()
    assert text.startswith('{"perfetto_manifest"')  # by which Perfetto knows it
    manifest = json.loads(text)["perfetto_manifest"]
    assert manifest["version"] == 1
    assert all(isinstance(each, (str, int)) for each in manifest["attributes"].values())
    first, *others = manifest["files"]
    assert manifest["trace_time"] == {"clock": "BOOTTIME", "file": first["path"]}
    findings = Trace(tmp_path / "files" / first["path"])
    assert {each.category for each in findings.slices} == {"finding"}
    assert len({each["machine"]["name"] for each in manifest["files"]}) == 5
    for tables, entry in zip(straggler.ranks, others, strict=True):
        assert entry["machine"] == {"name": f"rank {tables.rank} · node0"}
        assert entry["clocks"]["sync_to"] == {"file": first["path"], "clock": "BOOTTIME"}
        assert entry["clocks"]["offset_ns"] >= 0  # else Perfetto drops what is before the first
        trace = Trace(tmp_path / "files" / entry["path"])
        later = findings.utc_ns + entry["clocks"]["offset_ns"]
        found = Counter(
            (each.name, each.begin + later, each.end + later)
            for each in trace.slices if each.category == "device"
        )  # fmt: skip
        begin = straggler.clock.align(tables.rank, tables.activity["start_ns"].to_numpy())
        end = straggler.clock.align(tables.rank, tables.activity["end_ns"].to_numpy())
        names = tables.activity["name"].to_pylist()
        assert found == Counter(zip(names, begin.tolist(), end.tolist(), strict=True))


def test_an_archive_is_the_same_each_time(run: Path, tmp_path: Path) -> None:
    one, two = (exported(run, "perfetto-archive", tmp_path / name) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


# --- chrome-json


def test_chrome_json_has_what_perfetto_s_trace_has(run: Path, tmp_path: Path) -> None:
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    made = json.loads(exported(run, "chrome-json", tmp_path / "c").read_text())
    begin = made["otherData"]["begin_unix_ns"]
    names = {
        e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"
    }
    found = Counter(
        (names[e["pid"]], e["name"], round(e["ts"] * 1000) + begin, round(e["dur"] * 1000))
        for e in made["traceEvents"] if e["ph"] == "X"
    )  # fmt: skip
    assert found == Counter(
        (trace.process(e), e.name, e.begin, e.end - e.begin)
        for e in trace.slices if e.category != "finding"
    )  # fmt: skip
    instants = [e["name"] for e in made["traceEvents"] if e["ph"] == "i"]
    assert sorted([*instants, "about this trace"]) == sorted(
        e.name for e in trace.slices if e.category == "finding"
    )


def test_arrows_join_the_members_of_each_collective_in_their_order(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    events = json.loads(exported(run, "chrome-json", tmp_path / "c").read_text())["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    joined: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            joined[event["id"]].append(event)
            begins = slices[event["pid"], event["tid"], event["ts"]]
            assert begins["args"]["collective"] == event["id"] - 1
            assert begins["cat"] == event["cat"]
            assert (event.get("bp") == "e") == (event["ph"] == "f")
    table = straggler.collectives
    members = Counter(table.filter(pc.is_valid(table["start_ns"]))["collective"].to_pylist())
    assert {id_ - 1: len(each) for id_, each in joined.items()} == {
        collective: count for collective, count in members.items() if count > 1
    }
    for each in joined.values():
        each.sort(key=lambda event: event["ts"])
        assert "".join(event["ph"] for event in each) == f"s{'t' * (len(each) - 2)}f"
        assert len({event["pid"] for event in each}) == len(each)


def test_chrome_json_stays_within_its_size(run: Path, tmp_path: Path) -> None:
    merged = merged_tables.read(Window.at(run))
    limit = exported(run, "chrome-json", tmp_path / "whole").stat().st_size * 4 // 5
    chosen = tracks.survey(merged, limit, json=True)
    with (tmp_path / "t").open("wb") as file:
        chrome.write(merged, file, chosen)
    assert limit / 3 < (tmp_path / "t").stat().st_size <= limit
    assert (
        "left out" in json.loads((tmp_path / "t").read_text())["otherData"]["clusterprof.left_out"]
    )


# --- prometheus


def metrics(file: Path) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    families = text_string_to_metric_families(file.read_text(encoding="utf-8"))
    return {
        family.name: {tuple(sorted(s.labels.items())): s.value for s in family.samples}
        for family in families if family.documentation and family.type == "gauge"
    }  # fmt: skip


def test_prometheus_reads_every_metric(straggler: Study, run: Path, tmp_path: Path) -> None:
    found = metrics(exported(run, "prometheus", tmp_path / "t.prom"))
    results = straggler.results
    assert results["pace"] is not None
    (step,) = found["clusterprof_step_seconds"].values()
    assert step == pytest.approx(results["pace"]["step_ns"] / 1e9)
    repairs = found["clusterprof_finding_saved_seconds"].items()
    assert [(dict(labels)["code"], value) for labels, value in repairs] == [
        (e["code"], pytest.approx(e["saved_ns_per_step"] / 1e9)) for e in results["findings"]
    ]
    alone = found["clusterprof_finding_saved_alone_seconds"].values()
    assert list(alone) == pytest.approx([e["saved_alone_ns"] / 1e9 for e in results["findings"]])
    unsure = found["clusterprof_finding_saved_uncertainty_seconds"].values()
    expected = [e["saved_uncertainty_ns"] / 1e9 for e in results["findings"]]
    assert max(expected) > 0
    assert list(unsure) == pytest.approx(expected)
    parts = found["clusterprof_rank_step_seconds"]
    of_rank = sum(value for labels, value in parts.items() if ("rank", "2") in labels)
    steady = [e["step"] for e in results["steps"] if e["settled"]]
    lengths = [
        row["duration_ns"] for row in straggler.accounts.to_pylist()
        if row["rank"] == 2 and row["step"] in steady
    ]  # fmt: skip
    assert of_rank == pytest.approx(np.mean(lengths) / 1e9)
    assert {dict(labels)["run"] for family in found.values() for labels in family} == {"run"}


def test_no_sample_comes_twice(straggler: Study, tmp_path: Path) -> None:
    findings = straggler.results["findings"]
    results = straggler.results | {"findings": [*findings, *findings]}
    run = saved(replace(straggler, results=results), tmp_path / "run")
    lines = exported(run, "prometheus", tmp_path / "t.prom").read_text().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "{}=,", RIGHT_TO_LEFT, "x" * 10_000])
def test_any_host_is_a_label(name: str, straggler: Study, tmp_path: Path) -> None:
    ranks = [each | {"host": name} for each in straggler.results["ranks"]]
    run = saved(replace(straggler, results=straggler.results | {"ranks": ranks}), tmp_path / "run")
    found = metrics(exported(run, "prometheus", tmp_path / "t.prom"))
    (label,) = {dict(labels)["host"] for labels in found["clusterprof_clock_uncertainty_seconds"]}
    assert label == tracks.shown(name)


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(
    run: Path, tmp_path: Path
) -> None:
    found = metrics(exported(run, "prometheus", tmp_path / "t.prom"))
    folder = Path(__file__).resolve().parents[2] / "examples"
    dashboard = json.loads((folder / "grafana-dashboard.json").read_text())
    asked = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 8
    for target in asked:
        (name,) = re.findall(r"clusterprof_\w+", target["expr"])
        labels = {key for each in found[name] for key, _ in each}
        used = re.findall(r"{{(\w+)}}", target["legendFormat"])
        used += re.findall(r"(\w+)=~?\"", target["expr"])
        by = re.search(r"by \(([^)]*)\)", target["expr"])
        used += by[1].split(", ") if by else []
        assert set(used) <= labels


# --- nsys, ncu


def commands_of(file: Path) -> list[list[str]]:
    return [shlex.split(line) for line in file.read_text().splitlines() if line[0] != "#"]


def test_nsys_is_told_what_to_add_to_each_report_s_times(straggler: Study, tmp_path: Path) -> None:
    entries = [
        each | {"profiler": "nsys 2025.3", "source": f"/runs/a b/{each['rank']}.nsys-rep"}
        for each in straggler.results["ranks"]
    ]
    entries[2] |= {"source": "kept/rank2.qdstrm"}
    entries[3] |= {"source": "rank3.sqlite.xz"}
    results = straggler.results | {"ranks": entries}
    run = saved(replace(straggler, results=results), tmp_path / "run")
    made = commands_of(exported(run, "nsys", tmp_path / "t.sh"))
    assert [argv[-1] for argv in made] == [
        "/runs/a b/0.nsys-rep", "/runs/a b/1.nsys-rep", "rank2.nsys-rep", "rank3.nsys-rep",
    ]  # fmt: skip
    for tables, argv in zip(straggler.ranks, made, strict=True):
        (shift,) = [int(each.partition("=")[2]) for each in argv if each.startswith("--ts-shift=")]
        wall = tables.activity["start_ns"].to_numpy()
        aligned = straggler.clock.align(tables.rank, wall)
        # what the drift makes of it over the window: 20 ppm of 0.1 s
        assert np.abs(wall + shift - aligned).max() < 10_000
    assert made[1][4] != "--ts-shift=0"


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-gpu-straggler"])
@pytest.mark.parametrize("marked", [True, False])
def test_ncu_is_told_which_call_of_the_kernel_that_a_finding_names(
    marked: bool, studied: Callable[[str], Study], recording: str, tmp_path: Path
) -> None:
    made = studied(recording)
    (finding,) = [e for e in made.results["findings"] if e["code"] == "straggler.gpu"]
    (kernel,) = [e["kernel"] for e in finding["evidence"] if "kernel" in e]
    (tables,) = [each for each in made.ranks if each.rank == finding["rank"]]
    if not marked:  # the program marks no steps
        calls = tables.host_calls
        calls = calls.filter(pc.not_equal(calls["kind"].cast(pa.string()), "range"))
        others = [each for each in made.ranks if each is not tables]
        made = replace(made, ranks=(*others, replace(tables, host_calls=calls)))
    (argv,) = commands_of(exported(saved(made, tmp_path / "run"), "ncu", tmp_path / "t.sh"))
    assert argv[argv.index("--kernel-name") + 1] == kernel
    calls = [row for row in tables.activity.to_pylist() if row["name"] == kernel]
    of_step: dict[int, list[int]] = {}
    for step in tables.steps.to_pylist():
        of_step[step["step"]] = [
            call["end_ns"] - call["start_ns"]
            for call in sorted(calls, key=lambda each: each["launch_start_ns"])
            if step["begin_ns"] <= call["launch_start_ns"] < step["end_ns"]
        ]
    first = finding["steps"][0]
    (each_step,) = {len(of_step[step]) for step in finding["steps"]}
    longest = of_step[first].index(max(of_step[first]))
    skip = longest if marked else each_step * first + longest
    assert argv[argv.index("--launch-skip") + 1] == str(skip)
    assert (f"step {first}/" in argv) == marked


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("nvjet_sm90_tst", "nvjet_sm90_tst"),
        ("void at::native::(anonymous namespace)::norm<c10::Half, (int)4>(int, float*)", "norm"),
        ("void f<(a)1, b<c> >(d (*)(e))", "f"),
        ("memcpy host_to_device", "host_to_device"),
        ("(((", "((("),
        ("", ""),
    ],
)
def test_a_kernel_s_function_is_what_ncu_calls_it(kernel: str, name: str) -> None:
    assert words.base_name(kernel) == name


def test_a_script_without_a_command_is_not_said_to_have_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands_of(exported(run, "ncu", tmp_path / "t.sh")) == []
    printed = capsys.readouterr().err
    assert "no finding names a kernel" in printed
    assert "no command" in printed
    assert "put its command" not in printed


def test_what_experiment_trackers_get_is_what_the_results_say(
    straggler: Study, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trackers are stand-ins: docs/export.md says with which real ones these lines were run."""
    results = straggler.results
    (found,) = [each for each in results["findings"] if each["code"] == "straggler.host"]
    lesser = {**found, "saved_ns_per_step": 1}  # a second rank, of which less is saved
    again = {**results, "findings": [*results["findings"], lesser]}
    (run / "merged" / "results.json").write_bytes(results_json.dumps(again))
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()
    page = page.replace("runs/…", str(run))
    first, *trackers = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    wandb, mlflow, tensorboard = (MagicMock() for _ in range(3))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    monkeypatch.setitem(sys.modules, "torch.utils", MagicMock())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    assert len(trackers) == 3
    for each in trackers:
        exec(first + each, {})
    (figures,) = wandb.init.return_value.__enter__.return_value.log.call_args.args
    assert figures["step_ms"] == pytest.approx(results["pace"]["step_ns"] / 1e6)
    assert figures["saved_ms/straggler.host"] == pytest.approx(found["saved_ns_per_step"] / 1e6)
    assert figures["alone_ms/straggler.host"] == pytest.approx(found["saved_alone_ns"] / 1e6)
    assert mlflow.log_metrics.call_args.args == (figures,)
    assert Path(mlflow.log_artifact.call_args.args[0]).is_file()
    writer = tensorboard.SummaryWriter.return_value.__enter__.return_value
    assert dict(each.args for each in writer.add_scalar.call_args_list) == figures


# --- csv, parquet


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_tables_hold_what_the_results_say(straggler: Study, run: Path, tmp_path: Path) -> None:
    made = exported(run, "csv", tmp_path / "t")
    results = straggler.results
    for ours, clock in zip(rows(made / "ranks.csv"), results["clock"]["ranks"], strict=True):
        assert int(ours["clock_offset_ns"]) == clock["offset_ns"]
        assert int(ours["clock_uncertainty_ns"]) == clock["uncertainty_ns"]
    steps = rows(made / "steps.csv")
    assert [int(each["idle_ns"]) for each in steps] == straggler.accounts["idle_ns"].to_pylist()
    steady = {each["step"] for each in results["steps"] if each["settled"]}
    assert {int(each["step"]) for each in steps if each["steady_state"] == "true"} == steady
    findings = rows(made / "findings.csv")
    for name in ("code", "severity", "recurrence", "saved_alone_ns", "summary", "advice"):
        assert [each[name] for each in findings] == [str(e[name]) for e in results["findings"]]
    waits = [each["wait_ns"] for each in rows(made / "collectives.csv")]
    expected = straggler.collectives["wait_ns"].to_pylist()
    assert [int(each) if each else None for each in waits] == expected
    (one, *_) = rows(made / "operations.csv")
    assert one["ranks"] == "0-3"


def test_csv_and_parquet_hold_the_same(run: Path, tmp_path: Path) -> None:
    one, two = exported(run, "csv", tmp_path / "csv"), exported(run, "parquet", tmp_path / "p")
    assert {each.stem for each in one.iterdir()} == set(flat_tables.NAMES)
    for name in flat_tables.NAMES:
        table = parquet.read_table(two / f"{name}.parquet")
        read = rows(one / f"{name}.csv")
        assert len(read) == table.num_rows
        assert list(read[0]) == table.column_names


def test_summaries_add_up_and_say_which_rank_has_the_most(
    straggler: Study, run: Path, tmp_path: Path
) -> None:
    made = exported(run, "parquet", tmp_path / "t")
    table = {
        name: parquet.read_table(made / f"{name}.parquet").to_pylist()
        for name in ("kernels", "host_calls", "ranges", "copies")
    }
    for tables in straggler.ranks:
        own = [row for row in table["kernels"] if row["rank"] == tables.rank]
        kernels = [r for r in tables.activity.to_pylist() if r["kind"] in ("compute", "collective")]
        for row in own:
            lengths = [r["end_ns"] - r["start_ns"] for r in kernels if r["name"] == row["name"]]
            assert row["calls"] == len(lengths)
            assert row["total_ns"] == sum(lengths)
            assert row["median_ns"] == int(statistics.median(lengths))
            assert (row["min_ns"], row["max_ns"]) == (min(lengths), max(lengths))
        assert sum(row["calls"] for row in own) == len(kernels)
    for rows_ in table.values():
        every = [row for row in rows_ if row["rank"] is None]
        single = [row for row in rows_ if row["rank"] is not None]
        assert sum(row["total_ns"] for row in every) == sum(row["total_ns"] for row in single)
    sleeps = [r for r in table["host_calls"] if r["rank"] is None and "sleep" in r["name"]]
    assert {row["most_rank"] for row in sleeps} == {2}


def test_what_a_range_launched_counts_by_any_thread(tmp_path: Path) -> None:
    ranks, _ = simulate(Job(steps=3))
    (tables, *_) = ranks
    begin = int(tables.activity["launch_start_ns"][10].as_py())
    end = int(tables.activity["launch_start_ns"][30].as_py())
    names = tables.host_calls.schema
    calls = pa.table(
        {
            "start_ns": [begin], "end_ns": [end], "kind": ["range"], "name": ["forward"],
            "thread": [1], "correlation": [None],
        }
    ).cast(names)  # fmt: skip
    made = study([replace(tables, host_calls=calls), *ranks[1:]])
    found = exported(saved(made, tmp_path / "run"), "parquet", tmp_path / "t")
    (row,) = [
        row for row in parquet.read_table(found / "ranges.parquet").to_pylist() if row["rank"] == 0
    ]
    inside = [
        each["end_ns"] - each["start_ns"] for each in tables.activity.to_pylist()
        if begin <= each["launch_start_ns"] <= end
    ]  # fmt: skip
    assert row["device_ns"] == sum(inside) > 0


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-gpu-straggler"])
def test_copies_are_grouped_by_size(
    studied: Callable[[str], Study], recording: str, tmp_path: Path
) -> None:
    made = studied(recording)
    found = exported(saved(made, tmp_path / "run"), "parquet", tmp_path / "t")
    read = parquet.read_table(found / "copies.parquet").to_pylist()
    for tables in made.ranks:
        copies = [row for row in tables.activity.to_pylist() if row["kind"] == "copy"]
        own = [row for row in read if row["rank"] == tables.rank]
        assert sum(row["calls"] for row in own) == len(copies)
        for row in own:
            highest = row["size_up_to_bytes"]
            group = [
                each["size_bytes"] for each in copies
                if highest / 2 < each["size_bytes"] <= highest
                and each["direction"] == row["direction"]
            ]  # fmt: skip
            assert (row["calls"], row["bytes"]) == (len(group), sum(group))
    batches = [row for row in read if row["direction"] == "host_to_device"]
    assert {(row["memory"], row["size_up_to_bytes"]) for row in batches} == {("pinned", 2**25)}


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
def test_the_phases_of_the_step_have_their_time_on_the_host_and_on_the_device(
    studied: Callable[[str], Study], recording: str, tmp_path: Path
) -> None:
    found = exported(saved(studied(recording), tmp_path / "run"), "parquet", tmp_path / "t")
    phases = {
        row["name"]: row for row in parquet.read_table(found / "ranges.parquet").to_pylist()
        if row["rank"] == 2 and row["name"] in ("data", "forward", "backward", "optimizer")
    }  # fmt: skip
    host = sorted(phases, key=lambda name: -phases[name]["total_ns"])
    assert host == ["data", "backward", "forward", "optimizer"]  # the sleep is planted in `data`
    device = sorted(phases, key=lambda name: -phases[name]["device_ns"])
    assert device == ["backward", "data", "forward", "optimizer"]
    copies = parquet.read_table(found / "copies.parquet").to_pylist()
    assert [phases["data"]["device_ns"]] == [
        row["total_ns"] for row in copies
        if row["rank"] == 2 and row["direction"] == "host_to_device"
    ]  # fmt: skip


@pytest.mark.parametrize(("late", "bound"), [(True, "launch"), (False, "unknown")])
def test_a_kernel_is_launch_bound_where_its_stream_waits_for_launches(
    late: bool, bound: str, tmp_path: Path
) -> None:
    ranks, _ = simulate(Job(steps=2, dp=2))
    (tables, *others) = ranks
    start = np.arange(50) * 10_000 + int(tables.activity["start_ns"][0].as_py())
    launch = start - (2_000 if late else 20_000)
    columns = {
        "start_ns": start, "end_ns": start + 5_000, "kind": ["compute"] * 50, "name": ["k"] * 50,
        "device": [0] * 50, "stream": [7] * 50, "launch_start_ns": launch,
        "launch_end_ns": launch + 10, "launch_thread": [1] * 50,
    }  # fmt: skip
    schema = tables.activity.schema
    arrays = [pa.array(columns.get(name, [None] * 50)) for name in schema.names]
    activity = pa.table(arrays, schema.names).cast(schema)
    made = study([replace(tables, activity=activity), *others])
    found = exported(saved(made, tmp_path / "run"), "parquet", tmp_path / "t")
    (row,) = [
        row for row in parquet.read_table(found / "kernels.parquet").to_pylist()
        if (row["rank"], row["name"]) == (0, "k")
    ]  # fmt: skip
    assert (row["launched_late"], row["bound"]) == (49 if late else 0, bound)


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", RIGHT_TO_LEFT, 'a"b,c\n'])
def test_no_name_is_a_formula(name: str, straggler: Study, tmp_path: Path) -> None:
    ranks = [renamed(each, name) for each in straggler.ranks]
    run = saved(replace(straggler, ranks=tuple(ranks)), tmp_path / "run")
    (shown,) = {row["name"] for row in rows(exported(run, "csv", tmp_path / "t") / "kernels.csv")}
    assert not shown.startswith(("=", "+", "-", "@"))
    assert "\u202e" not in shown
    assert "\n" not in shown


# --- the command


@pytest.mark.parametrize("form", export.FORMATS)
def test_no_command_line_and_no_path_is_exported(
    form: str, straggler: Study, tmp_path: Path
) -> None:
    secret = "--api-key=hunter2"
    command = {"next": f"clusterprof srun -- {secret}"}
    findings = [each | command for each in straggler.results["findings"]]
    ranks = [each | {"source": f"/home/{secret}"} for each in straggler.results["ranks"]]
    results = straggler.results | {"findings": findings, "ranks": ranks}
    run = saved(replace(straggler, results=results), tmp_path / "run")
    made = exported(run, form, tmp_path / "t")
    files = list(made.iterdir()) if made.is_dir() else [made]
    if form == "nsys":  # it has the reports' paths, to run nsys on
        return
    content = b"".join(
        str(parquet.read_table(each).to_pylist()).encode()
        if each.suffix == ".parquet" else each.read_bytes()
        for each in files
    )  # fmt: skip
    if zipfile.is_zipfile(made):
        with zipfile.ZipFile(made) as archive:
            content = b"".join(map(archive.read, archive.namelist()))
    assert b"hunter2" not in content


@pytest.mark.parametrize("form", export.FORMATS)
def test_every_format_takes_a_run_with_little_in_it(form: str, tmp_path: Path) -> None:
    one, _ = simulate(Job(steps=2))
    bare = replace(
        one[0],
        activity=one[0].activity.slice(0, 0),
        collective_calls=one[0].collective_calls.slice(0, 0),
        host_calls=one[0].host_calls.slice(0, 0),
    )
    assert exported(saved(study([bare]), tmp_path / "run"), form, tmp_path / "t").exists()


@pytest.mark.parametrize("form", export.FORMATS)
def test_a_run_is_as_it_was_after_an_export(form: str, run: Path, tmp_path: Path) -> None:
    def content() -> dict[Path, tuple[bytes, int]]:
        return {
            path: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted(run.rglob("*")) if path.is_file()
        }  # fmt: skip

    before = content()
    exported(run, form, tmp_path / "t")
    assert content() == before


@pytest.mark.parametrize("form", export.FORMATS)
def test_only_what_export_wrote_is_replaced(
    form: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = exported(run, form, tmp_path / "t")
    again = ["export", str(run), "--format", form, "-o", str(made)]
    assert main.run(again) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert main.run([*again, "--force"]) == 0
    mine = made / "mine" if made.is_dir() else made
    mine.write_text("mine")
    assert main.run([*again, "--force"]) == 2
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("what", ["collectives", "accounts", "activity"])
@pytest.mark.parametrize("content", ["damaged", "other"])
def test_a_damaged_run_is_said_to_be(
    what: str, content: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "tables" / "00002" if what == "activity" else run / "merged"
    file = folder / f"{what}.parquet"
    if content == "damaged":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        parquet.write_table(pa.table({"rank": [1]}), file)
    status = main.run(["export", str(run), "--format", "perfetto", "-o", str(tmp_path / "t")])
    assert status == 3
    printed = capsys.readouterr().err
    assert str(file) in printed
    assert "merge" in printed
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("form", export.FORMATS)
@pytest.mark.parametrize("what", ["no clock", "beyond 64 bits", "another rank", "a rank twice"])
def test_results_edited_by_hand_are_said_to_be_damaged(
    what: str, form: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "merged" / "results.json"
    results = json.loads(file.read_text())
    if what == "no clock":
        results["clock"]["ranks"] = []
    elif what == "another rank":
        results["ranks"][0]["rank"] = 7
    elif what == "a rank twice":
        results["ranks"].append(results["ranks"][0])
    else:
        results["findings"][0]["cost_ns_per_step"] = 2**63
    file.write_text(json.dumps(results))
    status = main.run(["export", str(run), "--format", form, "-o", str(tmp_path / "t")])
    # what needs no clock of each rank is still written
    assert status == (3 if what != "no clock" or form not in ("prometheus", "ncu", "nsys") else 0)
    if status:
        assert str(file) in capsys.readouterr().err


def test_a_run_without_a_profiled_rank_is_exported_as_one(tmp_path: Path) -> None:
    run = saved(study([]), tmp_path / "run")
    for form in export.FORMATS:
        assert exported(run, form, tmp_path / form).exists()


def test_a_run_that_is_not_merged_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["export", str(tmp_path), "--format", "perfetto"]) == 3
    assert "has not been merged" in capsys.readouterr().err


def test_a_rank_whose_tables_are_gone_has_its_steps_and_collectives(
    run: Path, tmp_path: Path
) -> None:
    for file in (run / "tables" / "00001").iterdir():
        file.unlink()
    trace = Trace(exported(run, "perfetto", tmp_path / "t"))
    assert {e.category for e in trace.slices if trace.process(e) == "rank 1 · node0"} == {
        "step", "collective",
    }  # fmt: skip
