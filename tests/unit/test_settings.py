"""clusterprof.toml: after options and environment, and each value says where it is from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from clusterprof import masking, run_directory
from clusterprof.agent.contracts import files
from clusterprof.cli import launch, main
from clusterprof.errors import UsageError
from clusterprof.launch import settings
from clusterprof.launch.settings import SETTINGS


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The project's file, two folders above the current one, and the user's."""
    for variable, _ in SETTINGS.values():
        monkeypatch.delenv(variable, raising=False)
    here = tmp_path / "project" / "experiments" / "a"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    config = tmp_path / "config" / "clusterprof"
    config.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent))
    user = config / "clusterprof.toml"
    user.write_text('profiler = "torch"\n')
    return tmp_path / "project" / "clusterprof.toml", user


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, tuple[str, str]]:
    """Of each row that --dry-run prints its value and its origin."""
    line = ["torchrun", "--dry-run", *options, "--nproc-per-node", "2", "--", "train.py"]
    assert main.main(line) == 0, capsys.readouterr().err
    rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    cells = [re.split(r"  +", row) for row in rows]
    return {cell[0]: (cell[1], cell[-1]) for cell in cells}


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["torchrun", "--dry-run", "--nproc-per-node", "2", "--", "train.py"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--watch", "5"], "no time between two looks"),
        (["--watch", "0s"], "no time between two looks"),
        (["--watch", "25h"], "no time between two looks"),
        (["--ranks", "0", "--metrics", "job.prom"], "add --watch 10m"),
        (["--watch", "off", "--metrics", "job.prom"], "add --watch 10m"),
        (["--metrics", "missing/job.prom"], "there is no folder"),
        (["--metrics", "."], "--metrics . is a folder"),
    ],
)
def test_looks_that_cannot_be_are_refused_at_the_start(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], options: list[str], fact: str
) -> None:
    line = ["torchrun", "--dry-run", *options, "--nproc-per-node", "2", "--", "train.py"]
    assert main.main(line) == 2
    assert fact in capsys.readouterr().err


def test_all_ranks_are_looked_at_where_they_are_chosen_by_it_or_as_asked(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys)["watch"] == ("all ranks every 10 min", "default")
    assert planned(capsys, "--watch=90s")["watch"][1] == "--watch 90s"
    assert "watch" not in planned(capsys, "--watch=off")
    assert "watch" not in planned(capsys, "--ranks=0")


