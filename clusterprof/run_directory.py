"""The run directory: the contract between launching and reading.

Its files are named in `agent.contracts.paths`. They appear by rename, so what is there is whole.
A run directory that was received from others decides nothing that is executed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import grp
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clusterprof import masking
from clusterprof.agent.contracts import files, paths, plan as plans, states
from clusterprof.agent.contracts.plan import LaterWindow, Plan
from clusterprof.arguments import Selection, StepWindow, shortest
from clusterprof.console import say
from clusterprof.errors import RunDirectoryError, RunDirectoryTaken
from clusterprof.results import RANKS

SCHEMA_VERSION = 1


def _is_time(value: object) -> bool:
    with contextlib.suppress(ValueError):
        return dt.datetime.fromisoformat(str(value)).tzinfo is not None
    return False


_RANKS = range(10_000_000)  # more than any job has
#: the form of those members of run.json that are read
_FORM = {
    "window": [int, int],
    "selection": {
        "text": str, "kind": str, "ranks": [_RANKS], "pp": _RANKS[1:],
        "world_size": (_RANKS[1:], None),
    },
    "world_size": (_RANKS[1:], None), "attempt": (_RANKS[1:], None),
    "began": _is_time, "ended": (_is_time, None), "exit_status": (int, None),
    "launcher": (str, None), "again": [str],
    "profiler": {"path?": (str, None)}, "outcomes": [{"rank": _RANKS}],
    "hosts": [{
        "name": str, "address": str, "user": (str, None), "port": (int, None), "hostname": str,
        "left": (str, None),
    }],
    "ssh": {"config": (str, None), "timeout_s": (int, float), "python": str},
}  # fmt: skip


def _member(key: str, *default: Any, kind: Callable[[Any], Any] = lambda value: value) -> Any:
    """An attribute that is a member of run.json, made a `kind`; without a default it is needed."""

    def value(manifest: Manifest) -> Any:
        if key not in manifest.content and not default:
            raise manifest.damaged(f"{key!r} is missing")
        return kind(manifest.content.get(key, *default))

    return property(value)


class Manifest:
    """run.json, checked when it is read: `content` may have members that are not known here.

    An attribute that a run has in any case raises RunDirectoryError where it is missing.
    """

    #: when the job was launched and when it ended, ISO 8601; None while it runs, and where the
    #: launch was killed
    began: str = _member("began")
    ended: str | None = _member("ended", None)
    #: the job's status; None while it runs
    exit_status: int | None = _member("exit_status", None)
    #: the verb that launched the job
    launcher: str | None = _member("launcher", None)
    #: how many ranks the job has; None where only the ranks knew
    world_size: int | None = _member("world_size", None)
    #: the ranks and the steps to profile
    selection: Selection = _member("selection", kind=Selection.from_json)
    window: StepWindow = _member("window", kind=lambda steps: StepWindow(*steps))
    #: the attempt whose reports are merged
    attempt: int = _member("attempt", None, kind=lambda number: number or 1)
    #: the hosts of a run over SSH, as `collect.over_ssh` writes them, and how they were reached
    #: (config, timeout_s, python): to compare, never to execute
    hosts: list[dict[str, Any]] = _member("hosts", [])
    ssh: dict[str, Any] = _member("ssh")

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises RunDirectoryError where the file is missing, damaged or of another schema."""
        try:
            content = files.load(path)
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{path.parent} is not a run directory: it has no run.json",
                "for reports that clusterprof did not launch: clusterprof merge REPORT...",
            ) from None
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{path} cannot be read", str(error)) from None
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            raise RunDirectoryError(
                f"{path} has another schema than this clusterprof's {SCHEMA_VERSION}",
                "use the clusterprof that made it, or merge its reports: clusterprof merge FILES",
            )
        manifest = cls(path, content)
        for key, form in _FORM.items():
            if key in content and not files.fits(content[key], form):
                raise manifest.damaged(f"{key!r} is invalid")
        return manifest

    def record(self, **members: Any) -> None:
        """Add members and write the file by rename. Raises RunDirectoryError (no space)."""
        self.content.update(members)
        with writing(self.path):
            files.write_json(self.path, self.content, indent=2)

    def damaged(self, why: str) -> RunDirectoryError:
        """The error to raise for a manifest that cannot be used."""
        return RunDirectoryError(
            f"{self.path} is damaged: {why}", "merge the run's reports: clusterprof merge REPORT..."
        )

    @property
    def again(self) -> list[str]:
        """The command line that starts the run again, `results.RANKS` in it; [] for none.

        Its values are masked (`masking.again`): `whole` has them.
        """
        words = [*self.content.get("again", [])]
        if words or self.launcher is None:
            return words
        return ["clusterprof", self.launcher, RANKS, *masking.UNKNOWN_LAUNCH]

    @property
    def whole(self) -> list[str]:
        """The same with its values, where they are still known, and to this user."""
        with contextlib.suppress(OSError, ValueError):
            kept = files.load(self.path.with_name(paths.AGAIN), ours=True)
            if files.fits(kept, {"again": [str]}):
                return [*kept["again"]]
        return self.again

    def expected_ranks(self) -> list[int] | None:
        """The ranks that the run was to profile; None where only the ranks knew.

        With those that had an outcome before: one whose folder was deleted since is missing.
        """
        before = {outcome["rank"] for outcome in self.content.get("outcomes", [])}
        return sorted(before.union(self.selection.expected(self.world_size) or ())) or None


