"""The results as CSV: the account of each rank in each step, to calculate and draw with."""

from __future__ import annotations

import csv
import io

from clusterprof.results import RankAccount, Results

#: of each row, after its step and rank; times in ns
_PARTS = [name for name in RankAccount.__annotations__ if name != "rank"]
COLUMNS = ["step", "steady_state", "rank", "host", "step_begin_ns", *_PARTS]


def render(results: Results) -> str:
    """A line for each rank and step, in order, below one with the names of the columns.

    Times are whole nanoseconds, `step_begin_ns` on the reference rank's clock.
    """
    hosts = {rank["rank"]: rank["host"] for rank in results["ranks"]}
    page = io.StringIO()
    table = csv.writer(page, lineterminator="\n")
    table.writerow(COLUMNS)
    for step in results["steps"]:
        for account in step["ranks"]:
            parts = [account[name] for name in _PARTS]  # type: ignore[literal-required]
            host = cell(hosts.get(account["rank"], ""))
            table.writerow([step["step"], int(step["settled"]), account["rank"], host,
                            step["begin_ns"], *parts])  # fmt: skip
    return page.getvalue()


def cell(value: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
