"""What every test can use: the real parts, the real command line, the recordings.

A test that needs a real part says so with a marker (`@pytest.mark.needs_nsys`) or by asking for
its fixture (`slurm`). Where the part is missing the test is left out with the reason; where
nothing may be missing (`CI=true` or `CLUSTERPROF_TESTS_REQUIRE_ALL=1`) a skip is a failure.
"""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import cluster, command, durations, evidence, faults, hosts, leftovers, side_by_side
from lab.command import Completed
from lab.parts import PARTS

from clusterprof.agent.nsys import START_VARIABLE
from clusterprof.priority import VARIABLE as PRIORITY_VARIABLE

ROOT = Path(__file__).resolve().parent.parent

#: fixtures that bring up a part, and the part
_FIXTURES = {"slurm": "slurm", "slurm_state": "slurm", "ssh_hosts": "hosts"}
_session = pytest.StashKey[str]()
_folders = pytest.StashKey[list[Path]]()
_left_out = pytest.StashKey["Counter[str]"]()
_left_over = pytest.StashKey[list[str]]()


def _all_required() -> bool:
    return (
        os.environ.get("CI", "").lower() in {"1", "true"}
        or os.environ.get("CLUSTERPROF_TESTS_REQUIRE_ALL", "") == "1"
    )


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    for name in command.TERMINAL:
        os.environ.pop(name, None)
    # What a shell starts in the background, or by nohup, ignores these for all that it starts.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for part in PARTS:
        config.addinivalue_line("markers", f"{part.marker}: the test needs {part.what}")
    if _is_worker(config):  # of pytest-xdist: the session is the controller's
        command.scratch = Path(config.workerinput["scratch"])
        command.scratch.mkdir()
        command.session_folder = command.scratch.parent
    else:
        os.environ[leftovers.MARK] = uuid.uuid4().hex
        # Short, because sockets go there too; torchrun and others leave things behind.
        command.scratch = command.session_folder = Path(
            tempfile.mkdtemp(prefix="clusterprof-tests-")
        )
        # A thousand processes load the package. Where PYTHONDONTWRITEBYTECODE is set none of them
        # keeps what it compiled.
        for folder in (ROOT / "clusterprof", ROOT / "launchers"):
            compileall.compile_dir(folder, quiet=2)
    config.stash[_session] = os.environ[leftovers.MARK]
    config.stash[_folders] = [command.scratch]
    config.stash[_left_out] = Counter()
    config.stash[_left_over] = []


def pytest_unconfigure() -> None:
    if command.scratch is not None:
        shutil.rmtree(command.scratch, ignore_errors=True)


