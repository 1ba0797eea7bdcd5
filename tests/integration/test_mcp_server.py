"""`clusterprof mcp` as an assistant starts it: a process that speaks MCP on stdin and stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample
from lab.command import Completed

from clusterprof.report import results_json

Run = Callable[..., Completed]


def test_a_client_asks_the_process_and_gets_what_the_command_line_prints(
    run_clusterprof: Run, workdir: Path
) -> None:
    anyio = pytest.importorskip("anyio")
    mcp = pytest.importorskip("mcp")
    stdio = pytest.importorskip("mcp.client.stdio")
    for name in ("before", "after"):
        (workdir / "runs" / name / "merged").mkdir(parents=True)
        results_json.write(workdir / "runs" / name / "merged" / "results.json", sample.results())
    started = stdio.StdioServerParameters(
        command=sys.executable, args=["-m", "clusterprof", "mcp", "runs"], cwd=workdir,
        env=dict(os.environ),
    )  # fmt: skip

    async def asked() -> list[Any]:
        async with stdio.stdio_client(started) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            compared = await session.call_tool("compare", {"before": "before", "after": "after"})
            explained = await session.call_tool("explain", {"code": "straggler.host"})
            schema = await session.read_resource("clusterprof://results-schema.json")
            return [
                compared.structured_content,
                explained.structured_content,
                schema.contents[0].text,
            ]

    compared, explained, schema = anyio.run(asked)
    done = run_clusterprof(["compare", "runs/before", "runs/after"])
    assert done.stdout.startswith(compared["verdict"])
    assert run_clusterprof(["mcp", "--schema"]).stdout.split() == schema.split()
    printed = run_clusterprof(["explain", "straggler.host"]).stdout.split()
    assert explained["explanation"].split() == printed
