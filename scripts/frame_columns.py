"""What docs/python.md says of the columns of all frames: their types, and what they mean."""

from __future__ import annotations

from clusterprof import api
from clusterprof.tables import NAME

#: in `docs/python.md`, before what `reference` returns
WRITTEN = "<!-- from here on written by `make readme`: scripts/frame_columns.py -->"

_ROWS = {
    "findings": "One row per finding, those that save most first",
    "steps": "One row per profiled rank and step of the window",
    "collectives": "One row per collective and profiled rank that took part in it",
    "kernels": "One row per kernel, copy, memset and collective of each profiled rank",
    "shallow": "One row per rank and collective call, of all ranks, by their flight recorders",
    "what_if": "One row per what-if",
}

#: what a column means, by its name, or by `frame.name` where it means something else there
MEANINGS: dict[str, str] = {
    "code": "the finding's code; `clusterprof explain CODE`",
    "severity": "`critical`, `warning` or `info`",
    "rank": "the rank",
    "findings.rank": "the rank that the finding is about; null where it is about several",
    "ranks": "all ranks that it is about",
    "steps": "the steps that show it",
    "recurrence": "`persistent`, `intermittent` or `once`",
    "saved_ns_per_step": "by how much a step is shorter once it is repaired, after those before it",
    "saved_alone_ns": "the same where nothing else is repaired",
    "saved_least_ns": "from where `saved_ns_per_step` lies (95%): what its severity is of",
    "saved_most_ns": "and to where",
    "saved_uncertainty_ns": "how far the farther of both is from it",
    "share_of_step": "the saving, of the step",
    "cost_ns_per_step": "what its cause takes of the window's own steps",
    "confidence": "0 to 1",
    "summary": "one or more sentences",
    "advice": "what is recommended",
    "next": "the command that shows more; empty where there is none",
    "step": "the step's number; null outside of any",
    "begin_ns": "on the rank's own wall clock",
    "end_ns": "on the rank's own wall clock; null where no kernel was found",
    "start_ns": "on the rank's own wall clock; null where no kernel was found",
    "aligned_begin_ns": "on the reference rank's clock",
    "aligned_start_ns": "on the reference rank's clock",
    "aligned_end_ns": "on the reference rank's clock",
    "duration_ns": "how long it took",
    "compute_ns": "the union of all kernels that do not communicate",
    "exposed_communication_ns": "communication that no compute overlaps with",
    "exposed_copy_ns": "copies that neither compute nor communication overlaps with",
    "idle_ns": "the rest of the step",
    "communication_ns": "the union of all collectives, exposed or not",
    "exposed_wait_ns": "exposed communication before the last member's arrival",
    "unlaunched_ns": "no compute, as no kernel is launched yet",
    "blocking_ns": "no compute, while a kernel is launched and communication runs",
    "steady": "a steady-state step: evidence for findings",
    "collective": "number of the operation; rows of one collective share it",
    "shallow.collective": "the same call's number in `collectives`; null where it has none",
    "communicator": "the report's id, or `inferred:<ranks>`",
    "operation": "`AllReduce`, `AllGather`, `Send`, ...",
    "order": "place within the communicator, from 0",
    "call": "which call it is of this rank, from 0",
    "shallow.call": "which call it is a part of: equal on all its members",
    "state": "`matched`, `incomplete` (a profiled member lacks it) or `unmatched`",
    "reason": "why it was not matched",
    "role": "what it tells the clock: `both`, `source`, `sink` or `none`",
    "stream": "the device's stream",
    "message_bytes": "one rank's count times the type's size",
    "group": "calls of one NCCL group share it",
    "shallow.group": "the process group's name",
    "issue_start_ns": "when the host called, on its own wall clock",
    "source": "where the call was found: `nvtx_payload`, `kernel_name`, `kineto`, `gloo`, ...",
    "last_arrival_ns": "when the last member came, on the reference rank's clock",
    "last_rank": "who that was",
    "lateness_ns": "by how much the last member came later than the one before it",
    "shallow.lateness_ns": "how much later than the first member it came; null where unknown",
    "wait_ns": "from this rank's arrival to the last",
    "transfer_ns": "from the last arrival to this rank's end",
    "kind": "`compute`, `collective`, `copy` or `memset`",
    "name": "the kernel's name",
    "device": "the GPU's number on its host",
    "correlation": "connects the kernel with the call that launched it",
    "launch_start_ns": "that call's begin, on the rank's own wall clock",
    "launch_end_ns": "that call's end",
    "launch_thread": "that call's thread",
    "size_bytes": "of copies and memsets",
    "direction": "of copies: `host_to_device`, `device_to_host`, ...",
    "pageable": "of copies: the host's memory is pageable; null where unknown",
    "sequence": "number of the call within its group, as torch counts",
    "bytes": "of the message",
    "enqueue_ns": "when the host called, on the reference rank's clock; null without one",
    "bound_ns": "by how much clocks may make the lateness wrong",
    "line": "`file:line function` of the program, where stacks were recorded",
    "who": "whose time is changed",
    "what": "which time is changed: `host`, `gpu`, `communication`, `copy`",
    "times": "what it is multiplied by; null: as fast as the rank's middle peer",
    "step_ns": "the step as it is",
    "without_ns": "the replayed step with that change; null where there are no peers",
    "saved_ns": "the difference; negative where the middle peer takes longer",
    "what_if.saved_uncertainty_ns": "how far off that may be (95%), as of findings",
}


def reference() -> str:
    """The columns of all frames as Markdown: what docs/python.md has of them."""
    lines = [WRITTEN, ""]
    for frame, schema in api.SCHEMAS.items():
        call = "()" if frame == "what_if" else ""
        lines += [f"## `run.{frame}{call}`", "", f"{_ROWS[frame]}.", ""]
        lines += ["| column | type | meaning |", "|---|---|---|"]
        for field in schema:
            kind = "string" if field.type == NAME else str(field.type).replace("element: ", "")
            meaning = MEANINGS.get(f"{frame}.{field.name}") or MEANINGS[field.name]
            lines.append(f"| `{field.name}` | {kind} | {meaning} |")
        lines.append("")
    return "\n".join(lines)
