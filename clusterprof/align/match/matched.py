"""The tables that matching and placing give: one row per collective and rank."""

from __future__ import annotations

import pyarrow as pa

_NAME = pa.dictionary(pa.int32(), pa.string())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


#: One row per collective and rank. Times are still each rank's own wall clock.
MATCHED = pa.schema(
    [
        #: number of the logical operation; rows of one collective share it
        _required("collective", pa.int64()),
        #: the report's id, or `inferred:<ranks>` where the reports have none
        _required("communicator", pa.string()),
        _required("operation", _NAME),
        #: position within the communicator (point-to-point: within the pair), from 0
        _required("order", pa.int64()),
        _required("rank", pa.int32()),
        #: the row of this rank's `collective_calls`
        _required("call", pa.int32()),
        #: `matched`: every member seen has it; `incomplete`: a member seen lacks it;
        #: `unmatched`: stands alone. The last two have a `reason`.
        _required("state", _NAME),
        pa.field("reason", pa.string()),
        #: how sure the match is, 0 to 1: 1.0 for ids with steps and times that agree
        _required("confidence", pa.float64()),
        #: what the data dependency allows the clock to conclude. `both`: cannot end before
        #: every `both` and `source` member has started; `sink`: the same, but holds up no one;
        #: `source`: may end at any time; `none`: nothing is known
        _required("role", _NAME),
        _required("stream", pa.int64()),
        pa.field("message_bytes", pa.int64()),
        #: the step in whose host range the call was issued; null outside any step
        pa.field("step", pa.int64()),
        pa.field("group", pa.int32()),
        pa.field("issue_start_ns", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        _required("source", _NAME),
    ]
)

#: `MATCHED` with times on the reference rank's clock. `wait_ns` and `transfer_ns` are null
#: where the collective is not `matched` or has a single member: its last arrival is unknown.
PLACED = pa.schema(
    [
        *MATCHED,
        pa.field("aligned_start_ns", pa.int64()),
        pa.field("aligned_end_ns", pa.int64()),
        pa.field("last_arrival_ns", pa.int64()),
        pa.field("last_rank", pa.int32()),
        #: last arrival minus the next to last: what the last rank alone has cost
        pa.field("lateness_ns", pa.int64()),
        pa.field("wait_ns", pa.int64()),
        pa.field("transfer_ns", pa.int64()),
    ]
)
