"""The project's rules that no other tool holds."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import tomllib

from clusterprof import launchers
from clusterprof.cli.main import verbs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clusterprof"
AGENT = PACKAGE / "agent"

_PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "tests/**/*.md", "examples/*.md")
    for page in ROOT.glob(pattern)
)
_CODE = sorted(
    path
    for folder in ("clusterprof", "launchers", "slurm")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".sh", ".sbatch"}
)
_LAB = sorted(
    [
        ROOT / "tests" / "conftest.py",
        *(ROOT / "tests" / "lab").glob("*.*"),
        *(ROOT / "bench").glob("*.py"),
        ROOT / "Makefile",
    ]
)
#: of a whole name only: `CLUSTERPROF_LAB_` alone is a prefix that some code looks for
_NAME = re.compile(r"\bCLUSTERPROF_[A-Z0-9_]*[A-Z0-9]\b")


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the launchers' link


def test_the_launchers_are_reached_through_a_relative_link() -> None:
    # An absolute link would point at somebody else's checkout; a copy would be a second truth.
    link = PACKAGE / "launchers"
    assert link.is_symlink()
    assert os.readlink(link) == "../launchers"
    assert (link / "__init__.py").samefile(ROOT / "launchers" / "__init__.py")


# --- the agent


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path.name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno


def _lines_at_start(path: Path) -> set[int]:
    """The lines that run when the module is imported, as far as imports may stand there."""
    return {
        line
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Try, ast.If))
    }


def test_the_agent_imports_only_itself_and_the_standard_library() -> None:
    # It runs in the job's interpreter, where nothing of ours and nothing we like is installed.
    # torch may be imported, inside a function: the functions that do run once the job has it.
    modules = sorted(AGENT.rglob("*.py"))
    allowed = {path.stem for path in modules} | {"_clusterprof_agent"} | sys.stdlib_module_names
    foreign = [
        f"{_named(path)}:{line} imports {name}"
        for path in modules
        for name, line in _imports(path)
        if (first := name.partition(".")[0]) not in allowed
        and (first != "torch" or line in _lines_at_start(path))
    ]
    assert foreign == []


# --- the tree

_MODULES = sorted(
    path
    for folder in ("clusterprof", "launchers")
    for path in (ROOT / folder).rglob("*.py")
    if not path.stem.startswith("__")  # Python's own names
)


def test_no_two_modules_have_one_name() -> None:
    # A line of a stack trace, "host.py:72", says where one is.
    names = [path.name for path in _MODULES]
    assert sorted({name for name in names if names.count(name) > 1}) == []


# --- the analysis' numbers


def _alone(value: ast.expr) -> bool:
    """Whether a value is written as numbers alone: what is derived from another name is not."""
    if any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(value)):
        return False
    numbers = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return bool(numbers) and all(type(number) in (int, float) for number in numbers)


def test_every_constant_of_the_analysis_has_its_reason_above_it() -> None:
    # Where a finding depends on a number, somebody has to know where that number is from.
    without = []
    for path in sorted((PACKAGE / "analysis").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in getattr(target, "elts", [target])]
            constants = [
                name.id for name in names if isinstance(name, ast.Name) and name.id != "ORDER"
            ]
            above = lines[node.lineno - 2]
            listed = path.stem == "limits" and re.match(r"[A-Z_, ]+ = ", above)
            if _alone(node.value) and not above.startswith("#: ") and not listed:
                without += [f"{_named(path)}:{node.lineno} {name}" for name in constants]
    assert without == []


# --- documentation


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


def _prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", _prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # the network is not for tests
        name, _, anchor = target.partition("#")
        linked = (page.parent / name) if name else page
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            yield f"{_named(page)}: {target}"


def test_links_in_the_documentation_lead_somewhere() -> None:
    assert [link for page in _PAGES for link in _broken_links(page)] == []


def _names_in(paths: list[Path]) -> set[str]:
    return {name for path in paths for name in _NAME.findall(path.read_text(encoding="utf-8"))}


def test_every_environment_name_of_the_program_is_documented() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert _names_in(_CODE) - _names_in(pages) == set()


def test_every_environment_name_of_the_tests_is_in_contributing() -> None:
    assert _names_in(_LAB) - _names_in(_CODE) - _names_in([ROOT / "CONTRIBUTING.md"]) == set()


def test_every_make_target_that_contributing_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", " ".join(re.findall(r"`([^`]*)`", text))))
    assert named
    assert named <= targets


def test_every_verb_is_documented() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [verb for verb in verbs() if f"clusterprof {verb}" not in text] == []


def test_every_launcher_has_a_section_in_the_documentation() -> None:
    page = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    assert [name for name in launchers.names() if f"## {name}\n" not in page] == []


def test_the_readme_is_short_and_shows_the_command_first() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert any(line.startswith("clusterprof srun ") for line in lines[:15])


# --- what `make` installs


def test_all_that_make_installs_is_locked_by_its_hash_but_for_torch() -> None:
    lock = (ROOT / "tests" / "requirements.txt").read_text()
    entries = [entry for entry in re.split(r"\n(?=\S)", lock) if not entry.startswith("#")]
    assert all(re.search(r"\n    --hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    pinned = {re.split(r"[ \\]", entry, maxsplit=1)[0] for entry in entries}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = {
        pin.split(" ")[0] for group in ("test", "lint", "release") for pin in groups[group]
    }  # fmt: skip
    assert wanted - pinned == set(), "make lock"
    named = {pin.partition("==")[0] for pin in pinned}
    assert set(groups["torch"]) - named == set(), "make lock"
    assert "torch" not in named
    installs = re.findall(r"\$\((?:UV_)?INSTALL\) (.*)", (ROOT / "Makefile").read_text())
    assert installs == [
        "--require-hashes --no-deps --requirement $(VENV)/uv.txt",
        "--require-hashes --no-deps --requirement $(LOCK)",
        "$(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') '$(TORCH)'",
        "--no-deps --no-build-isolation --editable .",
    ]


# --- writing files

#: who writes otherwise than by `agent/contracts/files.py`, and why no one's link is followed there
_WRITERS = {
    "agent/contracts/files.py": "the one way itself",
    "agent/contracts/processes.py": "the kernel's own file of this process, in /proc",
    "agent/contracts/beside.py": "the kernel's own file of this process, in /proc",
    "agent/guard/report_transfer.py": "in the guard's own folder (mkdtemp)",
    "agent/guard/session.py": "in the guard's own folder; a lock with O_NOFOLLOW",
    "agent/remote/host.py": "in a folder of a host's that no other user sees (mkdir 0700)",
    "agent/guard/step_log.py": "appends to the rank's own log, which it made with O_EXCL",
    "agent/nsys.py": "the lock of nsys: O_EXCL, O_NOFOLLOW",
    "agent/remote/prober.py": "a claim: O_EXCL",
    "console.py": "descriptors 1 and 2",
    "collect/outcomes.py": "out of a folder of its own (mkdtemp)",
    "doctor/cluster.py": "in a folder of its own (mkdtemp)",
    "doctor/this_host.py": "in a folder of its own (mkdtemp)",
    "folders.py": "under a random name that nothing has, then by rename",
    "run_directory.py": "the lock of a merge: O_NOFOLLOW",
    "ingest/engines.py": "in memory, without a name",
    "ingest/nsys/sqlite.py": "in a folder of its own (mkdtemp)",
}
_WRITING = {"write_text", "write_bytes", "touch", "rename", "symlink_to", "hardlink_to"}


def _writes(node: ast.Call) -> bool:
    """Whether a call makes or renames a file."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    of = getattr(getattr(node.func, "value", None), "id", "")
    words = [each.value for each in node.args if isinstance(each, ast.Constant)]
    if name == "open" and of != "os":
        modes = [each.value for each in node.keywords if each.arg == "mode"]
        words += [each.value for each in modes if isinstance(each, ast.Constant)]
        return any(
            isinstance(word, str) and re.fullmatch(r"[wax]\S?\+?|r\S?\+", word) for word in words
        )
    if name == "open":
        return any(getattr(each, "attr", "") == "O_CREAT" for each in ast.walk(node))
    if name == "replace":  # a path's has one argument, a text's has two
        return of == "os" or (bool(of or not words) and len(node.args) == 1 and not node.keywords)
    return name in _WRITING or (of == "shutil" and name in {"copy", "copy2", "copyfile", "move"})


