"""What a user installs: the built wheel, in an environment that cannot see the source tree."""

from __future__ import annotations

import email
import re
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.unpack import unpack

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., Completed]


def _build(source: Path, target: str, folder: Path) -> Path:
    done = command.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=source,
    )
    assert done.returncode == 0, done
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source archive."""
    archive = _build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    unpack(archive, folder)
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel installed and its dependencies in sight."""
    folder = tmp_path_factory.mktemp("environment")
    made = command.run([sys.executable, "-m", "venv", "--without-pip", folder])
    assert made.returncode == 0, made
    python = folder / "bin" / "python"
    installed = command.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--no-deps",
            "--no-index",
            wheel,
        ],
    )
    assert installed.returncode == 0, installed
    # The dependencies are borrowed from here. A folder named in a .pth file has its own .pth files
    # ignored, and with them the one by which the source tree is importable here.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def _packed(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = {f"clusterprof/{name}" for name in _files(ROOT / "clusterprof")}
    launchers = {f"clusterprof/launchers/{name}" for name in _files(ROOT / "launchers")}
    templates = {f"clusterprof/slurm/{name}" for name in _files(ROOT / "slurm")}
    assert _packed(wheel) == package | launchers | templates


def test_a_wheel_built_from_the_source_archive_is_the_same(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    assert _packed(_build(sdist, "wheel", tmp_path)) == _packed(wheel)


def test_the_source_archive_has_what_its_own_tests_need(sdist: Path) -> None:
    for name in ("tests/conftest.py", "tests/lab/slurm.sh", "Makefile", "examples", "LICENSE"):
        assert (sdist / name).exists(), name
    tests = {name for name in _files(ROOT / "tests") if name.endswith(".py")}
    assert tests == {name for name in _files(sdist / "tests") if name.endswith(".py")}


def test_the_source_archive_leaves_out_the_recordings(sdist: Path) -> None:
    sizes = [path.stat().st_size for path in sdist.rglob("*") if path.is_file()]
    assert sum(sizes) < 12_000_000
    assert not [*(sdist / "tests/data/recordings").rglob("*.xz")]


def test_the_readme_on_a_package_index_leads_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    targets = re.findall(r"\]\(([^)]*)\)", str(metadata.get_payload()))
    assert f"{urls['Source']}/raw/main/docs/report.png" in targets
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_installed_package_is_the_wheels_and_not_the_source_tree(
    python: Path, run_command: Run, workdir: Path
) -> None:
    code = (
        "import clusterprof, clusterprof.launchers, pyarrow\n"
        "print(clusterprof.__file__, clusterprof.launchers.__file__, clusterprof.__version__)"
    )
    done = run_command([python, "-c", code])
    assert done.returncode == 0, done
    package, launchers, version = done.stdout.split()
    assert package.startswith(str(python.parents[1]))
    assert launchers.startswith(str(python.parents[1]))
    assert version


def test_the_installed_command_answers(python: Path, run_command: Run, workdir: Path) -> None:
    program = python.parent / "clusterprof"
    stated = run_command([program, "--version"])
    assert stated.returncode == 0, stated
    asked = run_command([python, "-c", "import clusterprof; print(clusterprof.__version__)"])
    assert asked.stdout.strip() in stated.stdout
    helped = run_command([program, "--help"])
    assert helped.returncode == 0, helped
    assert "torchrun" in helped.stdout
    assert helped.stderr == ""
