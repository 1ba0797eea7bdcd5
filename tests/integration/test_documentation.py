"""What the documentation shows is what the program does."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from lab.command import Completed

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., Completed]


def test_the_outputs_in_the_readme_are_what_its_commands_print(run_command: Run) -> None:
    done = run_command([sys.executable, ROOT / "scripts" / "readme.py", "--check"])
    assert done.returncode == 0, done


def test_every_make_target_is_listed_by_make_help(run_command: Run) -> None:
    phony = {
        word
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
        for word in line.split()[1:]
    }
    done = run_command(["make", "-C", ROOT, "help"], env={"MAKEFLAGS": None})
    assert done.returncode == 0, done
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")}
    assert listed == phony


# --- the site


class _Links(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon"}:
            self.loads.add(given["href"])
        elif "src" in given:
            self.loads.add(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation's site, as `make docs` builds it."""
    from lab import command

    folder = tmp_path_factory.mktemp("site")
    venv = Path(sys.executable).parents[1]
    done = command.run(
        ["make", "-C", ROOT, "docs", f"ARGS=--site-dir {folder}", f"VENV={venv}"],
        env={"MAKEFLAGS": None},
    )
    assert done.returncode == 0, done
    return folder


@pytest.mark.long
def test_each_link_of_the_site_leads_to_a_page_and_a_place_that_exist(site: Path) -> None:
    pages = {path: _Links(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 20
    wrong = []
    for page, found in pages.items():
        if page.name == "404.html":  # is served for any address: its links begin with a slash
            continue
        for link in found.links | found.loads:
            parts = urlsplit(link)
            if parts.scheme and link not in found.loads:
                continue
            there = (
                Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            )
            anchor = unquote(parts.fragment)
            known = pages[there].anchors if there in pages else {""}
            if parts.scheme or not there.is_file() or (anchor and anchor not in known):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert not wrong


@pytest.mark.long
def test_no_page_of_the_site_loads_a_script_from_another_server(site: Path) -> None:
    pages = [path.read_text("utf-8") for path in site.rglob("*.html")]
    assert [page for page in pages if 'src="http' in page] == []
    assert any("class FrameWorker" in page for page in pages)
    assert (site / "search" / "search_index.js").is_file()


def test_every_page_of_the_documentation_stands_in_the_site_s_navigation() -> None:
    named = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(named)


@pytest.mark.long
def test_the_reference_has_each_verb_exit_code_field_and_column(site: Path) -> None:
    from clusterprof import errors, tables
    from clusterprof.cli.main import verbs
    from clusterprof.results import Finding

    reference = {path.stem: path.read_text("utf-8") for path in (site / "reference").iterdir()}
    for verb in verbs():
        assert f'id="{verb}"' in reference["command-line"]
    for error in (errors.UsageError, errors.ReportError, errors.MergeError, errors.ProfilerError):
        assert f"<td>{error.exit_code}</td>" in reference["exit-codes"]
    for field in Finding.__annotations__:
        assert f"<code>{field}</code>" in reference["results"]
    for column in tables.ACTIVITY.names:
        assert f"<code>{column}</code>" in reference["tables"]


# --- the commands


def _commands() -> list[str]:
    """Every line of a shell block that begins with clusterprof, in the README and in docs/."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(
            r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if line.startswith("clusterprof ")]
    return list(dict.fromkeys(found))


#: what measures hosts and clocks asks for hosts: test_doctor.py and test_clock_probe.py run these
_HOSTS = {"doctor", "clock"}


#: runs command lines one after the other, and prints the status and the messages of each
_EACH = """
import contextlib, io, json, sys
from clusterprof.cli import main
done = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        done.append([main.run(words), said.getvalue()])
print(json.dumps(done))
"""


def test_the_command_line_takes_every_command_of_the_documentation(
    run_command: Run, workdir: Path
) -> None:
    from clusterprof import launchers

    (workdir / "train.py").touch()
    commands = [shlex.split(command, comments=True)[1:] for command in _commands()]
    assert len(commands) > 25
    launching = {*launchers.names(), "sbatch", "look"}
    lines = [
        [verb, *(["--dry-run"] if verb in launching else []), *words]
        for verb, *words in commands
        if verb not in _HOSTS
    ]
    done = run_command([sys.executable, "-c", _EACH, json.dumps(lines)])
    assert done.returncode == 0, done
    for line, (status, printed) in zip(lines, json.loads(done.stdout), strict=True):
        # the files and runs of the examples are not here: only what they ask for is looked at
        allowed = {0} if line[0] in launching else {0, 3, 5}
        assert status in allowed or "no baseline" in printed, (line, status, printed)


# --- the notebook


@pytest.mark.long
def test_the_notebook_runs_in_a_kernel_and_shows_who_is_late(
    run_clusterprof: Run, workdir: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(workdir / "jupyter"))
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples/run_in_pandas.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] for cell in cells)
    (command,) = re.findall(r"clusterprof (merge .*)", notebook.cells[0].source)
    (workdir / "tests/data").mkdir(parents=True)
    (workdir / "tests/data/recordings").symlink_to(recordings)
    done = run_clusterprof(shlex.split(command))
    assert done.returncode == 0, done
    where = {"metadata": {"path": str(workdir)}}
    nbclient.NotebookClient(notebook, timeout=60, resources=where).execute()
    shown = [output.data for cell in cells for output in cell.outputs if "data" in output]
    assert "<b>Rank 2 delays the other ranks by" in shown[0]["text/html"]
    assert "straggler.host" in shown[1]["text/html"]
    (waits,) = [each["text/plain"] for each in shown if "ms waited" in each["text/plain"]]
    assert re.search(r"last_rank\n2 +\d", waits), waits
    # one cell checks that the parts add up, and shows nothing
    assert len(shown) == len(cells) - 1


# --- the tutorial


@pytest.mark.long
@pytest.mark.needs_torch
def test_every_command_of_the_tutorial_runs_and_names_the_slow_rank(
    run_clusterprof: Run, workdir: Path
) -> None:
    for name in ("examples", "tests"):
        (workdir / name).symlink_to(ROOT / name)
    (workdir / "runs").mkdir()
    blocks = re.findall(
        r"```sh\n(.*?)```", (ROOT / "docs/tutorial.md").read_text("utf-8"), re.DOTALL
    )
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) == 7
    printed = []
    for words in commands:
        assert words[0] == "clusterprof"
        done = run_clusterprof(words[1:])
        assert done.returncode == 0, done
        printed.append(done.stdout)
    slow, _, _, explained, repaired, repaired_again, recorded = printed
    assert "\nRank 2 delays the other ranks by " in slow, slow
    assert "Cause: its host " in slow, slow
    assert explained.startswith("straggler.host: ")
    # what the program itself prints: the planted delay is 100 ms, the rest is the machine's
    took, takes = (float(re.findall(r"([\d.]+) ms each", text)[0]) for text in (slow, repaired))
    assert took - takes > 50, repaired
    assert repaired_again.splitlines()[0] in repaired
    assert recorded.startswith("Rank 2 delays the other ranks by ")
    assert (workdir / "runs/slow/report.html").is_file()
    assert (workdir / "runs/h200.html").is_file()
