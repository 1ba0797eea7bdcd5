"""Secrets that people put on command lines: masked in what is kept and in what is shown.

What looks like one is masked, by its name (`--token=…`, `API_KEY=…`, `Authorization: …`), by its
form (well-known prefixes) or by its place (the password in a URL). The job gets the real words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

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
    parts = [part.lower() for part in _PARTS.split(name[-100:].rstrip("0123456789_")) if part]
    last, before = (parts or [""])[-1], parts[-2:-1]
    return last.endswith(_ENDINGS) or (last == "key" and any(part in _KEYS for part in before))


def text(plain: str) -> str:
    """The text with every value in it masked that looks like a secret."""
    for pattern in (_NAMED, _OPTION):
        plain = _masked(plain, pattern)
    plain = _PLACED.sub(lambda found: (found[1] or found[2]) + MASK, plain)
    return _KNOWN.sub(MASK, plain)


def _masked(plain: str, named: re.Pattern[str]) -> str:
    """The values masked that stand behind a telling name."""
    made, done = [], 0
    for found in named.finditer(plain):
        value = _VALUE.match(plain, found.end()) if telling(found[1]) else None
        if value is not None and found.start() >= done:
            made += [plain[done : found.end()], MASK]
            done = value.end()
    return "".join([*made, plain[done:]])


def words(argv: Sequence[str]) -> list[str]:
    """A command's words, masked; as many as before."""
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
