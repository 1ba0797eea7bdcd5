"""`clusterprof sbatch OPTIONS -- PROGRAM...`: fill a batch template, submit it and a merge job."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.arguments import number_of
from clusterprof.cli import Parser, launch
from clusterprof.launch import batch


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = launch.launching_parser(
        verb,
        "Submit PROGRAM as a batch job and profile some of its ranks; a second job merges the "
        "reports when the first has ended, even if it failed. PROGRAM is what you would give "
        "srun, one task per rank, or a torchrun command, one per node.",
        "sbatch",
        [
            "sbatch -N2 --ntasks-per-node=8 --gpus-per-node=8 -- python train.py",
            "sbatch -N2 --gpus-per-node=8 -- torchrun --nproc-per-node=8 train.py",
            "sbatch --dry-run -N2 -- python train.py        the scripts, to be pasted",
        ],
    )
    add = parser.add_argument_group("the batch job").add_argument
    add("--template", metavar="NAME|FILE",
        help=f"the script to fill: {', '.join(batch.templates())}, or a file with the same marked "
        f"block (default {batch.ONE_TASK}, for torchrun {batch.TORCHRUN})")  # fmt: skip
    add("--srun-arg", action="append", default=[], metavar="ARG",
        help="a further argument for srun inside the job")  # fmt: skip
    add("--merge-arg", action="append", default=[], metavar="ARG",
        help="a further argument for sbatch, for the merge job only")  # fmt: skip
    add("--merge-nodes", type=number_of("nodes"), default=1, metavar="N",
        help=f"over how many nodes the merge job reads the reports, {batch.MERGE_TASKS} processes "
        "on each, over MPI (default 1: on one, without MPI)")  # fmt: skip
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Submit, and print the ids of the jobs and the run directory; returns sbatch's own status."""
    own_parser = parser(verb)
    arguments, options = own_parser.parse_known_args(list(own))
    own_parser.check_passed_on(options)
    submission = batch.decide(
        own_parser, arguments, options, launch.given_program(verb, own, program), own
    )
    if arguments.dry_run:
        print(submission.shown())
        return 0
    return batch.submit(submission, quiet="--parsable" in options)
