"""`clusterprof LAUNCHER OPTIONS -- PROGRAM...`: run a job with some of its ranks profiled."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from clusterprof import console, gate, launchers
from clusterprof.arguments import GONE, RANKS_GRAMMAR, add_gpu_hour, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import UsageError
from clusterprof.launch import planning, settings
from clusterprof.launch.profiling import KEEP_REPORTS, MANY_RANKS, PROFILERS, PYTORCH, REDUCE

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def parser(verb: str, *, is_whole: bool = True) -> Parser:
    """The options of a launching verb; if it `is_whole`, with those that its launcher reads."""
    launcher = launchers.load(verb)
    summary = f"{launcher.SUMMARY[0].upper()}{launcher.SUMMARY[1:]}, in a window of steps."
    examples = [f"{verb} {example}" for example in getattr(launcher, "EXAMPLES", ())]
    needs = getattr(launcher, "NEEDS", "")
    parser = launching_parser(verb, summary, launcher.PASSES_OPTIONS_TO, examples, needs)
    if is_whole:
        _add_the_launchers(parser, verb)
    return parser


def _add_the_launchers(parser: Parser, verb: str) -> None:
    getattr(launchers.load(verb), "add_options", lambda _: None)(parser)


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Run the job; returns its own status."""
    return start(verb, own, program)


def start(
    verb: str, own: Sequence[str], program: Sequence[str] | None,
    fixed: Mapping[str, Any] = _NOTHING, usual: Mapping[str, Any] = _NOTHING,
) -> int:  # fmt: skip
    """Run the job with the settings `fixed`, whatever else gives them, and with those of `usual`
    that nothing gives; returns its own status.
    """
    # -h is ours only as a word of its own: argparse would find it in a launcher's -hostfile.
    words = ["--help" if word == "-h" else word for word in own]
    if "--help" in words:
        parser(verb).parse_known_args(["--help"])
    own_parser = parser(verb, is_whole=False)
    arguments, options = own_parser.parse_known_args(words)
    # what is no option of ours goes to the launcher, unless it is one of ours misspelt
    theirs = Parser()
    _add_the_launchers(theirs, verb)
    own_parser.check_passed_on(options, theirs)
    command = given_program(verb, own, program)
    origins = settings.settle(arguments, own_parser, words, verb)
    vars(arguments).update(fixed)
    origins |= {name: "look" for name in fixed if name in origins}
    missing = {name for name in usual if getattr(arguments, name) is None}
    vars(arguments).update({name: usual[name] for name in missing})
    if wrong := wrong_codes(arguments.fail_on):
        return wrong
    # what the user gave stands in a finding's next command, but for what that decides anew
    anew = {"ranks", "arm", "profiler", "run_dir", "force", "dry_run", "fail_on", "debug"}
    by_default = {name for name, origin in origins.items() if origin == "default"}
    arguments.given = settings.as_words(
        own_parser, arguments, anew | by_default | {*fixed} | missing
    )

    def planned(turn: int = 1) -> planning.LaunchPlan:
        """The plan, once more where another run took its directory in the same second."""
        return planning.make_plan(verb, arguments, origins, options, command, turn)

    plan = planned()
    if arguments.dry_run:
        print(plan.shown())
        return 0
    if plan.job.over_ssh is not None:
        from clusterprof.launch import over_hosts

        return over_hosts.run(plan)
    from clusterprof.launch import run_job

    return run_job.run(plan, planned)


def wrong_codes(conditions: Sequence[gate.Condition]) -> int:
    """The status to end with where `--fail-on` has a code that no finding has, else 0."""
    if not conditions:
        return 0
    from clusterprof.launch.job_processes import Apart

    def ask() -> int:
        try:
            gate.check_codes(conditions)
        except UsageError as error:
            console.error(error.what, *error.details)
            return error.exit_code
        return 0

    asking = Apart(ask)  # threads of the analysis would get signals that are the job's
    asking.ends_within(math.inf)
    return asking.status or 0


def given_program(verb: str, own: Sequence[str], program: Sequence[str] | None) -> Sequence[str]:
    """The program behind `--`. Raises UsageError where there is none."""
    if program:
        return program
    usage = f"write: clusterprof {verb} [OPTIONS] --"
    if program is not None:
        raise UsageError("there is no program after --", f"{usage} train.py")
    meant = itertools.dropwhile(
        lambda word: not word.endswith(".py") and not word.startswith("python"), own
    )
    example = " ".join(meant) or "python train.py"
    raise UsageError("there is no -- before the program", f"{usage} {example}")