@dataclass(frozen=True)
class RunDirectory:
    """The folder of a run: what its windows share."""

    path: Path

    @property
    def manifest(self) -> Path:
        """run.json."""
        return self.path / paths.MANIFEST

    @property
    def plan(self) -> Path:
        """plan.json."""
        return self.path / paths.PLAN

    def first(self, attempt: int = 1) -> Window:
        """The window that the launch asked for."""
        return Window(self, 1, attempt)

    def later_windows(self, attempt: int = 1) -> list[Window]:
        """The run's later windows, in order."""
        with contextlib.suppress(OSError):
            return [Window(self, n, attempt) for n in plans.order_numbers(str(self.path))]
        return []

    def read_manifest(self) -> Manifest:
        """run.json. Raises RunDirectoryError: see `Manifest.read`."""
        return Manifest.read(self.manifest)

    def write_manifest(self, content: Mapping[str, Any]) -> Manifest:
        """Write run.json, whose members `Manifest.record` adds to. Raises RunDirectoryError."""
        manifest = Manifest(self.manifest, {})
        manifest.record(**content)
        return manifest

    def write_again(self, words: list[str]) -> None:
        """Write again.json, which no other user can read. Raises RunDirectoryError."""
        with writing(self.path):
            files.write_json(self.path / paths.AGAIN, {"again": words}, mode=0o600)

    def write_plan(self, plan: Plan) -> None:
        """Write plan.json by rename. Raises RunDirectoryError."""
        with writing(self.plan):
            files.write_json(self.plan, plan.to_json(), indent=1)


