"""What the command line says of itself, and of words that are not its own."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from clusterprof import console, launchers, masking
from clusterprof.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The status of a command line, and all that it prints."""
    try:
        status = main.main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out + err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["mrege", "x"], "clusterprof merge"),
        (["hlep"], "clusterprof help"),
        (["torchrn", "--", "t.py"], "clusterprof torchrun"),
        (["help", "statsu"], "clusterprof status"),
        (["srun", "--rank", "0", "--", "t.py"], "--ranks"),
        (["srun", "--rank=0", "--", "t.py"], "--ranks"),
        (["torchrun", "--step", "3:9", "--", "t.py"], "--steps"),
        (["srun", "--profile", "nsys", "--", "t.py"], "--profiler"),
        (["sbatch", "--dry_run", "--", "t.py"], "--dry-run"),
        (["doctor", "--locl"], "--local"),
        (["merge", "x", "--htlm", "y"], "--html"),
        (["status", "x", "--wach"], "--watch"),
        (["merge", "--hlep"], "--help"),
        (["export", "x", "--format", "perfeto"], "perfetto"),
        (["runs", "lst"], "list"),
    ],
)
def test_a_misspelt_word_is_given_back_with_the_one_it_is_near_to(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    status, text = printed(capsys, *words)
    assert status == 2
    assert text.startswith("clusterprof: error: ")
    assert f"did you mean {meant}?" in text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize("verb", ["status", "report", "collect", "capture"])
def test_words_behind_dashes_are_refused_where_no_program_is_started(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = printed(capsys, verb, "run", "--", "train.py")
    assert status == 2
    assert f"error: clusterprof {verb} has no argument train.py\n" in text


@pytest.mark.parametrize("words", [["--beacons", "16"], ["--beacons=16"]])
@pytest.mark.parametrize("launcher", ["srun", "run"])
def test_an_option_that_is_gone_is_refused_and_reaches_no_launcher(
    capsys: pytest.CaptureFixture[str], launcher: str, words: list[str]
) -> None:
    status, text = printed(capsys, launcher, *words, "--dry-run", "--", "t.py")
    assert status == 2
    assert all(fact in text for fact in ("--beacons", "it is gone", "--clock-probe")), text


@pytest.mark.parametrize(
    "words",
    [
        ["srun", "--profile=task", "-n2"], ["srun", "--profile", "none", "-n2"],
        ["srun", "--tmp=10G", "--time-min=5", "-n2"],
        ["sbatch", "--profile=all"], ["torchrun", "--node-rank", "0"],
        ["torchrun", "--tee", "3", "--role=trainer", "--run-path"],
    ],
)  # fmt: skip
def test_a_launcher_s_own_option_reaches_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("CLUSTERPROF_PROFILER", "torch")
    # else its value would not be shown
    monkeypatch.setattr(masking, "harmless", {"profile", "tmp", "time-min", "tee", "role"})
    status, text = printed(capsys, words[0], "--dry-run", *words[1:], "--", "t.py")
    assert status == 0, text
    assert " ".join(words[1:]) in text


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("words", [["explain"], ["explain", "straggler.host"]])
def test_an_explanation_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, text = printed(capsys, *words)
    assert columns // 2 < max(map(len, text.splitlines())) <= columns


def test_what_is_not_there_is_said_to_be_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["report", "x"], ["view", "x"], ["export", "x", "--format", "csv"]):
        status, text = printed(capsys, *words)
        assert (status, "x does not exist\n" in text) == (3, True), text
    assert printed(capsys, "baseline", "list") == (0, "no baselines in .clusterprof/baselines\n")


def test_no_near_word_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(capsys, "xyzzy")
    assert (status, "did you mean" in text) == (2, False)
    assert all(verb in text for verb in main.verbs())
    status, text = printed(capsys, "report", "x", "--zzyzx")
    assert (status, "did you mean" in text) == (2, False)
    assert "clusterprof report --help" in text


def test_help_begins_with_what_it_is_for_and_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # where no example needs a second line
    assert printed(capsys, "help") == printed(capsys, "--help") == printed(capsys, "help", "help")
    for words in ([], *([verb] for verb in main.verbs())):
        status, text = printed(capsys, *words, "--help")
        assert status == 0
        assert printed(capsys, "help", *words) == (0, text)
        places = [text.index(part) for part in ("\nexamples:\n", "\nusage: ", "--help")]
        assert places == sorted(places), text
        assert places[0] > 20
        examples = text[places[0] : places[1]].splitlines()[2:]
        assert examples, text
        assert all(line.startswith("  clusterprof ") for line in examples if line), text


def _unknown_options(text: str, allowed: set[str]) -> set[str]:
    """The options in the examples of a verb's help that the rest of the help does not have."""
    examples, _, options = text.partition("\nusage: ")
    commands = examples.partition("\nexamples:\n")[2].splitlines()
    before_program = " ".join(line.partition(" -- ")[0] for line in commands)
    used = set(re.findall(r"(?<= )--[a-z-]+", before_program))
    return {option for option in used - allowed if not re.search(rf"{option}\b", options)}


def test_an_example_has_only_options_that_the_verb_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    theirs = {"--ntasks-per-node", "--gpus-per-node", "--nproc-per-node"}
    for verb in main.verbs():
        allowed = theirs if verb in launchers.names() or verb == "sbatch" else set()
        assert _unknown_options(printed(capsys, verb, "--help")[1], allowed) == set(), verb


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_the_version_is_printed(capsys: pytest.CaptureFixture[str], word: str) -> None:
    status, text = printed(capsys, word)
    assert status == 0
    assert re.fullmatch(r"clusterprof \d+\.\d+\S*\n", text)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "stream", "expected"),
    [
        ({"TERM": "xterm"}, _Terminal(), True),
        ({"TERM": "xterm"}, io.StringIO(), False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, _Terminal(), False),
        ({"TERM": "dumb"}, _Terminal(), False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"TERM": "xterm", "FORCE_COLOR": "0"}, io.StringIO(), False),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, _Terminal(), False),
    ],
)
def test_colour_is_for_terminals_that_did_not_decline_it(
    environment: dict[str, str],
    stream: io.StringIO,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.wants_colour(stream) is expected


@pytest.mark.parametrize(("given", "expected"), [("always", True), ("never", False)])
def test_colour_is_as_the_option_says_whatever_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, expected: bool
) -> None:
    monkeypatch.setattr(console, "colour", "auto")
    monkeypatch.setenv("NO_COLOR" if expected else "FORCE_COLOR", "1")
    assert printed(capsys, "report", "--color", given, "nowhere")[0] == 3
    assert console.wants_colour(io.StringIO()) is expected
    assert printed(capsys, "report", "--color", "some", "nowhere")[0] == 2
