"""Completion and the manual page are made of the parsers themselves."""

from __future__ import annotations

import re
from itertools import product

import pytest

from clusterprof.cli import completion, main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(words) == 0
    return capsys.readouterr().out


def test_a_verb_hands_out_its_parser_and_works_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hidden = {"--lines", "--probe"}
    for verb in main.verbs():
        actions = main.parser_of(verb)._actions
        flags = {flag for action in actions for flag in action.option_strings}
        assert {"--help", "--color", "--debug"} <= flags, verb
        with pytest.raises(SystemExit):
            main.main([verb, "--help"])
        shown = capsys.readouterr().out
        assert {flag for flag in flags - hidden if flag not in shown} == set(), verb


def test_no_line_of_the_help_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = [main.parser(), *map(main.parser_of, main.verbs())]
    for parser, columns in product(parsers, (60, 80, 200)):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = parser.format_help()
        assert max(map(len, shown.splitlines())) <= columns, shown
        # a shell reads an example that goes on in the next line as it was
        as_read = " ".join(shown.replace("\\\n", " ").split())
        words = [part for example in parser.examples for part in example.split("   ")]
        assert [part for part in words if " ".join(part.split()) not in as_read] == []


def test_one_parser_has_every_verb_with_its_options_and_the_program_behind_the_dashes() -> None:
    whole = completion.every_verb()
    commands = next(action for action in whole._actions if action.dest == "==SUPPRESS==").choices
    assert commands is not None
    assert list(commands) == [*main.verbs(), "help"]
    for verb in main.verbs():
        own = [action for action in main.parser_of(verb)._actions if action.help != "==SUPPRESS=="]
        shown = completion.arguments_of(commands[verb])
        assert [action.dest for action in shown if action.dest != "program"] == [
            action.dest for action in own
        ]
        starts_programs = "-- PROGRAM" in (main.parser_of(verb).usage or "")
        assert any(action.dest == "program" for action in shown) == starts_programs, verb


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_verb_can_be_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "completion", shell)
    for verb in main.verbs():
        assert re.search(rf"\b{verb}\b", script), verb
    assert "host.gil" in script  # a finding's code, of which no parser knows
    assert "SUPPRESS" not in script


def test_no_name_of_a_value_is_read_as_more_of_an_argument_by_zsh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # "--steps[...]:A:B:" would have zsh run a program called B
    script = printed(capsys, "completion", "zsh")
    arguments = re.findall(r'^  ".*?(?<!\\)\]:(.*)"$', script, re.MULTILINE)
    assert "A-B:" in arguments
    assert [words for words in arguments if words.count(":") != 1] == []
