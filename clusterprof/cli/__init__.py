"""The command line: one module per verb, each loading what it needs when it runs."""

from __future__ import annotations

import argparse


def verb_parser(
    verb: str, description: str, *, usage: str | None = None, run: str = "", short_help: bool = True
) -> argparse.ArgumentParser:
    """A verb's parser with what all verbs have.

    `run`: the help of its argument RUN; `short_help`: whether argparse handles -h.
    """
    this = argparse.ArgumentParser(
        prog=f"clusterprof {verb}", usage=usage, description=description, allow_abbrev=False,
        add_help=False,
    )  # fmt: skip
    names = ["-h", "--help"] if short_help else ["--help"]
    this.add_argument(*names, action="help", help="show this help")
    if run:
        from clusterprof.arguments import path

        this.add_argument("run", metavar="RUN", type=path, help=run)
    this.add_argument("--debug", action="store_true", help="show tracebacks")
    return this
