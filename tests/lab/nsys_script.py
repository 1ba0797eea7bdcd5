"""nsys by a script: what clusterprof relies on of nsys 2022.4.2, and failures on command.

`lab.fakes.scripted_nsys` makes a folder with one; `test_nsys_contract.py` holds it to the real one.
Arguments: FOLDER VERB [WORDS]. The processes are those of nsys: `nsys launch` over the program, an
agent of its own for each session, which writes, and a launcher, which is the program's parent.

FOLDER/faults.json has Python lines by "RANK:VERB", or "*:VERB", which are run before the verb; they
may use all that is in here. What stays behind ends with whoever started it, or after a while.

A rank starts it eight times: it has no module that takes longer to import than all else it does.
"""

import _signal as signal
import _socket as socket
import os
import select
import sys
import time

VERSION = "2022.4.2.1"
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "RANK")
#: The session's agent listens at an address without a file; no other session has its name.
ADDRESS = "\0nsys-script-"
#: __SO_ACCEPTCON, as /proc/net/unix shows it: before that none can connect
LISTENING = "00010000"
COLLECTING = "trace sample cpuctxsw force-overwrite output capture-range capture-range-end"
FLAGS = {
    "profile": f"session-new trace-fork-before-exec wait {COLLECTING}",
    "launch": "session session-new trace trace-fork-before-exec wait",
    "start": f"session {COLLECTING.partition(' ')[2]}",
    "stop": "session",
    "shutdown": "session kill",
    "export": "type force-overwrite output lazy",
}
VALUES = {
    "trace": "cuda, nvtx, osrt or none", "capture-range": "none, cudaProfilerApi or nvtx",
    "type": "sqlite, hdf, text, arrow, json, info",
}  # fmt: skip
#: as long as a real one of an idle window: no stream is too short to fill a small disk
STREAM_B, REPORT_B = 1_300_000, 140_000
REPORT_HEAD, REPORT_END = b"NVIDIA Tegra Profiler Report 1..", b"[END]"
#: so much more comes while it collects, each time that the agent looks around
GROWTH_B, LOOK_S = 0, 0.1
#: seconds: nothing in here that is left behind lasts longer; a test waits less long in all
LONGEST_S = 1200
#: what nsys gives a program that was signalled to end before it writes its report
GRACE_S = 2
NO_IMPORTER = "Importer error status: The importer binary and its dependencies were not found."

folder, verb, *words = sys.argv[1:] if len(sys.argv) > 2 else [*sys.argv[1:], "--help"]


# What faults are made of.


def say(text):
    print(text, flush=True)


def die(number=signal.SIGKILL):
    """End by a signal."""
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def hang():
    """Do nothing, until whoever started this has ended."""
    parent, until = os.getppid(), time.monotonic() + LONGEST_S
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.1)
    os._exit(1)


def wait_for(path):
    """Do nothing until this file is there."""
    until = time.monotonic() + LONGEST_S
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.05)


def touch(path):
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))


