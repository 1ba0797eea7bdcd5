"""What a study consists of, as hashes by key: results, tables, the page's data, exports."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.csv as csv
import pyarrow.parquet as parquet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as published

from clusterprof import __version__, merge_run
from clusterprof.cli import main
from clusterprof.cli.export import FORMATS
from clusterprof.report import results_json, text
from clusterprof.run_directory import Window
from clusterprof.study import Study
from clusterprof.tables import SCHEMAS
from golden.hashes import by_column, by_key, digest, of_value

Hashes = dict[str, str]
#: what the page embeds is in elements of this form
_EMBEDDED = re.compile(r'<script type="application/json" id="([^"]+)">(.*?)</script>', re.DOTALL)
#: the version is no part of what is compared
_WITHOUT = "clusterprof_version"


def of_results(result: Study) -> Hashes:
    """`results.json`, as it is written, by key."""
    return by_key("results", without_version(json.loads(results_json.dumps(result.results))))


def of_text(result: Study) -> str:
    """What the terminal prints."""
    return text.render(result.results, colour=False, width=100)


def of_tables(result: Study) -> Hashes:
    """The merged tables and those of all ranks, by column."""
    whole = {
        name: getattr(result, name) for name in ("collectives", "accounts", "lanes", "shallow")
    }
    hashes: Hashes = {}
    for name, table in whole.items():
        if table is not None:
            hashes |= by_column(f"table {name}", [table])
    for name in SCHEMAS:
        hashes |= by_column(f"table {name}", [getattr(rank, name) for rank in result.ranks])
    return hashes


def of_page(run: Window) -> Hashes:
    """What the page of a saved run embeds, by element and key."""
    hashes: Hashes = {}
    for name, content in _EMBEDDED.findall(run.html.read_text()):
        value = json.loads(html.unescape(content))
        if "gzip" in value:
            value = json.loads(gzip.decompress(base64.b64decode(value["gzip"])))
            hashes[f"page {name}"] = of_value(without_version(value))
        else:
            hashes |= by_key(f"page {name}", value)
    return hashes


def of_exports(run: Window, target: Path) -> Hashes:
    """All formats of `clusterprof export`, each by what it consists of."""
    hashes: Hashes = {}
    target.mkdir()
    for form in FORMATS:
        file = target / form
        assert main.run(["export", str(run.path), "--format", form, "-o", str(file)]) == 0
        read = _READERS.get(form, _of_lines)
        hashes |= {f"export {form} {key}": value for key, value in read(file).items()}
    return hashes


def without_version(value: Mapping[str, Any]) -> dict[str, Any]:
    """A document without the version of who wrote it."""
    return {key: inner for key, inner in value.items() if key != _WITHOUT}


def save(result: Study, run: Window) -> None:
    """Write tables, results and page, as merging does."""
    run.path.mkdir(exist_ok=True)
    merge_run.save(result, run)


def _of_packets(content: bytes) -> Hashes:
    """A trace of Perfetto's by the kinds of its packets."""
    trace = published.Trace.FromString(content)
    packets: dict[str, list[bytes]] = defaultdict(list)
    for packet in trace.packet:
        kind = packet.WhichOneof("data") or "none"
        if __version__.encode() not in packet.SerializeToString():
            packets[kind].append(packet.SerializeToString(deterministic=True))
        for name in ("event_names", "event_categories", "debug_annotation_names"):
            packets[name] += [
                entry.SerializeToString(deterministic=True)
                for entry in getattr(packet.interned_data, name)
            ]
    return {kind: digest(items) for kind, items in packets.items() if items}


def _of_archive(file: Path) -> Hashes:
    hashes: Hashes = {}
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            content = archive.read(name)
            if name.endswith(".json"):
                hashes |= by_key(name, json.loads(content))
            else:
                hashes |= {f"{name} {key}": value for key, value in _of_packets(content).items()}
    return hashes


def _of_chrome(file: Path) -> Hashes:
    document = json.loads(file.read_text().replace(__version__, "VERSION"))
    return by_key("trace", document)


def _of_csv(folder: Path) -> Hashes:
    hashes: Hashes = {}
    for file in sorted(folder.iterdir()):
        hashes |= by_column(file.name, [csv.read_csv(file)])
    return hashes


def _of_parquet(folder: Path) -> Hashes:
    hashes: Hashes = {}
    for file in sorted(folder.iterdir()):
        hashes |= by_column(file.name, [parquet.read_table(file)])
    return hashes


def _of_lines(file: Path) -> Hashes:
    """A text: as many lines, and their hash by what each begins with."""
    items: dict[str, list[str]] = defaultdict(list)
    for line in file.read_text().replace(__version__, "VERSION").splitlines():
        items[re.split(r"[ {(]", line.removeprefix("# ").strip(), maxsplit=1)[0][:30]].append(line)
    return {f"lines {key}": of_value(lines) for key, lines in items.items()}


_READERS: dict[str, Callable[[Path], Hashes]] = {
    "perfetto": lambda file: _of_packets(file.read_bytes()),
    "perfetto-archive": _of_archive,
    "chrome-json": _of_chrome,
    "csv": _of_csv,
    "parquet": _of_parquet,
}