def launching_parser(
    verb: str, summary: str, passes_to: str, examples: Sequence[str] = (), needs: str = ""
) -> Parser:
    """The options of all launching verbs; unknown ones are for the program `passes_to`, which
    cannot work without those it `needs`.
    """
    needs, passed_on = f"{needs} " if needs else "", ""
    if passes_to:
        summary += f" Unknown options are passed to {passes_to} unchanged."
        passed_on = f"[{passes_to} OPTION...] "
    usage = f"clusterprof {verb} {needs}[--ranks R] [--steps A:B] {passed_on}-- PROGRAM..."
    parser = verb_parser(verb, summary, *examples, usage=usage, short_help=False)
    parser.gone = GONE
    _add_profiling(parser)
    add = parser.add_argument_group("limits").add_argument
    add("--max-steps", type=int, default=planning.MOST_STEPS, metavar="N",
        help=f"refuse a window of more steps (default {planning.MOST_STEPS})")  # fmt: skip
    add("--max-report-mb", type=int, default=planning.MOST_REPORT_MB, metavar="M",
        help="close a rank's window early once its profile takes M MB on its node "
        f"(default {planning.MOST_REPORT_MB}; 0: no limit)")  # fmt: skip
    add("--time-margin", type=float, metavar="S",
        help="close an open window S seconds before Slurm's time limit (default 60, or a tenth "
        "of a shorter limit; 0: never)")  # fmt: skip

    add = parser.add_argument_group("the run").add_argument
    add("--run-dir", metavar="DIR", help="default runs/<UTC stamp>-<job or process id>")
    add("--force", action="store_true", help="replace an earlier run in DIR")
    add("--dry-run", action="store_true", help="only print what would run")
    add("--no-merge", action="store_true", help="only collect the reports")
    add("--strict", action="store_true",
        help=f"end with status {planning.PROFILE_FAILED} if a report is missing")  # fmt: skip
    add_gpu_hour(add)
    gate.add_option(add, status=f"status {planning.GATE_FAILED}, if the job succeeded,")
    return parser


def _add_profiling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to profile").add_argument
    add("--ranks", metavar="R", help=f"the ranks to profile: {RANKS_GRAMMAR}; or auto: those "
        "that all ranks' flight recorders show to delay the others, and peers of theirs, in a "
        "second window soon after that of --steps (default auto)")  # fmt: skip
    for name, kind in (("pp", "pipeline"), ("tp", "tensor"), ("cp", "context"), ("dp", "data")):
        add(f"--{name}", type=int, metavar="N", help=f"{kind}-parallel size, for --ranks stages")
    add("--arm", metavar="R",
        help="with --ranks auto: the ranks that start under nsys, which captures them (as --ranks, "
        "or none; default: rank 0, and with --pp one rank of each stage)")  # fmt: skip
    add("--steps", metavar="A:B",
        help="the window, with --ranks auto that of the look at all ranks: steps A to B-1 "
        "(default 10:15)")  # fmt: skip
    add("--step-on", metavar="MODULE:FUNCTION",
        help="a step ends when this function returns (default: the optimizer's step)")  # fmt: skip

    add = parser.add_argument_group("how to profile it").add_argument
    add("--profiler", choices=PROFILERS,
        help="default auto: nsys where it is installed, else torch; torch too where the last "
        "merged run of this program was launch-bound; none: no rank is profiled, every rank leaves "
        "its steps, clock and flight recorder")  # fmt: skip
    add("--stacks", action="store_true",
        help="save the Python stack of each collective with the flight recorder")  # fmt: skip
    add("--hang-after", type=int, default=60, metavar="S",
        help="say what the ranks wait for when a step lasts S seconds and 20 times the usual "
        "(default 60; 0: never)")  # fmt: skip
    add("--watch", metavar="EVERY",
        help="look at all ranks so often while the job runs, and say who is late: 90s, 10m, 1h; "
        "off (default 10m with --ranks auto, else off)")  # fmt: skip
    add("--metrics", type=path, metavar="FILE",
        help="write what each of these looks shows to FILE, for Prometheus' textfile "
        "collector")  # fmt: skip
    add("--nsys", metavar="PATH", help="the nsys to use")
    add("--trace", metavar="LIST", help="nsys --trace (default cuda,nvtx)")
    add("--nsys-arg", action="append", default=[], metavar="ARG",
        help="a further argument for nsys; may be repeated")  # fmt: skip
    add("--pytorch", choices=PYTORCH, help="NVTX ranges for PyTorch's operators")
    add("--cpu-sampling", action="store_true",
        help="sample the CPU too (takes CPU time of the rank)")  # fmt: skip
    add("--window-by", choices=("auto", "cuda", "session"), default="auto",
        help="how nsys opens the window. session: nsys start and stop (default); cuda: "
        "cudaProfilerStart in the program")  # fmt: skip

    add = parser.add_argument_group("where the reports are read").add_argument
    add("--reduce", choices=REDUCE, default="auto",
        help="make each report's tables on its node, by a process of idle priority, so that "
        "merging reads megabytes: node: once the rank's program has ended; now: once its window "
        "was captured; none: when they are merged (default auto: node where more than "
        f"{MANY_RANKS} ranks are profiled)")  # fmt: skip
    add("--keep-reports", choices=KEEP_REPORTS, default="gather",
        help="gather: the reports are in the run directory too (default); node: they stay where "
        "nsys wrote them, on the node's disk; none: each is removed once its tables are "
        "made")  # fmt: skip

    add = parser.add_argument_group("clock alignment").add_argument
    add("--clock-probe", choices=("auto", "on", "off"), default="auto",
        help="measure the clocks of the hosts against each other around the window, by a process "
        "on each node (UDP between nodes; default auto: on where the ranks may be on several "
        "nodes)")  # fmt: skip