class _Folder(pytest.Dir):
    """A folder whose files each worker begins at another place.

    All workers collect all tests, at the same time: what one has compiled the others find.
    """

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        collectors = list(super().collect())
        worker = self.config.workerinput
        start = len(collectors) * int(worker["workerid"][2:]) // worker["workercount"]
        yield from collectors[start:]
        yield from collectors[:start]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not _is_worker(parent.config) or (path / "__init__.py").exists():
        return None
    return _Folder.from_parent(parent, path=path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # nearly all that is made stays
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    items.sort(key=lambda item: item.path)  # the workers have to agree
    yield
    # What `-m` leaves out needs no part.
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in _FIXTURES:
                item.add_marker(f"needs_{_FIXTURES[fixture]}")
    for part in PARTS:
        needing = [item for item in items if item.get_closest_marker(part.marker)]
        if needing and (reason := part.why_not()):
            config.stash[_left_out][f"{part.what}: {reason}"] += len(needing)
            for item in needing:
                item.add_marker(pytest.mark.skip(reason=f"needs {part.what}: {reason}"))
    side_by_side.order(items, ROOT)
    if _is_worker(config):
        side_by_side.write(items, command.scratch.with_suffix(".groups"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from lab.groups import Groups  # where there is no pytest-xdist no one gets here

    return Groups(config, log, command.scratch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    command.forget()
    # A busy machine may take its time to start nsys, and leaves nothing over for making tables.
    command.settings = {START_VARIABLE: "60", PRIORITY_VARIABLE: "normal"}


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not _all_required():
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {reason}\nskipped, where all tests are required"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    _refuse_skip(report)
    if report.failed:
        report.sections += evidence.sections(getattr(item, "funcargs", {}).get("tmp_path"))
        leftovers.end_of_test(item.config.stash[_session], item.nodeid)
    return report


def _utf_8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_utf_8(name): _utf_8(each) for name, each in value.items()}
    return type(value)(map(_utf_8, value)) if isinstance(value, (list, tuple)) else value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[dict[str, Any]]:
    """A worker can tell its controller no text that is not UTF-8, as some names of files."""
    return _utf_8((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The controller of pytest-xdist is about to start a worker."""
    node.workerinput["scratch"] = str(command.scratch / node.gateway.id)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended; one that crashed tells nothing, and counts as a failure of its own."""
    stash, stated = node.config.stash, getattr(node, "workeroutput", {})
    stash[_folders].extend(map(Path, stated.get("folders", ())))
    stash[_left_out] |= Counter(stated.get("left_out", {}))  # all workers collect all tests


# The last wrapper: within that of the closing summary, around the one that ends the workers.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    stash = session.config.stash
    if _is_worker(session.config):
        session.config.workeroutput["folders"] = list(map(str, stash[_folders]))
        session.config.workeroutput["left_out"] = dict(stash[_left_out])
        return
    cluster.remove_orphans(Path(tempfile.gettempdir()))
    hosts.remove_orphans(Path(tempfile.gettempdir()))
    left = leftovers.settle(stash[_session], stash[_folders])
    if left:
        leftovers.end(left, stash[_session], stash[_folders])
        stash[_left_over].extend(map(str, left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    faults.print_table(terminalreporter)
    durations.write(terminalreporter, ROOT)
    if left_out := config.stash[_left_out]:
        verb = "FAILED for want of" if _all_required() else "left out for want of"
        terminalreporter.section("tests left out", yellow=True)
        for reason, count in left_out.items():
            terminalreporter.line(f"{count} tests {verb} {reason}")
        terminalreporter.line("as root on Debian, `make parts` installs what is missing")
    if left_over := config.stash[_left_over]:
        terminalreporter.section("processes left behind by tests, now ended", red=True, bold=True)
        for line in left_over:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder of recordings; `tests/data/README.md` says how each was made."""
    return ROOT / "tests" / "data" / "recordings"


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is also the current one, seen alike by all nodes of the test Slurm."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_command() -> Callable[..., Completed]:
    """`lab.command.run`: any program, in its own process group, killed after `timeout` seconds."""
    return command.run


@pytest.fixture(scope="session")
def slurm_state(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The state folder of the session's Slurm: `log/`, and `local/n1` … as `n1`'s own TMPDIR."""
    state = cluster.up()
    request.config.stash[_folders].append(state)
    yield state
    cluster.down(state)


@pytest.fixture
def slurm(slurm_state: Path) -> Iterator[dict[str, str]]:
    """A running Slurm of four nodes (n1 to n4, 8 processors each): the environment to use it.

    After the test its jobs are cancelled, so that none delays the next test.
    """
    # Two labs on one machine count their jobs alike: a port made of the job's number would be the
    # same in both, and their jobs would meet.
    env = {"SLURM_CONF": str(slurm_state / "slurm.conf"), "MASTER_PORT": str(command.free_port())}
    yield env
    command.run(["scancel", "--user=root"], env=env)


@pytest.fixture(scope="session")
def ssh_hosts(request: pytest.FixtureRequest) -> Iterator[hosts.Hosts]:
    """Three hosts, h1 to h3, that `ssh -F ssh_hosts.config h1` reaches."""
    up = hosts.up()
    request.config.stash[_folders].append(up.state)
    yield up
    hosts.down(up.state)
