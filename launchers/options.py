"""Reading another program's options without knowing all of them."""

from __future__ import annotations

from collections.abc import Sequence


def last_value(options: Sequence[str], *names: str) -> str | None:
    """The value of the last of `names` in `options`, None where none is given.

    Understands `--name value`, `--name=value`, `-n value` and `-nvalue`.
    """
    found: str | None = None
    for place, option in enumerate(options):
        for name in names:
            if option == name and place + 1 < len(options):
                found = options[place + 1]
            elif name.startswith("--") and option.startswith(name + "="):
                found = option[len(name) + 1 :]
            elif _short_with_value(option, name):
                found = option[2:].removeprefix("=")
    return found


def _short_with_value(option: str, name: str) -> bool:
    return not name.startswith("--") and option.startswith(name) and len(option) > len(name)


def whole_number(value: str | None) -> int | None:
    """`value` as a number; None where it is none (`gpu`, `1:4`, `2-4`)."""
    return int(value) if value is not None and value.isdigit() else None


#: Programs that start the ranks themselves: behind them, only their workers are ranks.
INNER_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
INNER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def starts_ranks_itself(program: Sequence[str]) -> bool:
    """Whether `program` is torchrun or one of its kind, also as `python -m ...`."""
    for place, word in enumerate(program[:8]):
        if word.rsplit("/", 1)[-1] in INNER_LAUNCHERS:
            return True
        if word == "-m" and place + 1 < len(program) and program[place + 1] in INNER_MODULES:
            return True
    return False
