"""`clusterprof completion SHELL`: completion of verbs, options and values for a shell."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence

from clusterprof.cli import Parser, verb_parser
from clusterprof.cli.main import parser as top_parser
from clusterprof.cli.main import parser_of, summary, verbs

#: words that a shell completes by itself: options with these names of values take files
_FILES = {"FILE", "DIR", "PATH", "NAME|FILE", "EXPORT", "TARGET", "RUN"}


def parser(verb: str) -> Parser:
    """The verb's options."""
    this = verb_parser(
        verb, "Print a script that completes verbs, options and their values in a shell.",
        "completion bash > ~/.local/share/bash-completion/completions/clusterprof",
        "completion zsh > ~/.zfunc/_clusterprof               with fpath+=~/.zfunc in .zshrc",
        "completion fish > ~/.config/fish/completions/clusterprof.fish",
    )  # fmt: skip
    this.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell")
    return this


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print the script."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    print(_SCRIPTS[arguments.shell](), end="")
    return 0


def options(verb: str) -> Iterator[argparse.Action]:
    """The options of a verb that its help shows."""
    for action in parser_of(verb)._actions:
        if action.help != argparse.SUPPRESS:
            yield action


def _top() -> list[str]:
    """The options beside the verbs."""
    return [flag for action in top_parser()._actions for flag in action.option_strings]


def _values(action: argparse.Action) -> list[str]:
    """The values that an option or argument may have, where these are known."""
    if action.metavar == "CODE":
        from clusterprof.analysis.findings.registry import CODES

        return sorted(CODES)
    return [str(choice) for choice in action.choices or ()]


def _bash() -> str:
    cases = []
    for verb in verbs():
        flags = " ".join(flag for opt in options(verb) for flag in opt.option_strings)
        values = "".join(
            f"        {'|'.join(opt.option_strings)}) "
            f"COMPREPLY=($(compgen -W {shlex.quote(' '.join(_values(opt)))} -- "
            '"$word")); return;;\n'
            for opt in options(verb)
            if opt.option_strings and _values(opt)
        )
        first = " ".join(
            value for opt in options(verb) if not opt.option_strings for value in _values(opt)
        )
        cases.append(
            f"    {verb})\n"
            + (f'      case "$before" in\n{values}      esac\n' if values else "")
            + f"      flags={shlex.quote(flags)} words={shlex.quote(first)};;\n"
        )
    names = shlex.quote(" ".join([*verbs(), "help", *_top()]))
    return f"""\
# bash completion for clusterprof
_clusterprof() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} flags= words= place
  # bash takes --format=pe for three words
  [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
  [[ $word == = ]] && word=
  if ((COMP_CWORD == 1)) || {{ ((COMP_CWORD == 2)) && [[ $before == help ]]; }}; then
    COMPREPLY=($(compgen -W {names} -- "$word"))
    return
  fi
  for ((place = 2; place < COMP_CWORD; place++)); do
    [[ ${{COMP_WORDS[place]}} == -- ]] && return  # the program and its own arguments
  done
  case "${{COMP_WORDS[1]}}" in
{"".join(cases)}  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  fi
}}
complete -o default -F _clusterprof clusterprof
"""


def _zsh() -> str:
    cases = []
    for verb in verbs():
        specs = []
        for opt in options(verb):
            text = _plain(opt.help or "", "[]:'")
            choices = f"({' '.join(_values(opt))})" if _values(opt) else ""
            files = _takes_file(opt)
            value = f":{_plain(str(opt.metavar or opt.dest), ':')}:{choices or files}"
            takes = opt.nargs != 0
            for flag in opt.option_strings:
                joint = "=" if takes and flag.startswith("--") else ""
                specs.append(f"'*{flag}{joint}[{text}]{value if takes else ''}'")
        positional = next((opt for opt in options(verb) if not opt.option_strings), None)
        if positional is not None:
            choices = f"({' '.join(_values(positional))})" if _values(positional) else ""
            specs.append(f"'*:{positional.metavar or positional.dest}:{choices or '_files'}'")
        else:
            specs.append("'*::program:_normal'")
        body = " \\\n        ".join(specs)
        cases.append(f"    {verb})\n      _arguments -S \\\n        {body};;\n")
    lines = "".join(f"    '{name}:{_plain(summary(name), chr(39))}'\n" for name in verbs())
    return f"""\
#compdef clusterprof
_clusterprof() {{
  local -a verbs=(
{lines}    'help:the options of a verb'
  )
  if ((CURRENT == 2)) || {{ ((CURRENT == 3)) && [[ $words[2] == help ]]; }}; then
    [[ $PREFIX == -* ]] && compadd -- {" ".join(_top())} || _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  ((CURRENT--))
  case $verb in
{"".join(cases)}  esac
}}
_clusterprof "$@"
"""


def _fish() -> str:
    lines = [
        "# fish completion for clusterprof",
        "complete -c clusterprof -n __fish_use_subcommand -f -a help -d 'the options of a verb'",
        "complete -c clusterprof -n __fish_use_subcommand -s h -l help -d 'show the verbs'",
        "complete -c clusterprof -n __fish_use_subcommand -s V -l version -d 'show the version'",
    ]
    names = " ".join(verbs())
    lines.append(f"complete -c clusterprof -n '__fish_seen_subcommand_from help' -f -a '{names}'")
    for verb in verbs():
        text = _plain(summary(verb), "'\\")
        lines.append(f"complete -c clusterprof -n __fish_use_subcommand -f -a {verb} -d '{text}'")
        verb_is = f"complete -c clusterprof -n '__fish_seen_subcommand_from {verb}'"
        arguments = [action for action in options(verb) if not action.option_strings]
        if arguments and not any(map(_takes_file, arguments)):  # nor a program and its own words
            lines.append(f"{verb_is} -f")
        for opt in options(verb):
            words = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                     for flag in opt.option_strings]  # fmt: skip
            if _values(opt):
                words.append(f"-a '{' '.join(_values(opt))}'")
            if opt.option_strings and opt.nargs != 0:
                words.append("-r" if _takes_file(opt) else "-x")
            if words:
                lines.append(f"{verb_is} {' '.join(words)} -d '{_plain(opt.help or '', chr(39))}'")
    return "\n".join([*lines, ""])


def _takes_file(action: argparse.Action) -> str:
    """How zsh completes a value: by files, or "" for not at all."""
    return "_files" if str(action.metavar) in _FILES else ""


def _plain(text: str, without: str) -> str:
    """A help text's first clause, without the signs that a shell's grammar uses otherwise."""
    first = re.split(r"[;(]|\. ", text.replace("%%", "%"))[0].strip()
    return re.sub(f'[{re.escape(without)}`$"\\\\]', "", first)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