def test_an_option_comes_before_the_environment_and_that_before_files(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, user = places
    assert planned(capsys)["profiler"] == ("torch the program's own", str(user))
    project.write_text('steps = "5:9"\nprofiler = "none"\n')
    assert planned(capsys)["steps"] == ("5:9", str(project))
    assert planned(capsys)["profiler"][1] == str(project)
    monkeypatch.setenv("CLUSTERPROF_STEPS", "6:9")
    assert planned(capsys)["steps"] == ("6:9", "CLUSTERPROF_STEPS")
    assert planned(capsys, "--steps=7:9")["steps"] == ("7:9", "--steps")


def test_a_verb_s_own_table_comes_first_and_another_s_is_not_read(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, _ = places
    project.write_text('steps = "5:9"\n[torchrun]\nsteps = "6:9"\n[srun]\nsteps = "7:9"\n')
    assert planned(capsys)["steps"] == ("6:9", str(project))


def test_every_option_can_be_set_and_one_that_is_given_its_default_is_given(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, _ = places
    project.write_text('hang-after = 9\nstacks = true\nmax-steps = "50"\n')
    rows = planned(capsys)
    assert rows["--hang-after"] == ("9", str(project))
    assert rows["--stacks"] == ("True", str(project))
    assert rows["--max-steps"] == ("50", str(project))
    assert rows["flight recorder"][1] == "with stacks: --stacks"
    assert "--hang-after" not in planned(capsys, "--hang-after", "60")


def test_conditions_of_a_file_are_those_of_the_option(places: tuple[Path, Path]) -> None:
    project, _ = places
    this = launch.parser("run")
    project.write_text('fail-on = ["critical,saved>5%", "straggler.*"]\n')
    given = this.parse_args(["--fail-on=critical,saved>5%", "--fail-on=straggler.*"])
    assert settings.read("run", this, [project])["fail_on"][0] == given.fail_on
    assert len(given.fail_on) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('stepz = "5:9"', ("stepz", "did you mean --steps?")),
        ("force = true", ("force",)),
        ('profiler = "troch"', ("troch", "nsys")),
        ("hang-after = 'soon'", ("hang-after", "soon")),
        ("stacks = 1", ("stacks", "true")),
        ("beacons = 16", ("beacons", "it is gone", "--clock-probe")),
        ("fail-on = [1]", ("fail-on", "list")),
        ("fail-on = ['saved>lots']", ("fail-on", "saved>lots")),
        ("steps = false", ("steps", "one value")),
        ("steps = [5, 9]", ("steps", "one value")),
        ('[clusterprof]\nsteps = "5:9"', ("[clusterprof]", "torchrun", "before any table")),
        ("steps = ", ("https://toml.io",)),
        ("\udcff", ("utf-8",)),
        ("steps = '9:5'", ("--steps 9:5",)),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_its_name(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    project, _ = places
    project.write_bytes(text.encode(errors="surrogateescape"))
    printed = refused(capsys)
    assert all(word in printed for word in words), printed
    assert "--steps" in printed or str(project) in printed
    assert len(printed.splitlines()) >= 2


def test_a_file_that_others_can_write_is_not_read(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, user = places
    project.write_text('nsys = "/tmp/evil"\n')
    project.chmod(0o666)
    assert planned(capsys)["profiler"][1] == str(user)
    if os.geteuid() == 0:
        project.chmod(0o644)
        os.chown(project, 12345, 12345)
        assert planned(capsys)["profiler"][1] == str(user)
    main.main(["torchrun", "--dry-run", "--nproc-per-node", "2", "--", "train.py"])
    assert str(project) in capsys.readouterr().err


_NAMES_MORE = {
    "nsys": "/evil/nsys",
    "nsys-arg": ["--env-var=LD_PRELOAD=/evil"],
    "run-dir": "/home/somebody",
    "python": "/evil/python",
    "ssh-config": "/evil/config",
    "chdir": "/evil",
    "env": ["LD_PRELOAD=/evil"],
    "hosts": "evil",
}


@pytest.mark.parametrize("key", _NAMES_MORE)
def test_only_the_user_s_own_file_names_a_program_a_file_a_host_or_a_variable(
    places: tuple[Path, Path], key: str
) -> None:
    project, user = places
    this = launch.parser("ssh")
    for file in (project, user):
        file.write_text(f"{key} = {json.dumps(_NAMES_MORE[key])}\n")
    assert key.replace("-", "_") in settings.read("ssh", this, [user])
    with pytest.raises(UsageError, match=f"{key} would name"):
        settings.read("ssh", this, [project])


def test_a_user_s_own_file_that_a_group_can_write_is_not_read(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, user = places
    project.write_text("max-steps = 50\n")
    this = launch.parser("run")
    for file in (project, user):
        file.chmod(0o664)
    monkeypatch.setattr(run_directory, "_own_group", lambda group: True)
    assert {*settings.read("run", this, settings.files())} == {"max_steps", "profiler"}
    monkeypatch.setattr(run_directory, "_own_group", lambda group: False)
    assert {*settings.read("run", this, settings.files())} == {"max_steps"}


def test_a_settings_file_that_is_another_one_once_it_is_opened_is_checked_as_that_one(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = places
    project.write_text("max-steps = 50\n")
    other = project.with_name("other")
    other.write_text("max-steps = 60\n")
    other.chmod(0o666)
    opened = files.opened
    monkeypatch.setattr(files, "opened", lambda path, **more: opened(other, **more))
    this = launch.parser("run")
    assert settings.read("run", this, [project]) == {}


def test_the_user_s_own_file_alone_says_whose_values_are_harmless(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, user = places
    monkeypatch.setattr(masking, "harmless", set())
    for file in (project, user):
        file.write_text('harmless = ["--batch_size", "lr"]\n')
    assert settings.read("run", launch.parser("run"), [user]) == {}
    assert masking.harmless == {"batch-size", "lr"}
    with pytest.raises(UsageError, match="harmless"):
        settings.read("run", launch.parser("run"), [project])
    user.write_text("harmless = 'lr'\n")
    with pytest.raises(UsageError, match="harmless is a list of options"):
        settings.read("run", launch.parser("run"), [user])
