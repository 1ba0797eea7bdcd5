"""One verb in all tasks of an MPI job: the first one does it, the others work for it.

MPI has a child of each task, since it may end or block the process that starts it, or crash when
another task is lost. Children move messages only (`launch.handing_out`), the first task merges, and
reads by itself what they do not bring. So what ends a merge is who ends its first task: of a task
that is killed, mpirun ends all the others unless it is told not to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from clusterprof.agent.contracts.processes import ended, running
from clusterprof.agent.contracts.processes import work as state_of
from clusterprof.agent.contracts.timing import REAL
from clusterprof.console import Unwritable, say
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.priority import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from clusterprof.ingest.engines import Engine, Processes

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
#: how often a task looks at its child
_LOOK_S = 0.5


class Task(NamedTuple):
    """A process's place among those that a launcher has started with it."""

    rank: int
    size: int


#: Does the verb's work by an engine, and returns the exit status.
Work = Callable[["Engine"], int]


def task(environ: Mapping[str, str]) -> Task | None:
    """This process's place among several tasks; None where it is alone."""
    for names in _VARIABLES:
        values = [environ.get(name, "") for name in names]
        if all(each.isdecimal() for each in values) and int(values[1]) > 1:
            return Task(int(values[0]), int(values[1]))
    return None


@contextlib.contextmanager
def first_speaks(own_task: Task | None) -> Iterator[Callable[[], None]]:
    """Let only the first task print; the others do from when they call what this gives."""
    if own_task is None or own_task.rank == 0:
        yield lambda: None
        return
    kept = [os.dup(1), os.dup(2)]

    def speak() -> None:
        for number, stream in zip((1, 2), kept, strict=True):
            os.dup2(stream, number)

    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    yield speak  # silent until the end of the process: an error is printed after this


def over(
    choice: str,
    own_task: Task | None,
    processes: Processes,
    line: Sequence[str],
    work: Work,
    speak: Callable[[], None],
) -> int:
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
    child = _Child(own_task, line)
    if why := child.started():
        if own_task.rank:
            return 0  # the first task's status is the job's
        say(f"MPI does not start ({why}): processes of this host alone read the reports")
        return work(processes)
    if child.differ:
        speak()
        return work(processes)
    return child.wait() if own_task.rank else _led(child, processes, work)


def _led(child: _Child, processes: Processes, work: Work) -> int:
    """The first task: it merges, whatever becomes of its child and of the others."""
    from clusterprof.ingest.engines import Tasks

    status = ClusterprofError.exit_code  # as the verb ends after an error (`cli.main`)
    try:
        status = work(Tasks(child.calls, processes))
    except KeyboardInterrupt:
        status = 130
        raise
    except ClusterprofError as error:
        status = 0 if isinstance(error, Unwritable) and error.unread else error.exit_code
        raise
    finally:
        child.say(status)
    return status


# -- the process that has MPI --------------------------------------------------------------------


class _Child:
    """A task's child, which has MPI. Whatever becomes of it the task goes on."""

    def __init__(self, own_task: Task, line: Sequence[str]) -> None:
        from multiprocessing import Pipe

        self.calls, theirs = Pipe()
        #: whether the tasks have command lines of their own
        self.differ = False
        self._pid = os.fork()
        if self._pid == 0:
            self.calls.close()
            _with_mpi(own_task, list(line), theirs)
        theirs.close()
        with socket.socket(fileno=os.dup(self.calls.fileno())) as ours:  # it may be stopped
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))

    def started(self) -> str:
        """Wait for MPI. Empty, or why it has not started."""
        try:
            if not self.calls.poll(START_S):
                self.end()
                return f"not within {START_S:.0f} s"
            message = self.calls.recv()
        except (EOFError, OSError):
            status = os.waitpid(self._pid, 0)[1]
            return f"its process {ended(os.waitstatus_to_exitcode(status))}"
        except BaseException:
            self.end()
            raise
        if isinstance(message, str):
            self.end(patience_s=END_S)
            return message
        self.differ = message
        return ""

    def wait(self) -> int:
        """The status that the first task has said, when the child has ended; 0 where it is lost."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first task has it as well
        stopped = 0.0
        while not self.calls.poll(_LOOK_S):
            # The launcher would wait for a task that somebody has stopped for ever.
            stopped = stopped + _LOOK_S if state_of(self._pid)[0] == "T" else 0.0
            if stopped > END_S:
                os.kill(self._pid, signal.SIGCONT)
        status = 0
        with contextlib.suppress(EOFError, OSError):
            status = int(self.calls.recv())
        self.end(patience_s=END_S)
        return status

    def say(self, status: int) -> None:
        """Have the child, and by it all tasks, end with this status."""
        with contextlib.suppress(OSError):
            self.calls.send(status)
        self.end(patience_s=2 * END_S)

    def end(self, patience_s: float = 0.0) -> None:
        """Remove the child, which may end by itself for so long."""
        REAL.until(lambda: not running(self._pid), patience_s, 0.01)
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _with_mpi(own_task: Task, line: list[str], calls: Connection) -> NoReturn:
    """Move messages until all is over; the task itself says what is wrong."""
    end_with_parent()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # not installed; or it finds no MPI library
        calls.send(f"mpi4py: {error}")
        os._exit(0)  # what this process's parent has begun is the parent's to end
    comm, whole = MPI.COMM_WORLD, True
    try:
        if comm.Get_size() == own_task.size:
            whole = _at_work(own_task, line, calls, comm)
        else:
            known_tasks = f"it knows {comm.Get_size()} of {own_task.size} tasks"
            calls.send(f"{known_tasks}; srun may need --mpi=pmix")
        if whole:  # else it waits for those that are lost
            MPI.Finalize()
    finally:
        os.kill(os.getppid(), signal.SIGCONT)  # it may be stopped, and is waited for
        os._exit(0)


def _at_work(own_task: Task, line: list[str], calls: Connection, comm: Any) -> bool:
    """Take part; whether all tasks are there at the end."""
    from clusterprof.launch import handing_out

    hosts, lines = zip(*comm.allgather((socket.gethostname(), line)), strict=True)
    differ = any(each != line for each in lines)
    calls.send(differ)
    if differ:
        return True
    if own_task.rank == 0:
        return handing_out.Leader(comm, calls, hosts).run()
    return handing_out.serve(comm, over=calls.send)