@dataclass(frozen=True)
class Window:
    """One window of a run, as one attempt of its job has captured it."""

    directory: RunDirectory
    #: from 1, which is the one that the launch asked for
    number: int = 1
    #: of a job whose launcher has started its ranks over (see `paths`)
    attempt: int = 1

    @classmethod
    def at(cls, path: Path, attempt: int = 1) -> Window:
        """The later window whose folder this is, else the first one of the run there."""
        whole = path.absolute()
        later = paths.window_of(str(whole))
        # A run directory may be called so as well.
        if later and not (path / paths.MANIFEST).exists():
            return cls(RunDirectory(whole.parents[1]), later, attempt)
        return cls(RunDirectory(path), 1, attempt)

    @property
    def path(self) -> Path:
        """Its folder: the run directory, or `windows/2` in it."""
        root = self.directory.path
        return Path(paths.window_folder(str(root), self.number)) if self.number > 1 else root

    @property
    def folder(self) -> Path:
        """The folder in it that the attempt's ranks write to."""
        return Path(paths.attempt_folder(str(self.path), self.attempt))

    def rank(self, rank: int) -> Path:
        """The folder of one rank."""
        return Path(paths.rank_folder(str(self.folder), rank))

    def logged(self, rank: int) -> Path:
        """The folder with the step log of one rank, which is one for all windows."""
        return self.directory.first(self.attempt).rank(rank)

    def attempts(self) -> list[Window]:
        """The same window in the attempts that left anything, in order; in the first always."""
        numbers = {paths.attempt_number(name) for name in names_in(self.path)}
        return [replace(self, attempt=number) for number in sorted({1, *numbers} - {0})]

    def ranks(self) -> list[int]:
        """The ranks that left anything, in order."""
        names = names_in(self.folder / paths.RANKS)
        return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,9}", name))

    def states(self) -> dict[int, dict[str, Any]]:
        """Each rank's state; {} for one whose state cannot be read."""
        return {rank: states.read(str(self.rank(rank))) for rank in self.ranks()}

    def states_of(self, ranks: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """These ranks' states; those that have left none are left out."""
        for rank in ranks:
            if state := states.read(str(self.rank(rank))):
                yield rank, state

    def order(self) -> LaterWindow | None:
        """What a later window is to capture; None for the first. Raises RunDirectoryError."""
        if self.number == 1:
            return None
        try:
            return plans.read_order(str(self.directory.path), self.number)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self.path / paths.ORDER} cannot be read", str(error),
                f"merge the window's reports: clusterprof merge {self.path / paths.RANKS}",
            ) from None  # fmt: skip

    def window(self) -> StepWindow:
        """The steps to profile. Raises RunDirectoryError."""
        order = self.order()
        return StepWindow(*order.steps) if order else self.directory.read_manifest().window

    def expected_ranks(self) -> list[int] | None:
        """The ranks to profile; None where only the ranks know. Raises RunDirectoryError."""
        order = self.order()
        if order and order.profiler == "none":
            return []
        manifest = self.directory.read_manifest()
        if order is None:
            return manifest.expected_ranks()
        expected = Selection(*order.selection).expected(manifest.world_size)
        return None if expected is None else list(expected)

    @property
    def is_auto(self) -> bool:
        """Whether this is a later window that `--ranks auto` ordered."""
        with contextlib.suppress(RunDirectoryError):
            order = self.order()
            return order is not None and order.auto
        return False

    def deep(self) -> Window:
        """The window that has the run's reports: of `--ranks auto` the one that was ordered once
        all ranks were looked at; of several, since orders came too late, the one that most ranks
        began, of equals the last.
        """

        def begun(window: Window) -> int:
            """How many ranks began to capture it."""
            order = window.order()
            ranks = order.selection.ranks if order else ()
            return sum("step_begin" in state for _, state in window.states_of(ranks))

        later = self.directory.later_windows(self.attempt) if self.number == 1 else []
        ordered = (window for window in reversed(later) if window.is_auto)
        return max(ordered, key=begun, default=self)

    @cached_property
    def is_deep(self) -> bool:
        """Whether this is a later window, and its result the run's: as it was when first asked."""
        return self.is_auto and self.directory.first(self.attempt).deep() == self

    @property
    def results(self) -> Window:
        """Whose folder has this window's result: of the deep window the run's first."""
        return self.directory.first(self.attempt) if self.is_deep else self

    @property
    def merged(self) -> Path:
        """The folder of what merging made."""
        return self.results.path / paths.MERGED

    def tables(self, rank: int) -> Path:
        """The folder of a profiled rank's canonical tables, as merging wrote them."""
        return self.results.path / paths.TABLES / f"{rank:05d}"

    @property
    def html(self) -> Path:
        """report.html."""
        return self.results.path / paths.HTML


@contextlib.contextmanager
def writing(path: Path, option: str = "--run-dir DIR") -> Iterator[None]:
    """Turn an error of the file system into one with a next step, `option` ("" where no other place
    can be chosen).
    """
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror or error}",
            f"choose another place with {option}, or free space there"
            if option
            else "free space there",
        ) from None


