"""Which host keys `clusterprof ssh` accepts: those that the real ssh accepts, by the same files."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab.hosts import Hosts

from clusterprof.collect.connection import SshHost
from clusterprof.errors import HostError
from clusterprof.jobs import Host

pytestmark = [pytest.mark.needs_fabric, pytest.mark.needs_hosts]

#: what a refusal names: the name that was looked up, the next command, the entry that counts
UNKNOWN = "known_hosts as "
CHANGED = "ssh-keygen -R"
REVOKED = "revoked in known_hosts"


@dataclass(frozen=True)
class Case:
    """A known_hosts file, further lines of the configuration, and what we say; "" for nothing.

    In both, KEY is the host's own key, OTHER another, NAME the host's name there.
    """

    known: str
    says: str = ""
    more: str = ""


GOOD = "NAME KEY\n"
CASES = {
    "its key": Case(GOOD),
    "another key": Case("NAME OTHER\n", CHANGED),
    "another and its key": Case("NAME OTHER\nNAME KEY\n"),
    "no line": Case("", UNKNOWN),
    "malformed lines": Case(
        "garbage\n\0\n@bogus * KEY\nNAME ssh-ed25519 %%%\nNAME\n  \n#x\n" + GOOD
    ),
    "only malformed lines": Case("NAME ssh-ed25519\nNAME KEY==x\n@bogus NAME KEY\n", UNKNOWN),
    "a certificate authority beside": Case("@cert-authority * OTHER\n" + GOOD),
    "a certificate authority alone": Case("@cert-authority NAME KEY\n", "@cert-authority"),
    "revoked": Case(GOOD + "@revoked * KEY\n", REVOKED),
    "revoked, and the key after it": Case("@revoked NAME KEY\n" + GOOD, REVOKED),
    "revoked for another host": Case("@revoked other KEY\n" + GOOD),
    "another key revoked": Case("@revoked * OTHER\n" + GOOD),
    "a negated pattern before": Case("!NAME,!127.0.0.1,* KEY\n", UNKNOWN),
    "a negated pattern behind": Case("*,!NAME,!127.0.0.1 KEY\n", UNKNOWN),
    "a negated pattern of another": Case("*,!other KEY\n"),
    "wildcards": Case("[127.0.0.?]:* KEY\n"),
    "another port": Case("[127.0.0.1]:1 KEY\n", UNKNOWN),
    "no port": Case("127.0.0.1 KEY\n"),
    "no port, and revoked": Case("127.0.0.1 KEY\n@revoked 127.0.0.1 KEY\n", REVOKED),
    "an alias": Case("alias KEY\n", more="HostKeyAlias alias"),
    "an alias that is not there": Case(GOOD, UNKNOWN, "HostKeyAlias alias"),
    "a second file": Case("", more="UserKnownHostsFile FOLDER/missing FOLDER/good"),
    "a second file that revokes": Case(
        "", REVOKED, "UserKnownHostsFile FOLDER/good FOLDER/revokes"
    ),
    "the system's file": Case("", more="GlobalKnownHostsFile FOLDER/good"),
    "the system's file revokes": Case(GOOD, REVOKED, "GlobalKnownHostsFile FOLDER/revokes"),
    "the user's file is none": Case(GOOD, UNKNOWN, "UserKnownHostsFile none"),
    "a list of revoked keys": Case(GOOD, "revoked by FOLDER/list", "RevokedHostKeys FOLDER/list"),
    "a list of others": Case(GOOD, more="RevokedHostKeys FOLDER/others"),
    "a list that is none": Case(GOOD, " FOLDER/good ", "RevokedHostKeys FOLDER/good"),
    "a list that is missing": Case(GOOD, " FOLDER/missing ", "RevokedHostKeys FOLDER/missing"),
    "no list": Case(GOOD, more="RevokedHostKeys none"),
    "a revocation list": Case(GOOD, "revoked by FOLDER/krl", "RevokedHostKeys FOLDER/krl"),
    "a revocation list of others": Case(GOOD, more="RevokedHostKeys FOLDER/krl-of-others"),
    "half a revocation list": Case(GOOD, " FOLDER/krl-half ", "RevokedHostKeys FOLDER/krl-half"),
    "a list in an included file": Case(GOOD, "revoked by FOLDER/list", "Include FOLDER/included"),
}  # fmt: skip


@pytest.fixture
def folder(ssh_hosts: Hosts, tmp_path: Path) -> Path:
    """The files that the cases name."""
    key = " ".join((ssh_hosts.state / "h1.key.pub").read_text().split()[:2])
    other = " ".join((ssh_hosts.state / "h2.key.pub").read_text().split()[:2])
    name = f"[127.0.0.1]:{ssh_hosts.port('h1')}"
    files = {
        "good": f"{name} {key}\n", "revokes": f"@revoked * {key}\n",
        "list": f"# mine\n\n{other} h2\n{key} h1\n", "others": f"{other}\n",
        "included": f"RevokedHostKeys {tmp_path}/list\n", "KEY": key, "OTHER": other, "NAME": name,
    }  # fmt: skip
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    for krl, keys in (("krl", "list"), ("krl-of-others", "others")):
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", krl, keys], cwd=tmp_path, check=True)
    (tmp_path / "krl-half").write_bytes((tmp_path / "krl").read_bytes()[:40])
    return tmp_path


def configured(hosts: Hosts, folder: Path, case: Case) -> Path:
    """An ssh configuration for the case."""
    words = {name: (folder / name).read_text() for name in ("KEY", "OTHER", "NAME")}
    known, more = case.known, case.more.replace("FOLDER", str(folder))
    for word, meant in words.items():
        known = known.replace(word, meant)
    (folder / "known").write_text(known)
    text = hosts.changed("config_keys", (str(hosts.state / "known_hosts"), f"{folder}/known"))
    # The first value of a keyword is the one that counts.
    config = folder / "config"
    config.write_text(f"Host h1\n  {more}\n{text.read_text()}")
    return config


def test_the_keys_that_ssh_accepts_are_accepted_and_no_others(
    ssh_hosts: Hosts, folder: Path
) -> None:
    wrong = []
    for name, case in CASES.items():
        config = configured(ssh_hosts, folder, case)
        true = subprocess.run(
            ["ssh", "-F", config, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "h1",
             "true"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        refusal, says = "", case.says.replace("FOLDER", str(folder))
        ssh = SshHost(Host("h1", "h1"), config, 20)
        with contextlib.closing(ssh):
            try:
                ssh.open()
            except HostError as error:
                refusal = error.what
        if (refusal == "") != (true.returncode == 0) or says not in refusal:
            wrong.append((name, refusal, true.returncode, true.stderr))
        if not case.says and refusal:
            wrong.append((name, refusal, "it should be accepted", ""))
    assert wrong == []


def test_names_that_are_hashed_are_found(ssh_hosts: Hosts, folder: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", folder / "good"], check=True)
    assert (folder / "good").read_text().startswith("|1|")
    config = configured(ssh_hosts, folder, Case("", more=f"UserKnownHostsFile {folder}/good"))
    ssh = SshHost(Host("h1", "h1"), config, 20)
    with contextlib.closing(ssh):
        ssh.open()
        assert ssh.connected


def test_without_openssh_no_key_is_accepted(
    ssh_hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ssh = SshHost(Host("h1", "h1"), ssh_hosts.config, 20)
    with pytest.raises(HostError, match=r"host keys .* ssh .*openssh-client"):
        ssh.open()
