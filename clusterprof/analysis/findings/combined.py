"""What remains of a step if some findings are repaired and others are not: one replay for each."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import Combined, Finding


def combined(dataset: Dataset, found: Sequence[Finding]) -> Combined | None:
    """The step that each choice of the findings that save most leaves.

    None where no finding above severity info saves anything.
    """
    job = what_ifs(dataset)
    worth = [each for each in found if each["severity"] != "info" and each["saved_ns_per_step"] > 0]
    worth = sorted(worth, key=lambda each: -each["saved_ns_per_step"])
    if job is None:
        return None
    keys = [(f["code"], tuple(f["ranks"]), f["saved_ns_per_step"]) for f in worth]
    # of four there are 16 replays, of which some are known already
    keys = [key for key in keys if key in job.weighed][: limits.FEW]
    if not keys:
        return None
    repairs = [job.weighed[key] for key in keys]
    # queued work would hide in the window what one of them costs
    long_run = any(each.long_run for each in repairs)
    steps = [
        job.remaining_ns([each for k, each in enumerate(repairs) if choice >> k & 1], long_run)
        for choice in range(1 << len(repairs))
    ]
    return {
        "view": "long_run" if long_run else "window",
        "findings": [{"code": code, "ranks": list(ranks)} for code, ranks, _ in keys],
        "remaining_ns": [round(ns) for ns in steps],
    }