@contextlib.contextmanager
def merging(run: Window) -> Iterator[None]:
    """Be the only merge that writes into `run`; waits, and says so, while another one does.

    Its files are of one merge then. On a file system without locks each file is still whole.
    Raises RunDirectoryError where the folder cannot be made.
    """
    with writing(run.merged):
        run.merged.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another user's lock; or the file system has none
            lock = os.open(
                run.merged / paths.MERGING, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another merge writes into {shortest(run.results.path)}: waiting for its end")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def default_path(parent: Path, job: str | None, now: dt.datetime) -> Path:
    """`<UTC stamp>-<job id or pid>` below `parent`."""
    return parent / f"{now:%Y%m%dT%H%M%SZ}-{job or os.getpid()}"


def started_over(path: Path, environ: Mapping[str, str]) -> Path:
    """The run directory of a batch job that Slurm has started over (preempted, requeued).

    It runs the same script again, with the same run directory: the files of its first start stay
    there, and the training must not end because of them.
    """
    count = restarts(environ)
    return path.with_name(f"{path.name}-restart{count}") if count and path.exists() else path


def first_start(path: Path, environ: Mapping[str, str]) -> Path | None:
    """The run directory of the job's first start, where `path` is that of a later one."""
    name, mark, count = path.name.rpartition("-restart")
    again = mark and count == str(restarts(environ))
    return path.with_name(name) if again and path.with_name(name).exists() else None


def restarts(environ: Mapping[str, str]) -> int:
    """How often Slurm has started this batch job over."""
    count = environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def exposed(path: Path) -> Path | None:
    """The nearest folder above `path` in which other users may replace it.

    They may write there, and no sticky bit keeps them from renaming what is not theirs. A group
    that has the user's own name is the user alone, as most Linux systems make one.
    """
    for folder in path.absolute().parents:
        with contextlib.suppress(OSError):
            status = folder.stat()
            if others_can_write(status) and not status.st_mode & stat.S_ISVTX:
                return folder
    return None


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where that cannot be seen: a job's end does not wait for it."""
    with contextlib.suppress(OSError):
        return [path.name for path in folder.iterdir()]
    return []


def others_can_write(status: os.stat_result) -> bool:
    """Whether other users than its owner may write to a file or folder."""
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _own_group(status.st_gid)
    return by_group or bool(status.st_mode & stat.S_IWOTH)


def _own_group(group: int) -> bool:
    with contextlib.suppress(KeyError):  # root needs no permission
        return group == 0 or grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    return False


def check_free(path: Path, *, force: bool = False) -> bool:
    """Whether an earlier run has to go for one at `path`; RunDirectoryError where it may not."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    is_run = False
    with contextlib.suppress(RunDirectoryError):
        # By a member of its run.json: other tools have one too.
        is_run = "selection" in RunDirectory(path).read_manifest().content
    if not is_run:
        raise _taken(path, " (it is not a run directory, so --force will not replace it)")
    if not force:
        raise _taken(path, ", or replace that run with --force")
    return True


def _taken(path: Path, more: str = "") -> RunDirectoryTaken:
    return RunDirectoryTaken(
        f"the run directory {path} exists already", f"choose another with --run-dir DIR{more}"
    )


def create(path: Path, *, force: bool = False) -> Window:
    """Make a new run directory, for its owner only. Raises RunDirectoryError where one exists.

    With `force` an earlier *run directory* of that name is removed; anything else never is.
    """
    path = path.absolute()
    replaced = check_free(path, force=force)
    with writing(path):
        if replaced:
            shutil.rmtree(path)
        for parent in reversed([above for above in path.parents if not above.exists()]):
            parent.mkdir(0o775, exist_ok=True)  # whoever may write there may rename the run
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
        try:
            (path / paths.RANKS).mkdir()
            (path / paths.WINDOWS).mkdir()  # the ranks look for later windows in it
        except FileExistsError:  # another run was faster
            raise _taken(path) from None
    return RunDirectory(path).first()


def opened(path: Path) -> Window:
    """The window in this folder (`Window.at`). Raises RunDirectoryError for none, or with links."""
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory", "name a folder below runs/")
    window = Window.at(path.absolute())
    root, manifest = window.directory.path, window.directory.read_manifest()
    homes = (root, root / paths.WINDOWS, path, *path.glob("attempt-*"))
    inside = [home / name for home in homes for name in ("", paths.RANKS, paths.TABLES)]
    try:
        links = [link for folder in inside for link in _links_in(folder)]
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}", "try again later") from error
    if links:  # files would be written where its sender chose
        raise RunDirectoryError(
            f"{links[0]} is a link to another folder",
            "a run directory has none: put the folder itself in its place",
        )
    return window if window.number > 1 else replace(window, attempt=manifest.attempt)


def _links_in(folder: Path) -> list[str]:
    """The links to folders in it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if folder.is_dir():  # a link to itself is none to a folder, and is no folder
            return [e.path for e in os.scandir(folder) if e.is_symlink() and Path(e).is_dir()]
    return []


def bytes_of(path: Path) -> int:
    """What a file, or all files below a folder, take: one of several names once, if it is seen."""
    files_of = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    sizes: dict[tuple[int, int], int] = {}
    for file in files_of or [path]:
        with contextlib.suppress(OSError):
            status = file.lstat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
