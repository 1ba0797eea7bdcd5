"""What a job hangs in, as text: each cause, who waits, and where in the program."""

from __future__ import annotations

from collections.abc import Iterator

from clusterprof import words
from clusterprof.results import CalledEntry, HangEntry, HangResults

#: ranks whose lines are printed for each cause; results.json has them all
_LINES = 4


def verdict(hang: list[HangEntry], waiting: list[int]) -> str:
    """Return the answer in one sentence."""
    if not hang:
        return (
            "No rank waits for another rank."
            if not waiting
            else (
                f"{words.ranks(waiting).capitalize()} had not ended a call when the dump was taken."
            )
        )
    return sentence(hang[0])


def sentence(one: HangEntry) -> str:
    """Return what is wrong with one call."""
    name = words.group(one["group"], one["description"] or "group")
    call = f"{one['operation']} {one['sequence']} of {words.plain(name)}"
    who = words.ranks(one["ranks"])
    who = (f"one of {who}" if one["one_of"] else who).capitalize() if one["ranks"] else ""
    what = {
        "never_joined": f"{who} never joined {call}",
        "other_operation": f"{who} called another operation than {call}",
        "other_size": f"{who} called {call} with another size",
        "other_type": f"{who} called {call} with another data type",
        "no_receive": f"{who} never received what {call} sends",
        "no_send": f"{who} never sent what {call} receives",
        "no_dump": f"{who} left no dump, and {call} does not end",
        "stalled": f"All members joined {call}, and it does not end",
    }[one["cause"]]
    wait = words.ranks(one["waiting"])
    waits = f"; {wait} {'waits' if len(one['waiting']) == 1 else 'wait'}" if one["waiting"] else ""
    return f"{what}{waits}."


def render(results: HangResults) -> str:
    """Return the whole text."""
    return "\n".join([results["verdict"], *_lines(results)]) + "\n"


def _lines(results: HangResults) -> Iterator[str]:
    for number, one in enumerate(results["hang"]):
        if number:
            yield ""
            yield sentence(one)
        odd = [each for each in one["called"] if each["rank"] in one["ranks"]]
        rest = [each for each in one["called"] if each["rank"] not in one["ranks"]]
        yield from (f"  {_called(each)}" for each in odd[:_LINES])
        yield from (f"  {_called(each)}" for each in rest[:1])
    if results["missing"]:
        yield ""
    for lost in results["missing"]:
        whose = "a dump" if lost["rank"] is None else f"rank {lost['rank']}"
        yield f"missing: {whose}: {lost['reason']}"
    yield from (f"warning: {each}" for each in results["warnings"])


def _called(one: CalledEntry) -> str:
    if not one["operation"]:
        return f"rank {one['rank']}: no call recorded"
    last = "" if one["joined"] else "last called "
    sizes = f"{one['input_sizes'] or one['output_sizes']} {one['input_types']}"
    where = f", {words.plain(one['line'])}" if one["line"] else ""
    return f"rank {one['rank']}: {last}{one['operation']} {one['sequence']} {sizes}{where}"
