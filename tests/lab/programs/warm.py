"""A process that has loaded torch, and runs programs in forks of itself: loading it takes seconds.

Each line of stdin is a list of programs that run side by side: `argv`, `env`, `cwd`, and the files
`stdout` and `stderr`. Their processes, then their statuses, are a line each of stdout. Each starts
as under its own interpreter: the environment, the path, sitecustomize, then the program as
`__main__`; its end is that of Python. When stdin ends, all ends.
"""

import builtins
import importlib
import json
import os
import select
import signal
import sys
import types

import torch
import torch._dynamo
import torch.distributed  # noqa: F401


def program(argv, env, cwd, stdout, stderr):
    """Be this program; returns where it would end."""
    os.setsid()
    for number, path in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.orig_argv = argv, [sys.executable, *argv]
    sys.path[:1] = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = argv[0], builtins
    sys.modules["__main__"] = main
    with open(argv[0]) as file:
        exec(compile(file.read(), argv[0], "exec"), main.__dict__)


def status(pid):
    """Of a child, once it has ended; when stdin ends before, it does."""
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, 0], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(request):
    """The process of a program, which this one waits for."""
    child = os.fork()
    if child == 0:
        os.close(answers)
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


answers = os.dup(1)
os.set_inheritable(answers, False)
for programs in requests():
    children = list(map(start, programs))
    answer(children)
    answer(list(map(status, children)))
