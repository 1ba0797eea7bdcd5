"""GPUs that idle on all ranks because hosts are slow: launches, synchronising calls, the GIL,
input. A single rank's late host is a straggler and no matter of this file."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from clusterprof.analysis import host
from clusterprof.analysis.finding import LEAST_FRAC, capture, finding, ms, percent
from clusterprof.analysis.intervals import Union, union
from clusterprof.analysis.scene import Floats, Scene
from clusterprof.analysis.timeline import COMPUTE, Timeline
from clusterprof.results import Finding

#: kernels shorter than this are launched no faster than they run
_SHORT_KERNEL_NS = 15_000
#: a gap longer than this is not the pace of launching
_LAUNCH_GAP_NS = 200_000
_INPUT = r"(?i)^(data|input|batch|fetch|dataload)|dataloader|next_batch|get_batch"


def idle_gaps(line: Timeline) -> Union:
    """When the rank's device had nothing to do, between the first and the last step's ends."""
    start = np.r_[line.begin[0], line.busy.end]
    end = np.r_[line.busy.start, line.end[-1]]
    keep = (end > start) & (end > line.begin[0]) & (start < line.end[-1])
    return union(
        np.maximum(start[keep], line.begin[0]).astype(np.int64),
        np.minimum(end[keep], line.end[-1]).astype(np.int64),
    )


def _settled(scene: Scene, line: Timeline, each: np.ndarray) -> Floats:
    out = np.full(len(scene.settled), np.nan)
    known = np.isin(line.step, scene.settled)
    out[np.searchsorted(scene.settled, line.step[known])] = each[known]
    return out


def _table(scene: Scene, measure: list[Floats]) -> Floats:
    return np.stack(measure) if measure else np.zeros((0, len(scene.settled)))


def _means(each: Floats) -> Floats:
    """Mean over steps per rank; 0 for a rank that has none of them."""
    known = ~np.isnan(each)
    return np.asarray(np.nansum(each, axis=1) / np.maximum(known.sum(axis=1), 1))


def find(scene: Scene) -> list[Finding]:
    """Return `host.gil`, `input.stall`, `host.sync` and `host.launch_bound`.

    Idle time is given to one cause only, in this order: waiting for the GIL, fetching input,
    a synchronising call, the pace of launching.
    """
    if not scene.settled:
        return []
    gaps = [idle_gaps(line) for line in scene.timelines]
    found: list[Finding] = []
    for cause in (_gil, _input, _sync, _launch):
        one, gaps = cause(scene, gaps)
        if one is not None:
            found.append(one)
    return found


Answer = tuple["Finding | None", "list[Union]"]


def _overlap(scene: Scene, gaps: list[Union], with_: list[Union]) -> tuple[Floats, list[Union]]:
    """Idle time inside other intervals per rank and step, and those intersections."""
    common = [host.both(g, w) for g, w in zip(gaps, with_, strict=True)]
    each = [
        _settled(scene, line, c.within(line.begin, line.end))
        for line, c in zip(scene.timelines, common, strict=True)
    ]
    return _table(scene, each), common


def _without(gaps: list[Union], taken: list[Union]) -> list[Union]:
    """Gaps that do not touch what has been given to a cause."""
    out = []
    for gap, used in zip(gaps, taken, strict=True):
        free = used.within(gap.start, gap.end) == 0
        out.append(union(gap.start[free], gap.end[free]))
    return out


def _gil(scene: Scene, gaps: list[Union]) -> Answer:
    waits = [host.spans(t, "python", host.GIL_WAIT) for t in scene.tables]
    if not any(len(w.start) for w in waits):
        return None, gaps
    each, common = _overlap(scene, gaps, waits)
    cost = np.nanmean(each, axis=0)
    per_step = float(np.nan_to_num(cost).mean())
    if per_step < LEAST_FRAC * scene.step_ns:
        return None, gaps
    of_rank = _means(each)
    worst = int(np.argmax(of_rank))
    rank = scene.ranks[worst]
    hit = [r for r, w in zip(scene.ranks, of_rank, strict=True) if w >= 0.3 * of_rank[worst]]
    made = finding(
        scene,
        "host.gil",
        rank=rank,
        ranks=hit,
        cost=cost,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.9,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(per_step / scene.step_ns)}) "
        f"while their host waits for Python's interpreter lock, rank {rank} worst",
        evidence=[
            {
                "rank": int(r),
                "steps": list(scene.settled),
                "idle_ns_per_step": round(float(of_rank[k])),
                "what": f"{ms(float(of_rank[k]))} a step idle while waiting for the GIL",
            }
            for k, r in enumerate(scene.ranks)
            if r in hit
        ][:16],
        advice="other Python threads hold the lock: move their work into processes, or into "
        "native code that releases it",
        follow_up=capture(scene, hit[:2], "--trace", "cuda,nvtx,python-gil", "--cpu-sampling"),
    )
    return made, _without(gaps, common)


def _input(scene: Scene, gaps: list[Union]) -> Answer:
    ranges = [host.spans(t, "range", _INPUT) for t in scene.tables]
    ops = [host.spans(t, "op", r"(?i)dataloader") for t in scene.tables]
    fetch = [
        union(np.r_[a.start, b.start].astype(np.int64), np.r_[a.end, b.end].astype(np.int64))
        for a, b in zip(ranges, ops, strict=True)
    ]
    each, common = _overlap(scene, gaps, fetch)
    of_rank = _means(each)
    # one rank alone that fetches late is a straggler; here all of them starve
    usual = np.nanmedian(each, axis=0) if len(each) else np.zeros(len(scene.settled))
    if float(np.nan_to_num(usual).mean()) < LEAST_FRAC * scene.step_ns:
        return None, gaps
    # the last to have its batch sets the pace, but what it alone is late by is a straggler's cost
    usual = np.sort(np.nan_to_num(each), axis=0)[-2:][0]
    per_step = float(usual.mean())
    made = finding(
        scene,
        "input.stall",
        rank=None,
        ranks=[r for r, w in zip(scene.ranks, of_rank, strict=True) if w >= 0.5 * per_step],
        cost=usual,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.85,
        summary=f"GPUs starve {ms(per_step)} of each step ({percent(per_step / scene.step_ns)}) "
        "while their hosts fetch the batch",
        evidence=[
            {
                "rank": int(r),
                "steps": list(scene.settled),
                "idle_ns_per_step": round(float(of_rank[k])),
                "what": f"{ms(float(of_rank[k]))} a step idle while the host fetches",
            }
            for k, r in enumerate(scene.ranks)
        ][:16],
        advice="fetch ahead: more DataLoader workers, prefetch_factor, persistent_workers, or "
        "cheaper preprocessing",
    )
    return made, _without(gaps, common)


def _sync(scene: Scene, gaps: list[Union]) -> Answer:
    """A small copy to the host, waited for, and a GPU that starves until the next launch."""
    after = []
    count = 0
    blocked: list[Floats] = []
    for tables, line, gap in zip(scene.tables, scene.timelines, gaps, strict=True):
        table = tables.activity
        back = pc.fill_null(pc.equal(table["direction"], "device_to_host"), fill_value=False)
        rows = np.flatnonzero(np.asarray(back.to_numpy(zero_copy_only=False), dtype=bool))
        size = np.asarray(pc.fill_null(table["size_bytes"], 0).to_numpy())[rows]
        rows = rows[size <= 4096]
        syncs = host.spans(tables, "cuda", r"(?i)(stream|device|event)synchronize|memcpy")
        # the host waits from before the copy until its end, or longer
        at = np.searchsorted(syncs.start, line.stop[rows], side="right") - 1
        inside = np.zeros(len(rows), dtype=bool)
        if len(syncs.start):
            inside = (at >= 0) & (syncs.end[np.maximum(at, 0)] >= line.stop[rows])
        rows, at = rows[inside], at[inside]
        step = np.r_[line.step, -1][line.step_of[rows]]
        within = np.isin(step, scene.settled)
        rows, at = rows[within], at[within]
        count += len(rows)
        waited = np.bincount(
            np.searchsorted(scene.settled, step[within]),
            (syncs.end - syncs.start)[at] if len(at) else None,
            len(scene.settled),
        )
        blocked.append(waited.astype(float))
        follows = np.isin(gap.start, line.stop[rows])
        after.append(union(gap.start[follows], gap.end[follows]))
    if not count:
        return None, gaps
    each = _table(
        scene,
        [
            _settled(scene, line, a.within(line.begin, line.end))
            for line, a in zip(scene.timelines, after, strict=True)
        ],
    )
    cost = np.nan_to_num(np.nanmean(each, axis=0))
    waits = float(np.mean(blocked))
    per_step = float(cost.mean())
    calls = count / max(len(scene.ranks) * len(scene.settled), 1)
    if waits < LEAST_FRAC * scene.step_ns:
        return None, gaps
    made = finding(
        scene,
        "host.sync",
        rank=None,
        ranks=scene.ranks,
        cost=cost,
        confidence=0.85,
        summary=f"the host waits for the GPU inside the step, {calls:.0f} time"
        f"{'s' if round(calls) != 1 else ''} and {ms(waits)} a step; the GPU then starves "
        f"{ms(per_step)} ({percent(per_step / scene.step_ns)})",
        evidence=[
            {
                "ranks": list(scene.ranks),
                "steps": list(scene.settled),
                "host_wait_ns_per_step": round(waits),
                "what": "a copy of a few bytes to the host, and a synchronising call around it "
                "(.item() and its like)",
            }
        ],
        advice="read losses and metrics every so many steps, or copy them with non_blocking=True "
        "and look a step later",
        follow_up=capture(scene, scene.ranks[:1], "--pytorch", "autograd-nvtx"),
    )
    return made, _without(gaps, after)


def _launch(scene: Scene, gaps: list[Union]) -> Answer:
    """Short gaps before kernels that were launched only after the GPU had run dry."""
    each, kernels, median = [], 0, []
    for line, gap in zip(scene.timelines, gaps, strict=True):
        next_start = np.searchsorted(line.start, gap.end)
        known = next_start < len(line.start)
        late = np.zeros(len(gap.start), dtype=bool)
        late[known] = line.launch_end[next_start[known]] > gap.start[known]
        short = gap.end - gap.start <= _LAUNCH_GAP_NS
        chosen = late & short
        paced = union(gap.start[chosen], gap.end[chosen])
        each.append(_settled(scene, line, paced.within(line.begin, line.end)))
        computing = line.kind == COMPUTE
        kernels += int((computing & (line.step_of >= 0)).sum()) // max(len(line.step), 1)
        if computing.any():
            median.append(float(np.median((line.stop - line.start)[computing])))
    table = _table(scene, each)
    cost = np.nan_to_num(np.nanmedian(table, axis=0))
    per_step = float(cost.mean())
    share = per_step / scene.step_ns
    typical = float(np.median(median)) if median else 0.0
    if share < 0.2 or typical > _SHORT_KERNEL_NS:
        return None, gaps
    count = kernels // max(len(scene.ranks), 1)
    made = finding(
        scene,
        "host.launch_bound",
        rank=None,
        ranks=scene.ranks,
        cost=cost,
        confidence=0.9,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(share)}) between kernels that "
        f"are shorter than their launch: {count} a step, {typical / 1e3:.1f} µs in the median",
        evidence=[
            {
                "rank": int(r),
                "steps": list(scene.settled),
                "idle_ns_per_step": round(float(np.nanmean(table[k]))),
                "what": f"{ms(float(np.nanmean(table[k])))} a step idle in gaps below 0.2 ms",
            }
            for k, r in enumerate(scene.ranks)
        ][:16],
        advice="fewer, longer kernels: torch.compile, CUDA Graphs, fused optimizers "
        "(fused=True), larger batches",
    )
    return made, gaps
