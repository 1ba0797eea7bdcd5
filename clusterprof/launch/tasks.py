"""One verb in all tasks of an MPI job: the first one does it, the others read for it.

MPI has a child of each task, since it may end or block the process that starts it, or crash when
another task is lost. The children are mpi4py's pool, the first task merges, and reads by itself
what they do not bring. So what ends a merge is who ends its first task: of a task that is killed,
mpirun ends all the others unless it is told not to.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from clusterprof.agent.contracts.processes import ended
from clusterprof.agent.contracts.timing import REAL
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.launch.job_processes import Apart
from clusterprof.priority import end_with_parent

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from clusterprof.ingest.engines import Engine, Lost, Processes, Rank, Read
    from clusterprof.ingest.sources import Source

#: what `--engine` takes
ENGINES = ("auto", "process", "mpi")

#: Rank and size of a task, in a launcher's variables, those that have to be there besides. A batch
#: script has SLURM_PROCID as well: it is not a task of a step.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
)

#: MPI starts within seconds, on thousands of ranks within one minute; later it hangs.
START_S = 60.0
#: MPI ends within seconds once all tasks are through; later it hangs.
END_S = 10.0
#: A task that has had nothing to read for so long ends: the first one may have been lost.
IDLE_S = 3600


#: Does the verb's work by an engine, and returns the exit status.
Work = Callable[["Engine"], int]


class Task(NamedTuple):
    """A process's place among those that a launcher has started with it."""

    rank: int
    size: int


def task(environ: Mapping[str, str]) -> Task | None:
    """This process's place among several tasks; None where it is alone."""
    for names in _VARIABLES:
        values = [environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values) and int(values[1]) > 1:
            return Task(int(values[0]), int(values[1]))
    return None


@contextlib.contextmanager
def first_speaks(own_task: Task | None) -> Iterator[Callable[[], None]]:
    """Let only the first task print; the others do from when they call what this gives."""
    if own_task is None or own_task.rank == 0:
        yield lambda: None
        return
    kept, null = {1: os.dup(1), 2: os.dup(2)}, os.open(os.devnull, os.O_WRONLY)

    def speak() -> None:
        for number, stream in kept.items():
            os.dup2(stream, number)

    for number in kept:
        os.dup2(null, number)
    yield speak  # silent until the end of the process: an error is printed after this


def over(
    choice: str, own_task: Task | None, processes: Processes, line: Sequence[str], work: Work,
    speak: Callable[[], None],
) -> int:  # fmt: skip
    """Do `work` once for all tasks, by the engine of this `choice`; the exit status.

    `processes` are this host's processes; `line` is the command line: tasks whose lines differ have
    each their own work. Raises UsageError where there is no MPI job to be over.
    """
    if choice == "process" or own_task is None:
        if choice == "mpi":
            raise UsageError(
                "--engine mpi: no launcher has started more than one task of this",
                "start it by srun --mpi=pmix -N2 --ntasks-per-node=4 clusterprof merge PATH,"
                " or by mpirun -n 8",
            )
        speak()
        return work(processes)
    from multiprocessing import Pipe

    # The task's child has MPI. Whatever becomes of it the task goes on.
    calls, theirs = Pipe()
    child = Apart(lambda: _with_mpi(own_task, list(line), theirs, calls))
    theirs.close()
    lines_differ = _started(child, calls)
    if isinstance(lines_differ, str):
        if own_task.rank:
            return 0  # the first task's status is the job's
        say(f"MPI does not start ({lines_differ}): processes of this host alone read the reports")
        return work(processes)
    if lines_differ:
        speak()
        return work(processes)
    if own_task.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first task has it as well
        child.ends_within(math.inf)
        return 0
    from clusterprof.ingest.engines import Tasks

    try:  # the first task merges, whatever becomes of its child and of the others
        return work(Tasks(calls, processes))
    finally:
        calls.close()  # which ends it, and by it all tasks
        child.end(2 * END_S)


def _started(child: Apart, calls: Connection) -> bool | str:
    """Wait for MPI: whether the tasks' command lines differ, or why it has not started."""
    try:
        if not calls.poll(START_S):
            child.end()
            return f"not within {START_S:.0f} s"
        message: bool | str = calls.recv()
    except (EOFError, OSError):
        child.ends_within(math.inf)
        return f"its process {ended(child.status or 0)}"
    except BaseException:
        child.end()
        raise
    if isinstance(message, str):
        child.end(END_S)
    return message


# -- the process that has MPI --------------------------------------------------------------------


def _with_mpi(
    own_task: Task, line: list[str], calls: Connection, of_parent: Connection
) -> NoReturn:
    """In a task's child: start MPI, then have the tasks read what the first one asks for.

    The first message on `calls` is what `_started` returns; the task prints what is wrong.
    `of_parent` is the parent's end, closed here so that `calls` ends when the parent closes it.
    """
    of_parent.close()
    end_with_parent()
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:  # not installed; or it finds no MPI library
        calls.send(f"mpi4py: {error}")
        os._exit(0)  # what this process's parent has begun is the parent's to end
    comm = MPI.COMM_WORLD
    try:
        if comm.Get_size() == own_task.size:
            lines = comm.allgather(line)
            calls.send(differ := any(other_line != line for other_line in lines))
            if not differ:
                signal.alarm(0 if own_task.rank == 0 else IDLE_S)
                with MPICommExecutor(comm) as executor:  # the others read inside of it
                    if executor is not None:
                        _hand_out(executor, calls, own_task.size)
        else:
            calls.send(f"it knows {comm.Get_size()} of {own_task.size} tasks; "
                       "srun may need --mpi=pmix")  # fmt: skip
        MPI.Finalize()
    finally:
        os._exit(0)


def _hand_out(executor: Any, calls: Connection, tasks: int) -> None:
    """Have the tasks read what the merging process asks for, until that closes `calls`."""
    from concurrent.futures import FIRST_COMPLETED, wait

    places: dict[Future[Any], int] = {}
    with contextlib.suppress(EOFError, OSError):
        while not places:
            read, sources, folder = calls.recv()
            for place, source in enumerate(sources):
                places[executor.submit(_read, read, *source)] = place
            while places and not calls.poll():
                # it is seen as often whether the merge waits no longer
                for future in wait(places, 0.5, FIRST_COMPLETED).done:
                    calls.send((places.pop(future), _come(future, folder)))
    if places:  # end the tasks that are there: the executor would wait for a lost one
        for future in places:
            future.cancel()
        for _ in range(tasks):
            executor.submit(os._exit, 0)
        REAL.sleep(2.0)  # messages of a few bytes are out within a moment
        os._exit(0)


def _read(read: Read, source: Source, within_s: float) -> list[Rank] | Lost:
    """In another task: read a source, in a process of its own."""
    from clusterprof.ingest.engines import Readers, packed

    signal.alarm(0)
    try:
        return Readers(packed).read(read, source, within_s)
    finally:
        signal.alarm(IDLE_S)


def _come(future: Future[Any], folder: str) -> list[Any] | Lost:
    """What came of a task, put down for the merging process."""
    from clusterprof.ingest.engines import Lost, put_down

    try:
        answer = future.result()
        return answer if isinstance(answer, Lost) else put_down(answer, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the first host reads again
        return Lost(f"failed ({type(error).__name__}: {error})", "another host")
