"""Two reports of one rank and window: nsys for the system, torch.profiler for the collectives."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.ingest.columns import joined
from clusterprof.tables import RankTables


def combine(nsys: RankTables, kineto: RankTables) -> RankTables:
    """Return one rank's tables from an nsys report and a Kineto trace of the same window.

    On a CPU-only rank nsys sees neither operators nor gloo: activity and collectives come
    from Kineto where nsys has none, OS calls from nsys always, the rest of the host's calls
    from whichever report gave the activity. Both clocks are the host's wall clock.
    """
    has_activity = nsys.activity.num_rows > 0
    has_calls = nsys.collective_calls.num_rows > 0
    first, second = (nsys, kineto) if has_activity else (kineto, nsys)
    host = joined("host_calls", [_not_os(first.host_calls), _os(nsys.host_calls)], by="start_ns")
    warnings = tuple(dict.fromkeys((*nsys.warnings, *kineto.warnings)))
    info = replace(
        nsys.info,
        profiler=f"{nsys.info.profiler} + {kineto.info.profiler}",
        rank=nsys.info.rank if nsys.info.rank is not None else kineto.info.rank,
        world_size=nsys.info.world_size or kineto.info.world_size,
        host=nsys.info.host or kineto.info.host,
        device=nsys.info.device or kineto.info.device,
        begin_ns=min(nsys.info.begin_ns, kineto.info.begin_ns),
        end_ns=max(nsys.info.end_ns, kineto.info.end_ns),
        backend=nsys.info.backend or kineto.info.backend,
        warnings=warnings,
    )
    return RankTables(
        info=info,
        activity=first.activity,
        collective_calls=(nsys if has_calls else kineto).collective_calls,
        steps=first.steps if first.steps.num_rows else second.steps,
        host_calls=host,
        warnings=warnings,
    )


def _os(calls: pa.Table) -> pa.Table:
    return calls.filter(pc.equal(calls.column("kind").cast(pa.string()), "os"))


def _not_os(calls: pa.Table) -> pa.Table:
    return calls.filter(pc.not_equal(calls.column("kind").cast(pa.string()), "os"))
