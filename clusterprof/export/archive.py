"""A merged run as Perfetto's archive: one trace a rank, and a manifest that says how they align.

The manifest's form: https://perfetto.dev/docs/reference/perfetto-manifest. It has no field for a
drift, so that is removed from the times.
"""

from __future__ import annotations

import json
import zipfile
from typing import IO

from clusterprof.export import perfetto
from clusterprof.export.merged_tables import Merged
from clusterprof.export.tracks import Cut, first_moment, of_rank, shown

#: the clock of each file, as its snapshot has it
_CLOCK = "BOOTTIME"
_FINDINGS = "clusterprof-findings.pftrace"


def write(merged: Merged, own: Merged, file: IO[bytes], chosen: Cut) -> None:
    """Write all ranks' traces and the manifest; `own`: the run on the ranks' own clocks.

    What is left out is noted in `chosen`.
    """
    offsets = dict(zip(merged.clock.ranks, merged.clock.offset_ns.tolist(), strict=True))
    begins = {}
    with zipfile.ZipFile(file, "w") as archive:
        for rank in merged.ranks:
            trace, begin_ns = perfetto.trace_of_rank(own, rank, of_rank(own, rank, chosen))
            begins[rank] = begin_ns - offsets[rank]
            archive.writestr(_member(_name(rank)), trace)
        begin_ns = min([*begins.values(), *first_moment(merged)], default=0)
        trace = perfetto.trace_of_findings(merged, begin_ns, chosen.notes)
        archive.writestr(_member(_FINDINGS), trace)
        reference = {"file": _FINDINGS, "clock": _CLOCK}
        ranks = [
            {
                "path": _name(rank),
                "machine": {"name": shown(merged.names[rank])},
                "clocks": {"clock": _CLOCK, "sync_to": reference, "offset_ns": begin - begin_ns},
            }
            for rank, begin in begins.items()
        ]
        manifest = {
            "version": 1,
            "trace_time": {"clock": _CLOCK, "file": _FINDINGS},
            "attributes": perfetto.about_trace(merged, chosen.notes),
            "files": [{"path": _FINDINGS, "machine": {"name": "clusterprof"}}, *ranks],
        }
        # by these first letters Perfetto knows it
        content = json.dumps({"perfetto_manifest": manifest})
        archive.writestr(_member("perfetto_manifest.json"), content)


def _name(rank: int) -> str:
    return f"clusterprof-rank-{rank:05d}.pftrace"


def _member(name: str) -> zipfile.ZipInfo:
    """A member that is the same whenever it is written."""
    member = zipfile.ZipInfo(name)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = 0o644 << 16
    return member