def once():
    """Whether it is the first time for this session."""
    try:
        os.close(os.open(os.path.join(temporary(), "once"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def leave_spinning():
    """Leave a process of the session behind that takes a whole processor, and ignores TERM."""
    apart("--spin", option("session"))


def spin(_):
    import resource

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    while True:
        pass


def die_all():
    """Kill the session's processes, this one last."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        program = line.partition(b"\0")[0].rpartition(b"/")[2]
        if program == b"nsys" and option("session").encode() in line and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    die()


def find_importer():
    """Be one that makes reports by itself, as NVIDIA's installation does."""
    globals()["setting"] = {"imports": True}.get


def stop_agent():
    """Have the session's agent do nothing more, as by a debugger."""
    credentials = connected(option("session")).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    os.kill(int.from_bytes(credentials[:4], sys.byteorder), signal.SIGSTOP)


# The command line.


def option(name, default=""):
    """The value of --NAME=, of the words before the program."""
    for word in words:
        if not word.startswith("-"):
            break
        if word.startswith(f"--{name}="):
            default = word.partition("=")[2]
    return default


def operands():
    """What stands behind the options: a program, or a file."""
    first = [place for place, word in enumerate(words) if not word.startswith("-")]
    return words[first[0] :] if first else []


def output():
    force = option("force-overwrite") == "true"
    return {"output": os.path.abspath(option("output", "report1")), "force": force}


def temporary():
    return os.environ.get("TMPDIR", "/tmp")


def setting(name):
    with open(os.path.join(folder, "faults.json")) as file:
        return loaded(file.read()).get(name)


def loaded(text):
    """What `dumped` has made of a value, or JSON of strings and truths."""
    return eval(text, {"true": True, "false": False})


def dumped(value):
    """A line of bytes."""
    return ascii(value).encode() + b"\n"


def read_lines(connection):
    """A file of what is received."""
    return open(connection.fileno(), closefd=False)


def main():
    rank = next(filter(None, map(os.environ.get, RANKS)), "")
    asked = f"{verb}:--help" if words[:1] == ["--help"] else verb
    fault = setting(f"{rank}:{asked}") or setting(f"*:{asked}")
    if fault:
        exec(f"import contextlib\n{fault}", globals())
    if verb in FLAGS and words[:1] == ["--help"]:
        return say(usage(verb))
    for word in words[: len(words) - len(operands())]:
        if verb in FLAGS and word[2:].partition("=")[0] not in FLAGS[verb].split():
            return fail(f"unrecognised option '{word}'\n\nusage: nsys {verb} [<args>]")
    return VERBS[verb](words) if verb in VERBS else fail(f"Unknown command: {verb}\n{usage()}")


def fail(text):
    say(text)
    return 1


def usage(verb=""):
    flags = "".join(
        f"\n\n\t--{flag}=\n\n\t   Possible values are {VALUES.get(flag, 'many')}."
        for flag in FLAGS.get(verb, "").split()
    )
    return f"usage: nsys {verb or '[--version] [--help] <command>'} [<args>]{flags}"


def connected(session):
    """A connection to the session's agent. Raises OSError."""
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(ADDRESS + session)
    return agent


def ask(agent, what, **more):
    """Have the agent do it, and say what it says; the status."""
    try:
        agent.sendall(dumped({"what": what, **more}))
        answer = loaded(read_lines(agent).readline())
    except (OSError, SyntaxError):
        return fail("Connection refused")
    if answer["reply"]:
        say(answer["reply"])
    return int(answer["failed"])


def start(_):
    try:
        return ask(connected(option("session")), "start", **output())
    except OSError:
        return 0  # nsys makes a session without a program, and says nothing


def stop(_):
    try:
        return ask(connected(option("session")), "stop")
    except OSError:
        return fail(no_session())


def shutdown(_):
    try:
        return ask(connected(option("session")), "shutdown", kill=option("kill", "sigterm"))
    except OSError:
        say(no_session())


def no_session():
    return f"Failed to find session: {option('session')}." if sessions() else NO_SESSION


NO_SESSION = "There are no active sessions."


def sessions():
    with open("/proc/net/unix") as file:
        sockets = [line.split() for line in file]
    names = [socket[-1] for socket in sockets if socket[3] == LISTENING]
    start = "@" + ADDRESS[1:]
    return sorted({name[len(start) :] for name in names if name.startswith(start)})


def list_sessions(_):
    lines = [f"{1000000 + number:16} {0:>12} {'Launched':>27} {1:>6} {session}"
             for number, session in enumerate(sessions())]  # fmt: skip
    say("\n".join(["ID TIME STATE LAUNCH NAME", *lines]) if lines else NO_SESSION)


# `nsys launch`, the agent, and the launcher.


def apart(*line):
    """Start a process of nsys' own in a session of its own, whose parent ends at once."""
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.closerange(3, 1024)
            become("nsys", *line)
        os._exit(0)
    os.waitpid(child, 0)


def become(name, *line):
    """Be another process of nsys, by this name."""
    python = os.path.join(folder, "process", name)
    os.execv(python, [python, "-ISE", __file__, folder, *line])


def launch(_):
    session, program = option("session-new", f"{verb}-{os.getpid()}"), operands()
    if not any(os.access(os.path.join(each, program[0]), os.X_OK) for each in os.get_exec_path()):
        return fail(f"No such file or directory: {program[0]}")
    if session in sessions():
        return fail("Process launch is not allowed in this state.")
    apart("--start-agent", f"--session-name={session}")
    until = time.monotonic() + LONGEST_S
    while session not in sessions() and time.monotonic() < until:
        time.sleep(0.01)
    agent = connected(session)
    if verb == "profile" and option("capture-range", "none") == "none":
        ask(agent, "start", **output())
    return stay(agent, program)


def stay(agent, program):
    """Stay over the program until it has ended; returns its status."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        os.set_inheritable(theirs.fileno(), True)
        become("nsys-launcher", "--launcher", str(theirs.fileno()))
    theirs.close()
    ours.sendall(dumped(program))
    from_launcher = read_lines(ours)
    pid, signalled = int(from_launcher.readline()), []
    ask(agent, "over", pid=pid, environ=dict(os.environ))

    def forward(number, frame):
        signalled.append(time.monotonic())
        os.kill(pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    status = None
    while status is None and (not signalled or time.monotonic() < signalled[0] + GRACE_S):
        ready = select.select([ours, agent], [], [], 0.05)[0]
        if agent in ready:
            if not agent.recv(1):
                say("Connection to the Agent lost.")
            return 0
        if ours in ready:
            status = int(from_launcher.readline() or 1)
    ask(agent, "finish")
    return status or 0  # a program that was signalled may go on


def launcher(arguments):
    """The program's parent: in a session of its own, through pipes, with what nsys leaves open."""
    nsys = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(nsys.fileno(), False)
    program = loaded(read_lines(nsys).readline())
    streams = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.umask(0)
        for number, (_, write) in enumerate(streams, 1):
            os.dup2(write, number)
        for _ in range(2):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.environ["NSYS_PROFILING_SESSION_ID"] = "1000000"
        os.execvp(program[0], program)
    for _, write in streams:
        os.close(write)
    nsys.sendall(b"%d\n" % pid)
    copying = os.fork()
    if copying == 0:
        nsys.close()
        copy({streams[0][0]: 1, streams[1][0]: 2})
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = code if code >= 0 else 128 - code
    try:  # noqa: SIM105
        nsys.sendall(b"%d\n" % code)
    except OSError:
        pass  # nsys was killed
    return code


def copy(targets):
    """Copy what is read until no one can write any more."""
    while targets:
        for source in select.select(list(targets), [], [])[0]:
            try:
                read = os.read(source, 65536)
                os.write(targets[source], read)
            except OSError:
                read = b""
            if not read:
                targets.pop(source)
    os._exit(0)


class Agent:
    """A session: it collects into a file in TMPDIR, and makes of it what it was told to."""

    def __init__(self, session):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(ADDRESS + session)
        self.listener.listen(8)
        #: of the nsys over the program, which connects first, of `nsys start` and `nsys stop`
        self.nsys, self.connections = None, {}
        self.pid, self.ended, self.environ = 0, None, {}
        self.stream, self.output, self.force, self.began_ns = "", "", False, 0

    def run(self):
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until or self.nsys in self.connections:
            watched = [self.listener, *self.connections, *([self.ended] if self.ended else [])]
            ready = select.select(watched, [], [], LOOK_S if GROWTH_B else 1)[0]
            self.grow()
            for source in ready:
                if source is self.listener:
                    self.accept()
                elif source in self.connections and not self.answer(source):
                    del self.connections[source]
            if self.nsys and self.nsys not in self.connections:
                if self.ended is None or self.ended in ready:
                    self.finish()  # nsys was killed
                    return
            elif self.ended in ready:
                time.sleep(0.01)

    def accept(self):
        connection = socket.socket(fileno=self.listener._accept()[0])
        self.nsys = self.nsys or connection
        self.connections[connection] = read_lines(connection)

    def answer(self, connection):
        """Do what is asked; whether more can be."""
        line = self.connections[connection].readline()
        if not line:
            return False
        request = loaded(line)
        try:
            reply, failed = getattr(self, request.pop("what"))(**request), False
        except ValueError as error:
            reply, failed = str(error), True
        try:
            connection.sendall(dumped({"reply": reply, "failed": failed}))
        except OSError:
            return False
        return True

    def over(self, pid, environ):
        self.pid, self.environ, self.ended = pid, environ, os.pidfd_open(pid)

    def start(self, output, force):
        if self.stream:
            raise ValueError("Configuring is not allowed in this state.")
        self.output, self.force, self.began_ns = output, force, time.time_ns()
        self.stream = os.path.join(temporary(), f"nsys-report-{os.urandom(2).hex()}.qdstrm")
        with open(self.stream, "wb") as file:
            file.write(bytes(STREAM_B // 10))

    def grow(self):
        if self.stream and GROWTH_B:
            with open(self.stream, "ab") as file:
                file.write(bytes(GROWTH_B))

    def stop(self):
        if not self.stream:
            raise ValueError("The request is not applicable in this state: StopRequest.")
        return self.finish()

    def finish(self):
        """Make of the stream what `nsys start` was told; what nsys says of it."""
        if not self.stream:
            return ""
        stream, self.stream = self.stream, ""
        stated = {"pid": self.pid, "began_ns": self.began_ns, "ended_ns": time.time_ns(),
                  "host": os.uname().nodename, "environ": self.environ}  # fmt: skip
        with open(stream, "wb") as file:
            file.write(dumped(stated))
            file.write(bytes(STREAM_B))
        ending = ".nsys-rep" if setting("imports") else ".qdstrm"
        target = self.output + ending
        reply = [] if setting("imports") else [NO_IMPORTER]
        reply += [f"Generating '{stream}'", "Generated:"]
        if os.path.exists(target) and not self.force:
            return "\n".join([*reply, f"    {stream}", f"Failed to create '{target}': it exists."])
        if setting("imports"):
            make_report(stream, target)
            os.unlink(stream)
        else:
            move(stream, target)
        return "\n".join([*reply, f"    {target}"])

    def shutdown(self, kill):
        self.stream = ""
        self.nsys.sendall(b"shutdown\n")  # before it learns of its program's end
        if kill != "none" and self.pid:
            os.killpg(self.pid, signal.SIGKILL if kill == "sigkill" else signal.SIGTERM)


def move(source, target):
    try:
        os.replace(source, target)
    except OSError:  # another file system
        import shutil

        shutil.move(source, target)


# The report.


def make_report(stream, report):
    with open(stream, "rb") as file, open(report, "wb") as made:
        made.write(REPORT_HEAD + b"\n" + file.readline() + os.urandom(REPORT_B) + REPORT_END)


def importer(_):
    """QdstrmImporter -i STREAM -o REPORT"""
    make_report(words[words.index("-i") + 1], words[words.index("-o") + 1])
    return 0


def export(_):
    (report,), target = operands(), option("output")
    with open(report, "rb") as file:
        content = file.read()
    if not content.startswith(REPORT_HEAD) or not content.endswith(REPORT_END):
        return fail(f"Exportation error: {report} is no report.")
    if option("type") != "sqlite":
        return fail("Exportation error: this nsys is a script.")
    if os.path.exists(target):
        if option("force-overwrite") != "true":
            return fail(f"Exportation error: {target} exists.")
        os.unlink(target)
    make_tables(loaded(content.split(b"\n", 2)[1]), target)
    return 0


def make_tables(stated, target):
    """An export with a call of the system each millisecond."""
    import sqlite3

    database = sqlite3.connect(target)
    tables = {
        "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
        "EXPORT_META_DATA": "name TEXT NOT NULL, value TEXT",
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER",
        "TARGET_INFO_SYSTEM_ENV": "name TEXT NOT NULL, value TEXT NOT NULL",
        "OSRT_API": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER",
    }  # fmt: skip
    for name, columns in tables.items():
        database.execute(f"CREATE TABLE {name} ({columns})")
    thread, length_ns = stated["pid"] << 24 | stated["pid"], stated["ended_ns"] - stated["began_ns"]
    environment = "\0".join(f"{name}={value}" for name, value in stated["environ"].items())
    environment = os.fsencode(environment).decode(errors="replace")  # SQLite takes UTF-8 only
    system = {"Hostname": stated["host"], "DeviceEnvironment": environment}
    rows = {
        "StringIds": [(1, "clock_nanosleep")],
        "EXPORT_META_DATA": [("EXPORT_PRODUCT_VERSION", VERSION)],
        "TARGET_INFO_SESSION_START_TIME": [(stated["began_ns"],)],
        "TARGET_INFO_SYSTEM_ENV": list(system.items()),
        "OSRT_API": [(at, at + 900_000, thread, 1) for at in range(0, length_ns, 1_000_000)],
    }
    for name, values in rows.items():
        marks = ", ".join("?" * len(values[0]))
        database.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
    database.commit()
    database.close()


VERBS = {
    "--version": lambda _: say(f"NVIDIA Nsight Systems version {VERSION}-script"),
    "--help": lambda _: say(usage()), "profile": launch, "launch": launch, "start": start,
    "stop": stop, "shutdown": shutdown, "sessions": list_sessions, "export": export,
    "import": importer, "--launcher": launcher, "--spin": spin,
    "--start-agent": lambda _: Agent(option("session-name")).run(),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
