"""The pages' templates, whose byte code is kept as Python keeps that of its modules."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from functools import lru_cache
from importlib import resources, util
from pathlib import Path

import jinja2
from jinja2 import bccache

from clusterprof import __version__, words
from clusterprof.agent.contracts import files
from clusterprof.report import summary


def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("clusterprof.report") / "page" / name).read_text("utf-8")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return what all templates are read in: every text that comes in is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        bytecode_cache=_BesideTheTemplates(),
    )
    templates.globals.update(words=words, summary=summary)
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return templates


def _shown(value: object) -> object:
    """Every text that a template puts out passes here, but for what it marks as safe."""
    return words.plain(value) if type(value) is str else value


class _BesideTheTemplates(bccache.BytecodeCache):
    """Byte code in `page/__pycache__`, or where else Python is told to keep it.

    Compiling the templates takes longer than drawing a small page. Where the folder cannot be
    written they are compiled each time.
    """

    def get_cache_key(self, name: str, _filename: str | None = None) -> str:
        folder = resources.files("clusterprof.report") / "page"
        return util.cache_from_source(str(folder / name))

    def get_source_checksum(self, source: str) -> str:
        made_by = f"{__version__} {jinja2.__version__} {Path(__file__).stat().st_mtime_ns}"
        return hashlib.sha256(f"{made_by}\n{source}".encode()).hexdigest()

    def load_bytecode(self, bucket: bccache.Bucket) -> None:
        try:
            with Path(bucket.key).open("rb") as file:
                bucket.load_bytecode(file)
        except Exception:  # noqa: BLE001 - an unpickler raises anything
            bucket.reset()

    def dump_bytecode(self, bucket: bccache.Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError):
            Path(bucket.key).parent.mkdir(parents=True, exist_ok=True)
            files.write(bucket.key, bucket.bytecode_to_string())
