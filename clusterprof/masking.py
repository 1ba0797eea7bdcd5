"""Secrets that people put on command lines: masked in what is kept and in what is shown.

A list of what secrets look like has no end. So of a command (`words`) nothing is shown but what is
known to be none: programs, scripts, the names of options, counts of ranks and nodes, and the values
of options that the user's own settings name. In texts that are no commands (`text`), and in the
file that keeps a command to start it again (`suspected`), what looks like a secret is masked: by
its name (`--token=…`, `API_KEY=…`, `Authorization: …`), by its form (well-known prefixes) or by its
place (the password in a URL). The job gets the real words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

MASK = "***"
#: the launcher's options and the program of a run that clusterprof did not start
UNKNOWN_LAUNCH = ("...", "--", "PROGRAM...")
#: a masked word as a shell quotes it, and what of it stays
_MASKED = re.compile(r"'([\w@%+=:,./-]*)\*\*\*'", re.ASCII)

#: options whose values are no secrets, as the user's own settings say: without their dashes
harmless: set[str] = set()

#: words that clusterprof itself adds to a command
ours: set[str] = set()

#: what starts programs, and is no secret whatever it stands behind
_PROGRAM = re.compile(
    r"(?:[\w.+/-]*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|mpiexec(?:\.\w+)?"
    r"|env|bash|sh|time|numactl|uv|poetry|apptainer|singularity|enroot|clusterprof|launch|run)"
)
_SCRIPT = re.compile(r"[\w.+/~-]*\w\.(?:py|sh|sbatch)")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_LONG = re.compile(r"--[A-Za-z][\w.-]*")
_SHORT = re.compile(r"-[A-Za-z0-9]")
#: mpirun's and nsys' options of one dash and a word
_WORDY = {"-np", "-ppn", "-genv", "-genvlist", "-env", "-host", "-hosts", "-hostfile", "-mca"}
_ASSIGNED = re.compile(r"([A-Za-z_+~][\w./-]*)=(?!=?$)")
#: how many ranks, nodes and processors: these options' values, where they are numbers
_COUNTS = {
    "N", "n", "np", "c", "ppn", "nodes", "nnodes", "ntasks", "ntasks-per-node", "nproc-per-node",
    "node-rank", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "num-processes",
    "num-machines", "machine-rank", "num-nodes", "master-port",
}  # fmt: skip
_COUNT = re.compile(r"[0-9]{1,6}(?:[:,x-][0-9]{1,6}){0,3}")
#: a variable that clusterprof gives a command, and what is between several
_OURS = re.compile(r"CLUSTERPROF_[A-Z_]+|PYTHONPATH|[:!]")

#: how the last part of a telling name ends: `HF_TOKEN`, `--db-password`, `clientSecret`
_ENDINGS = (
    "token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials",
    "authorization", "cookie", "apikey", "accesskey",
)  # fmt: skip
#: and what comes before `key` then: most keys are to sort by, or of an attention
_KEYS = (
    "api", "access", "private", "secret", "encryption", "signing", "account", "auth", "master",
    "license", "ssh",
)  # fmt: skip
_PARTS = re.compile(r"[_.-]+|(?<=[a-z0-9])(?=[A-Z])")

#: a name begins where nothing of a name is before it, so that each is looked at once
_NAMED = re.compile(r"(?<![A-Za-z0-9_.-])([A-Za-z0-9_.-]+)[\"']?\s?[=:]\s?(?:(?:Bearer|Basic)\s)?")
_OPTION = re.compile(r"(?<!\S)--?([A-Za-z0-9_.-]+)\s+(?!-)")
#: it ends where a list or the next word of a shell begins
_VALUE = re.compile(r"""(?!\*\*\*)(?:"[^"]*"|'[^']*'|[^\s,;&"']+)""")

_PLACED = re.compile(
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"
    r"|(\b(?:Bearer|Basic)\s)[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|hf_[A-Za-z0-9]{16,}"
    r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,999}\.[\w-]{8,}(?:\.[\w-]*)?|nvapi-[\w-]{16,}|npm_\w{16,}|pypi-[\w-]{16,}"
    r"|dckr_pat_[\w-]{16,}|ya29\.[\w-]{16,}|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----.*)",
    re.DOTALL,
)


def telling(name: str) -> bool:
    """Whether what has this name is a secret."""
    parts = [word.lower() for word in _PARTS.split(name[-100:].rstrip("0123456789_")) if word]
    last, before = (parts or [""])[-1], parts[-2:-1]
    return last.endswith(_ENDINGS) or (last == "key" and any(word in _KEYS for word in before))


