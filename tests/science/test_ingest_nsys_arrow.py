"""What nsys exports as Arrow is read as its SQLite export of the same report is."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from lab.unpack import unpack

from clusterprof.errors import ReportError
from clusterprof.ingest.assembler import assemble
from clusterprof.ingest.nsys import schema, sqlite
from clusterprof.ingest.nsys.database import Export, gathered
from clusterprof.ingest.recording import Recording

FOLDER = Path(__file__).parents[1] / "data" / "nsys-arrow"
ORIGIN = Path("rank1.nsys-rep")
Change = Callable[[pa.Table], pa.Table]


@pytest.fixture
def arrow(tmp_path: Path) -> Path:
    unpack(FOLDER / "rank1.arrow.tar.xz", tmp_path / "arrow")
    return tmp_path / "arrow"


def read(arrow: Path) -> Recording:
    database = arrow.with_name("database")
    (recording,) = sqlite.read(database, ORIGIN, numbers=gathered(arrow, database))
    return recording


def change(file: Path, how: Change) -> None:
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    with pa.ipc.new_stream(str(file), (changed := how(table)).schema) as written:
        written.write_table(changed)


def test_it_is_what_the_sqlite_export_of_the_same_report_is(arrow: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.sqlite"
    whole.write_bytes(lzma.decompress((FOLDER / "rank1.sqlite.xz").read_bytes()))
    (expected,) = sqlite.read(whole, ORIGIN)
    found = read(arrow)
    assert found.info == expected.info
    assert (found.info.rank, found.info.world_size, found.info.host) == (1, 2, "vm")
    ours, theirs = assemble(found), assemble(expected)
    assert ours.collective_calls.num_rows > 0
    for name in ("activity", "host_calls", "collective_calls", "steps"):
        assert getattr(ours, name).equals(getattr(theirs, name)), name


def test_of_a_process_its_own_rows_are_read(arrow: Path, tmp_path: Path) -> None:
    kernels = arrow / f"{schema.KERNEL.name}.arrow"
    other = (7 << 24) + 1

    def half(table: pa.Table) -> pa.Table:
        owner = np.array(table.column("globalPid").to_pylist(), np.uint64)
        owner[::2] = other
        place = table.column_names.index("globalPid")
        return table.set_column(place, "globalPid", pa.array(owner))

    change(kernels, half)
    export = Export(tmp_path / "database", ORIGIN, gathered(arrow, tmp_path / "database"))
    both = [export.numbers(schema.KERNEL, process)["start"].size for process in (7, None)]
    export.close()
    assert both == [648, 1296]


def test_what_is_missing_is_no_number_of_another_row(arrow: Path, tmp_path: Path) -> None:
    kernels = arrow / f"{schema.KERNEL.name}.arrow"

    def without(table: pa.Table) -> pa.Table:
        empty = pa.nulls(table.num_rows, pa.uint32())
        place = table.column_names.index("deviceId")
        return table.set_column(place, "deviceId", empty).drop_columns(["shortName"])

    change(kernels, without)
    kernels.rename(kernels.with_name(f"{schema.KERNEL.name}_V3.arrow"))
    export = Export(tmp_path / "database", ORIGIN, gathered(arrow, tmp_path / "database"))
    assert not export.has(schema.KERNEL.name, "shortName")
    found = export.kernels
    export.close()
    assert set(found["deviceId"]) == set(found["shortName"]) == {-1}
    assert found["demangledName"].min() > 0


def test_a_table_that_a_full_disk_has_cut_is_no_shorter_one(arrow: Path) -> None:
    file = arrow / f"{schema.KERNEL.name}.arrow"
    first = pa.BufferOutputStream()
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    with pa.ipc.new_stream(first, table.schema) as written:
        written.write_table(table[:600])
    file.write_bytes(first.getvalue().to_pybytes()[:-8])
    assert pa.ipc.open_stream(file.read_bytes()).read_all().num_rows == 600
    with pytest.raises(ReportError, match=r"KERNEL\.arrow is truncated"):
        read(arrow)


@pytest.mark.parametrize("name", [schema.KERNEL.name, schema.STRINGS])
def test_a_damaged_table_is_an_error_that_names_the_report(arrow: Path, name: str) -> None:
    file = arrow / f"{name}.arrow"
    whole = file.read_bytes()
    file.write_bytes(b"garbage" + whole[len(whole) // 2 :])
    with pytest.raises(ReportError, match="cannot be read"):
        read(arrow)


def test_a_kernel_that_begins_at_no_time_is_an_error(arrow: Path) -> None:
    def timeless(table: pa.Table) -> pa.Table:
        none = pa.nulls(table.num_rows, pa.int64())
        return table.set_column(table.column_names.index("start"), "start", none)

    change(arrow / f"{schema.KERNEL.name}.arrow", timeless)
    with pytest.raises(ReportError, match="truncated or damaged") as caught:
        read(arrow)
    assert caught.value.details[0] == "arrow printed: not every start is a whole number"
