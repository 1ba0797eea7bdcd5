"""Pages of the documentation's site that are no files of docs/: a hook of mkdocs.

- `index.md` is README.md.
- `reference/` is written from the code: what each verb prints for `--help`, the exit codes, the
  fields of results.json, the columns of the tables.
- `repository/` has the files of the repository that a page links to (the site may be read
  where the repository is not).
"""

from __future__ import annotations

import ast
import importlib
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from results_schema import notes_of, ranges

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: the target of a link in Markdown, without its anchor
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
#: what stands in a fenced block is no link
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


# --- the hook


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    from mkdocs.structure.files import File

    there = {file.src_uri: file.content_bytes for file in files}
    pages = {name: write().encode() for name, write in WRITTEN.items()}
    pages["index.md"] = (ROOT / "README.md").read_bytes()
    waiting = [*there.items(), *pages.items()]
    while waiting:  # what a page of the repository links to is added as well
        name, content = waiting.pop()
        for target in _linked(name, content.decode()) if name.endswith(".md") else []:
            place = _place(target)
            if place not in pages and place not in there:
                pages[place] = _content(target)
                waiting.append((place, pages[place]))
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links that leave docs/ lead to the site's own copy."""
    here = page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        target = _target(here, found[2])
        if target is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(_place(target), posixpath.dirname(here))}{found[3]}"

    parts = []
    end = 0
    for block in _FENCED.finditer(markdown):
        parts += [_LINK.sub(rewritten, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(rewritten, markdown[end:])])


def on_post_page(output: str, **_: object) -> str:
    """Let the page load the search's worker from itself, where the theme names another server."""
    script = (ROOT / "scripts" / "search_worker.js").read_text(encoding="utf-8")
    return re.sub(
        r'<script src="https://unpkg\.com/iframe-worker/shim"></script>',
        lambda _: f"<script>{script}</script>",
        output,
    )


def on_post_template(output_content: str, **_: object) -> str:
    """The same for pages that are no documents: 404.html."""
    return on_post_page(output_content)


def _linked(name: str, text: str) -> list[Path]:
    """The files and folders of the repository, outside of docs/, that a page links to."""
    found = (_target(name, each[2]) for each in _LINK.finditer(_FENCED.sub("", text)))
    return [target for target in found if target is not None]


def _target(page: str, link: str) -> Path | None:
    """Where a page's link leads, if that is no page of the site as it stands."""
    if ":" in link or page.startswith("reference/"):
        return None
    source = {"index.md": "README.md"}.get(page, f"docs/{page}")
    if page.startswith("repository/"):
        source = page.removeprefix("repository/")
    path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    in_docs = path.is_relative_to(ROOT / "docs") and source.startswith("docs/")
    return None if in_docs or not path.exists() else path


def _place(path: Path) -> str:
    """Where the site has a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"repository/{name}/index.md" if path.is_dir() else f"repository/{name}"


def _content(path: Path) -> bytes:
    """A file as it is, or a page that lists a folder."""
    if path.is_file():
        return path.read_bytes()
    listed = sorted(each.name for each in path.iterdir() if each.is_file())
    lines = [f"# {path.relative_to(ROOT)}", "", *(f"- [{name}]({name})" for name in listed), ""]
    return "\n".join(lines).encode()


# --- what the code writes


def command_line() -> str:
    """What each verb prints for `--help`."""
    from clusterprof.cli.main import verbs

    lines = ["# Command line", "", *_printed("clusterprof", "--help")]
    for verb in verbs():
        lines += [f"## {verb}", "", *_printed("clusterprof", verb, "--help")]
    return "\n".join(lines)


def _printed(*words: str) -> list[str]:
    environment = {**os.environ, "COLUMNS": "96", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment, check=True, capture_output=True, text=True
    )
    return ["```text", f"$ {' '.join(words)}", done.stdout.rstrip(), "```", ""]


def exit_codes() -> str:
    """The status that each kind of error ends with."""
    from clusterprof import errors

    kinds = {errors.ClusterprofError.exit_code: "clusterprof itself failed."}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.ClusterprofError):
            kinds.setdefault(error.exit_code, (error.__doc__ or "").split("\n")[0])
    lines = [
        "# Exit codes",
        "",
        "A launching verb ends with the job's own status, whatever became of the profile; the",
        "[guide](../guide.md#exit-codes) has what else ends with which status. The errors:",
        "",
        "| code | error |",
        "|---|---|",
        *(f"| {code} | {_cell(text)} |" for code, text in sorted(kinds.items())),
    ]
    return "\n".join([*lines, ""])


def results() -> str:
    """The fields of results.json, from their types."""
    text = "Times are integers in nanoseconds; [the design](../design.md#definitions) defines them."
    schema = "The same as a JSON Schema: [results.schema.json](../results.schema.json)."
    kinds = ["| type | values |", "|---|---|", *(f"| {n} | {_cell(r)} |" for n, r in ranges())]
    return "\n".join(
        ["# results.json", "", text, schema, "", *kinds, "", *_types("clusterprof.results")]
    )


def tables() -> str:
    """The columns of each table under a run's `tables/`, and of the merged ones."""
    import pyarrow as pa

    module = importlib.import_module("clusterprof.tables")
    lines = ["# Tables", "", _cell(module.__doc__ or "", whole=True), ""]
    notes = notes_of(Path(module.__file__ or ""))
    for name, schema in vars(module).items():
        if not isinstance(schema, pa.Schema):
            continue
        lines += [f"## {name.lower()}", "", _cell(notes.get(name, ""), whole=True), ""]
        lines += ["| column | type | |", "|---|---|---|"]
        for column in schema:
            kind = "text" if pa.types.is_dictionary(column.type) else _cell(str(column.type))
            null = "may be null" if column.nullable else ""
            lines.append(f"| `{column.name}` | {kind} | {null} |")
        lines.append("")
    return "\n".join(lines)


def _types(module: str) -> Iterator[str]:
    """Each TypedDict of a module: its docstring, and its fields with the comments above them."""
    path = Path(importlib.import_module(module).__file__ or "")
    text = path.read_text(encoding="utf-8")
    notes = notes_of(path)
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for node in sorted(
        classes, key=lambda each: each.name != "Results"
    ):  # the whole, then its parts
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        yield from [f"## {node.name}", "", _cell(ast.get_docstring(node) or "", whole=True), ""]
        yield from ["| field | type | |", "|---|---|---|"]
        for each in fields:
            name = ast.unparse(each.target)
            note = notes.get(f"{node.name}.{name}", "")
            kind = ast.unparse(each.annotation).replace(" | None", " or null")
            kind = re.sub(r"NotRequired\[(.*)\]", r"\1, may be missing", kind)
            yield f"| `{name}` | {_cell(kind)} | {_cell(note)} |"
        yield ""


def _cell(text: str, *, whole: bool = False) -> str:
    """Text as it stands in a cell of a table, or (`whole`) in a paragraph."""
    return text if whole else " ".join(text.split()).replace("|", "\\|")


#: the pages that the code writes
WRITTEN = {
    "reference/command-line.md": command_line,
    "reference/exit-codes.md": exit_codes,
    "reference/results.md": results,
    "reference/tables.md": tables,
}
