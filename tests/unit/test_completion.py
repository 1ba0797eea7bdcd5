"""Completion and the manual page are made of the parsers themselves."""

from __future__ import annotations

import argparse
import re
from itertools import product

import pytest

from clusterprof.cli import completion, main, man


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_option_and_choice_can_be_completed(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = printed(capsys, "completion", shell)
    for verb in main.verbs():
        assert re.search(rf"\b{verb}\b", script), verb
        for action in completion.options(verb):
            for flag in action.option_strings:
                word = flag if shell != "fish" else re.sub("^--", "-l ", flag).replace(" -", " ")
                word = re.sub("^-(?=[a-zA-Z]$)", "-s ", word) if shell == "fish" else word
                assert word in script, (verb, flag)
            for choice in action.choices or ():
                assert str(choice) in script, (verb, choice)
    assert "SUPPRESS" not in script
    assert argparse.SUPPRESS not in script


def test_the_manual_has_every_verb_option_and_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = printed(capsys, "man")
    plain = page.replace(r"\-", "-")
    for verb in main.verbs():
        assert f".SS {verb}\n" in plain
        for action in completion.options(verb):
            if action.dest not in ("help", "color", "debug"):
                assert all(flag in plain for flag in action.option_strings), (verb, action.dest)
    assert "123" in plain
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".SS", ".B", ".I", ".TP", ".PP", ".nf", ".fi"}


def test_no_text_is_read_as_a_request() -> None:
    assert man._text(".so /etc/passwd").startswith(r"\&")
    assert man._text("'x") == r"\(aqx"
    assert man._text("a\\b-c") == r"a\eb\-c"