@cache
def _calls(path: Path) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Call)]


def _modules_with(kind: Callable[[ast.Call], bool]) -> set[str]:
    """The modules of the package in which a call is of this kind."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(map(kind, _calls(path)))
    }


def test_files_are_written_in_one_way() -> None:
    assert _modules_with(_writes) == set(_WRITERS)


# --- reading files

#: who opens a file for reading otherwise than by `files.opened`; no other user laid one there
_READERS = {
    "agent/contracts/files.py": "the one way itself; the kernel's files in /proc",
    "agent/contracts/clocks.py": "the kernel's, in /proc",
    "agent/contracts/processes.py": "the kernel's, in /proc; a file to be removed, O_NOFOLLOW",
    "agent/guard/amdgpu.py": "the kernel's, in /sys",
    "agent/guard/hardware_sampler.py": "the kernel's, in /proc and /sys",
    "agent/guard/report_transfer.py": "in the guard's own folder (mkdtemp)",
    "agent/guard/session.py": "the kernel's, in /proc",
    "agent/guard/writer.py": "in the writer's own folder (mkdtemp)",
    "agent/nsys.py": "the kernel's, in /proc",
    "agent/rank/profilers.py": "the kernel's, in /proc",
    "agent/rank/start.py": "the kernel's, in /proc",
    "agent/remote/host.py": "in a folder of a host's that no other user sees (mkdir 0700)",
    "collect/host_keys.py": "the list that the user's ssh configuration names",
    "collect/over_ssh.py": "this package's own modules",
    "doctor/leftovers.py": "the kernel's, in /proc",
    "doctor/this_host.py": "the kernel's, in /proc and /sys",
    "ingest/engines.py": "in a folder of our own (mkdtemp)",
    "ingest/nsys/database.py": "in a folder of its own (mkdtemp), once nsys has ended",
    "launch/batch.py": "the batch template that the user names",
    "launch/job_processes.py": "the kernel's, in /proc",
    "launch/over_hosts.py": "this package's own modules",
    "mapped.py": "in a folder of our own (mkdtemp), or a temporary file of our own (0600)",
    "report/html.py": "this package's own templates",
}
_READING = {"open", "read_text", "read_bytes", "memory_map", "fromfile", "memmap"}


def _reads(node: ast.Call) -> bool:
    """Whether a call opens a file for reading, by its name."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in _READING or _writes(node):
        return False
    of = getattr(getattr(node.func, "value", None), "id", "")
    flags = {getattr(each, "attr", "") for each in ast.walk(node)}
    no_file = of in {"webbrowser", "self"} or flags & {"O_WRONLY", "O_DIRECTORY", "devnull"}
    of_a_connection = name == "open" and not node.args and not of
    return not no_file and not of_a_connection


def test_files_are_opened_for_reading_in_one_way() -> None:
    assert _modules_with(_reads) == set(_READERS)


#: who maps a file into memory, and why no one else can shorten it meanwhile (that ends us: SIGBUS)
_MAPPERS = {
    "ingest/nsys/database.py": "in a folder of its own (mkdtemp), once nsys has ended",
    "mapped.py": "as above; what is read there was written before",
}


def _maps(node: ast.Call) -> bool:
    """Whether a call maps a file."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in {"mmap", "memory_map", "memmap"} or any(
        each.arg in {"memory_map", "mmap_mode"} for each in node.keywords
    )


def test_no_file_is_mapped_that_another_user_can_shorten() -> None:
    assert _modules_with(_maps) == set(_MAPPERS)
