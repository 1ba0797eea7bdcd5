"""A process that has loaded modules, and runs programs in forks of itself: torch takes seconds.

Whoever connects gets a fork of it as a process of their own, by the three descriptors that they
send: its stdin and stdout, and a socket that listens. It ends with its own stdin.

Each line of stdin is a list of programs that run side by side: `argv`, `env`, `cwd`, and the files
`stdout` and `stderr`. Their processes, then their statuses, are a line each of stdout. Each starts
as under its own interpreter: the environment, the path, sitecustomize, then the program as
`__main__`; its end is that of Python. When stdin ends, all ends.

At the socket that listens others ask for the ranks of a job: a message is the program, its folder,
an environment for each, and what starts one again; with it come the streams.

warm.py DESCRIPTOR MODULE...: of the socket where it is connected to, and what it has loaded.
"""

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import types

gc.disable()  # as in `lab.job.LOOP`
for each in sys.argv[2:]:
    importlib.import_module(each)
gc.freeze()
gc.enable()


def program(argv, env, cwd, start=()):
    """Be this program; returns where it would end. `start`: what starts it again, for Python."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.orig_argv = argv, [sys.executable, *start, *argv]
    sys.path[:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):  # without clusterprof there is none
        importlib.import_module("sitecustomize")
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    # What others have by now, as it would be now.
    multiprocessing.process.ORIGINAL_DIR = cwd
    tempfile.tempdir = None
    if distributed := sys.modules.get("torch.distributed"):
        distributed.init_process_group = distributed.distributed_c10d.init_process_group
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = os.path.abspath(argv[0]), builtins
    sys.modules["__main__"] = main
    with open(argv[0]) as file:
        exec(compile(file.read(), main.__file__, "exec"), main.__dict__)


def status(pid):
    """Of a child, once it has ended; when stdin ends before, it does."""
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, 0], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(stdout, stderr, **request):
    """The process of a program, which this one waits for; its streams are these files."""
    child = os.fork()
    if child == 0:
        os.close(answers)
        os.close(listening)
        os.setsid()
        for number, path in enumerate((os.devnull, stdout, stderr)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
        program(**request)
        raise SystemExit
    return child


def answer(numbers):
    os.write(answers, json.dumps(numbers).encode() + b"\n")


def requests():
    """The lines of stdin, of which none is read before it is asked for."""
    while line := os.read(0, 1 << 20):
        while not line.endswith(b"\n"):
            line += os.read(0, 1 << 20)
        yield json.loads(line)


def connection_of_fork(listener):
    """Fork for each who connects, in which alone this returns, until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(0, 0)  # its end alone
    waiting.register(listener, select.POLLIN)
    while 0 not in dict(waiting.poll()):
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return connection
        connection.close()
    os._exit(0)


def be_of(connection):
    """Be the process of the one who has connected; returns the socket that listens for them."""
    _, (requested, answered, listening), *_ = socket.recv_fds(connection, 1, 3)
    os.setsid()
    os.dup2(requested, 0)
    os.dup2(answered, 1)
    os.close(requested)
    os.close(answered)
    connection.send(b"1")
    connection.close()
    return listening


def ranks(connection):
    """Be the parent of a job's ranks until all have ended, or the one who asked for them has."""
    message, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    argv, cwd, environments, start = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    children = {}
    for env in environments:
        child = os.fork()
        if child == 0:
            connection.close()
            os.setsid()
            return to_its_end(argv, env, cwd, start)
        children[child] = os.pidfd_open(child)
    statuses = [rank_status(child, ended, connection) for child, ended in children.items()]
    with contextlib.suppress(BrokenPipeError):
        connection.send(json.dumps(statuses).encode())
    os._exit(0)


def to_its_end(*rank):
    """Be this program and end as Python does, but free nothing: with torch that takes long."""
    try:
        program(*rank)
        code = 0
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def rank_status(child, ended, connection):
    """As `status`, of a rank, which ends with the one who asked for it."""
    if ended not in select.select([ended, connection], [], [])[0]:
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


listening = be_of(connection_of_fork(socket.socket(fileno=int(sys.argv[1]))))
answers = os.dup(1)
for descriptor in (answers, listening):
    os.set_inheritable(descriptor, False)
if os.fork() == 0:
    os.close(answers)
    ranks(connection_of_fork(socket.socket(fileno=listening)))
else:
    for programs in requests():
        children = [start(**each) for each in programs]
        answer(children)
        answer(list(map(status, children)))