def text(plain: str) -> str:
    """The text with every value in it masked that looks like a secret."""
    for pattern in (_NAMED, _OPTION):  # the values that stand behind a telling name
        parts, done = [], 0
        for named in pattern.finditer(plain):
            value = _VALUE.match(plain, named.end()) if telling(named[1]) else None
            if value is not None and named.start() >= done:
                parts += [plain[done : named.end()], MASK]
                done = value.end()
        plain = "".join([*parts, plain[done:]])
    plain = _PLACED.sub(lambda match: (match[1] or match[2]) + MASK, plain)
    return _KNOWN.sub(MASK, plain)


def words(argv: Sequence[str]) -> list[str]:
    """A command's words without values, but for those that are known to be harmless; as many."""
    shown: list[str] = []
    for index, word in enumerate(argv):
        before = argv[index - 1] if index else ""
        if index == 0 or word in ("--", MASK):
            shown.append(text(word))
        elif word.startswith("-"):
            shown.append(_option(word))
        elif before == "-m" and _MODULE.fullmatch(word) and _is_python(argv[: index - 1]):
            shown.append(word)
        elif _is_option(before):
            shown.append(_value(before, word))
        elif (assigned := _ASSIGNED.match(word)) and not _is_known(word):
            shown.append(f"{assigned[0]}{_value(assigned[1], word[assigned.end() :])}")
        else:
            shown.append(word if _is_known(word) else MASK)
    return shown


def _option(word: str) -> str:
    """An option's name, and its value where that is in the same word and harmless."""
    name, assigned, value = word.partition("=")
    if _is_option(name):
        return f"{name}={_value(name, value)}" if assigned else name
    if _SHORT.match(word) and not word.startswith("--"):
        return word[:2] + _value(word[:2], word[2:])
    return MASK


def _is_option(word: str) -> bool:
    return bool(_LONG.fullmatch(word) or _SHORT.fullmatch(word) or word in _WORDY)


def _value(option: str, value: str) -> str:
    name = option.lstrip("-").replace("_", "-")
    if name in harmless:
        return text(value)
    count = name in _COUNTS and _COUNT.fullmatch(value)
    return value if count or _is_known(value) else MASK


def _is_known(word: str) -> bool:
    """Whether a word is no secret, whatever it stands behind."""
    return word in ours or any(form.fullmatch(word) for form in (_PROGRAM, _SCRIPT, _OURS))


def _is_python(words: Sequence[str]) -> bool:
    """Whether `-m` behind these words names a module: they have a program, and no script yet."""
    return any(map(_PROGRAM.fullmatch, words)) and not any(map(_SCRIPT.fullmatch, words))


def again(argv: Sequence[str], marker: str) -> list[str]:
    """The words of a command line of clusterprof's: its own options stay, up to the `marker`."""
    until = argv.index(marker) if marker in argv else 0
    # clusterprof's own options that pass something on
    passed_on = ("--env", "--nsys-arg")
    own = [
        _option(word) if word.startswith(passed_on) or before in passed_on else text(word)
        for before, word in pairwise(["", *argv[:until]])
    ]
    end = argv.index("--", until) if "--" in argv[until:] else len(argv)
    # the first word of either part is looked at as all others are
    options = words(["", *argv[until + 1 : end]])[1:]
    return [*own, *argv[until : until + 1], *options, *argv[end : end + 1], *words(argv[end + 1 :])]


def command(argv: Sequence[str]) -> str:
    """A command line to copy: what is masked in it is to be filled in first (`--lr <value>`).

    Until then no shell runs it: a quoted mask would be passed to the program as a value.
    """
    return _MASKED.sub(r"\1<value>", shlex.join(argv))


def to_fill_in(shown: str) -> list[str]:
    """What is to be filled in before a command line runs: `<value>`, `...`, `PROGRAM...`."""
    return [*dict.fromkeys(re.findall(r"<value>|(?<=\s)(?:PROGRAM)?\.\.\.(?!\S)", shown))]


def suspected(argv: Sequence[str]) -> list[str]:
    """A command's words, in which what looks like a secret is masked; as many as before."""
    shown = []
    value = False
    for word in argv:
        name, assigned, _ = word.partition("=")
        secret = telling(name.lstrip("-")) and not set(name) & set(" \t\n:/,;&\"'")
        if value and not word.startswith("-"):
            shown.append(MASK)
        else:
            shown.append(f"{name}={MASK}" if assigned and secret else text(word))
        value = secret and not assigned and word.startswith("-")
    return shown
