"""`clusterprof runs list|clean`: the runs in a folder, what they found, and removing old ones."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterprof import console, words
from clusterprof.agent.contracts import paths
from clusterprof.arguments import path, shortest
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import ReportError, RunDirectoryError, UsageError
from clusterprof.launch.planning import runs_in
from clusterprof.run_directory import Manifest, Window, bytes_of

SCHEMA_VERSION = 1
#: a run whose end is not recorded, and that nothing has been written to for so long, is over
_SILENT_S = 86_400


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "List your runs in a folder with what they found, or remove old ones.",
        "runs list",
        "runs clean --older-than 30d              what would be removed",
        "runs clean --keep 10 --yes               all but the ten newest, now",
    )  # fmt: skip
    add = parser.add_argument
    add("action", choices=("list", "clean"), metavar="list|clean",
        help="list the runs, or remove those that ended")  # fmt: skip
    add("folder", nargs="?", type=path, default=Path("runs"), metavar="DIR",
        help="the folder with the run directories (default: runs)")  # fmt: skip
    add("--json", action="store_true", help="list: print JSON")
    add("--keep", type=int, metavar="N", help="clean: keep the N newest")
    add("--older-than", metavar="AGE", help="clean: those that began so long ago: 12h, 30d, 8w")
    add("--yes", action="store_true", help="clean: remove them; without it they are only listed")
    return parser


@dataclass(frozen=True)
class Run:
    """One run, as the list shows it."""

    path: Path
    began: dt.datetime
    program: str
    #: "running", or how it ended
    state: str
    #: None where it was not merged, or by another version
    verdict: str | None


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """List or remove runs."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    if not arguments.folder.is_dir():
        raise RunDirectoryError(
            f"there is no folder {arguments.folder}", "name the one with your runs"
        )
    runs = [look(*run) for run in runs_in(arguments.folder.absolute())]
    if arguments.action == "clean":
        return clean(runs, arguments.keep, arguments.older_than, arguments.yes)
    if arguments.json:
        rows = [
            {**asdict(run), "path": str(run.path), "began": run.began.isoformat()} for run in runs
        ]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "runs": rows}, indent=1))
    elif runs:
        print("\n".join(lines(runs)))
    else:
        console.show(f"no runs of yours in {shortest(arguments.folder.absolute())}")
    return 0


def look(run: Window, manifest: Manifest) -> Run:
    """What one run's files say of it."""
    from clusterprof.report import results_json

    again, verdict = manifest.again, None
    command = again[again.index("--") + 1 :] if "--" in again else []
    with contextlib.suppress(ReportError):
        result = run.merged / paths.RESULTS
        verdict = results_json.read(result)["verdict"] if result.is_file() else None
    if manifest.ended:
        state = "ended" if manifest.exit_status == 0 else f"ended with {manifest.exit_status}"
    else:
        written = [run.path, run.directory.manifest, *map(run.rank, run.ranks()[:8])]
        newest_s = max(path.stat().st_mtime for path in written)
        state = "interrupted" if time.time() - newest_s > _SILENT_S else "running"
    began = dt.datetime.fromisoformat(manifest.began)
    return Run(run.path, began, shlex.join(command), state, verdict)


def lines(runs: Sequence[Run]) -> list[str]:
    """A table of the runs, cut to the width of the terminal."""
    width = console.width(100)
    rows = [("run", "began (UTC)", "state", "verdict")]
    for run in runs:
        began = run.began.astimezone(dt.timezone.utc).strftime("%Y-%m-%d %H:%M")
        verdict = run.verdict if run.verdict is not None else f"not merged: {run.program}"
        rows.append((shortest(run.path), began, run.state, words.plain(verdict)))
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in console.table(rows)]


def least_age(text: str | None) -> dt.timedelta:
    """The age that `--older-than` names; without it any. Raises UsageError."""
    if text is None:
        return dt.timedelta.min
    age = re.fullmatch(r"(\d{1,4})([hdw])", text)
    if age is None:
        raise UsageError(f"--older-than {text!r} is no age", "write 12h, 30d or 8w")
    return int(age[1]) * dt.timedelta(hours={"h": 1, "d": 24, "w": 24 * 7}[age[2]])


def clean(runs: Sequence[Run], keep: int | None, older_than: str | None, really: bool) -> int:
    """Remove (`really`) or list those of `runs`, newest first, that have ended: all but the `keep`
    newest, or those `older_than` that; with both given those that are both.
    """
    age = least_age(older_than)
    if keep is None and older_than is None:
        raise UsageError("runs clean: which?", "say --keep N, or --older-than 30d")
    if keep is not None and keep < 0:
        raise UsageError(f"--keep {keep} is negative", "0 keeps none")
    now = dt.datetime.now(dt.timezone.utc)
    ended = [run for run in runs[keep or 0 :] if run.state != "running" and now - run.began > age]
    for run in ended:
        size = words.size(bytes_of(run.path))
        console.show(f"{'removing' if really else 'would remove'} {shortest(run.path)} ({size})")
        if really:
            _remove(run.path)
    if not ended or not really:
        print("to remove them: --yes" if ended else "nothing to remove")
    return 0


def _remove(run: Path) -> None:
    try:
        shutil.rmtree(run)
    except OSError as error:
        console.say(f"{run} cannot be removed: {error.strerror or error}")
