"""What a job hangs in, as text: each cause, who waits, and where in the program."""

from __future__ import annotations

from clusterprof import words
from clusterprof.results import CalledEntry, HangEntry, HangResults

#: ranks whose lines are printed for each cause; results.json has them all
_LINES = 4


def verdict(hang: list[HangEntry], waiting: list[int]) -> str:
    """Return the answer in one sentence."""
    if hang:
        return sentence(hang[0])
    if not waiting:
        return "No rank waits for another rank."
    return f"{words.ranks(waiting).capitalize()} had not ended a call when the dump was taken."


def sentence(hang: HangEntry) -> str:
    """Return what is wrong with one call."""
    name = words.group(hang["group"], hang["description"] or "group")
    call = f"{hang['operation']} {hang['sequence']} of {words.plain(name)}"
    who = words.ranks(hang["ranks"])
    who = (f"one of {who}" if hang["one_of"] else who).capitalize() if hang["ranks"] else ""
    sentence = {
        "never_joined": f"{who} never joined {call}",
        "other_operation": f"{who} called another operation than {call}",
        "other_size": f"{who} called {call} with another size",
        "other_type": f"{who} called {call} with another data type",
        "no_receive": f"{who} never received what {call} sends",
        "no_send": f"{who} never sent what {call} receives",
        "no_dump": f"{who} left no dump, and {call} does not end",
        "stalled": f"All members joined {call}, and it does not end",
    }[hang["cause"]]
    verb = "waits" if len(hang["waiting"]) == 1 else "wait"
    waits = f"; {words.ranks(hang['waiting'])} {verb}" if hang["waiting"] else ""
    return f"{sentence}{waits}."


def render(results: HangResults) -> str:
    """Return the whole text."""
    lines = [results["verdict"]]
    for number, hang in enumerate(results["hang"]):
        lines += ["", sentence(hang)] if number else []
        odd = [called for called in hang["called"] if called["rank"] in hang["ranks"]]
        rest = [called for called in hang["called"] if called["rank"] not in hang["ranks"]]
        lines += [f"  {_called(called)}" for called in (*odd[:_LINES], *rest[:1])]
    lines += [""] if results["missing"] else []
    for lost in results["missing"]:
        whose = "a dump" if lost["rank"] is None else f"rank {lost['rank']}"
        lines.append(f"missing: {whose}: {lost['reason']}")
    lines += [f"warning: {warning}" for warning in results["warnings"]]
    return "\n".join(lines) + "\n"


def _called(called: CalledEntry) -> str:
    rank, operation = called["rank"], called["operation"]
    if not operation:
        return f"rank {rank}: no call recorded"
    last = "" if called["joined"] else "last called "
    sizes = f"{called['input_sizes'] or called['output_sizes']} {called['input_types']}"
    line = f", {words.plain(called['line'])}" if called["line"] else ""
    return f"rank {rank}: {last}{operation} {called['sequence']} {sizes}{line}"
