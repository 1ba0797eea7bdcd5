"""A merged run in each of its forms, from what merging wrote."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import report_sample

import clusterprof
from clusterprof import gate, merge_run
from clusterprof.cli import main
from clusterprof.report import html, results_json, text
from clusterprof.report.anonymous import anonymous, anonymous_job, host_names
from clusterprof.report.whole_job import Job
from clusterprof.tables import SPANS, read_table

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "tests" / "data" / "recordings" / "kineto" / "gloo"


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a merge's --output."""
    folder = tmp_path_factory.mktemp("merged") / "out"
    assert main.main(["merge", str(RECORDING), "-o", str(folder)]) == 0
    return folder


def test_the_page_again_is_that_of_the_merge(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main.main(["report", str(merged), "--html", "-o", str(page)]) == 0
    assert page.read_bytes() == (merged / "report.html").read_bytes()
    assert str(page) in capsys.readouterr().err
    assert main.main(["report", str(merged), "--html"]) == 0
    assert capsys.readouterr().out == page.read_text()


@pytest.mark.parametrize("form", ["--html", "--markdown", "--csv", "--json"])
def test_force_replaces_what_it_wrote_and_nothing_else(
    merged: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    line = ["report", str(merged), form, "-o", str(target)]
    assert main.main(line) == 0
    first = target.read_bytes()
    assert main.main(line) == 2
    assert "--force" in capsys.readouterr().err
    assert main.main([*line, "--force"]) == 0
    assert target.read_bytes() == first
    target.write_text("mine")
    assert main.main([*line, "--force"]) == 2
    assert target.read_text() == "mine"


def test_csv_has_the_accounts_as_they_are(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_json.read(merged / "merged" / "results.json")
    assert main.main(["report", str(merged), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == sum(len(step["ranks"]) for step in results["steps"])
    for row in rows:
        (step,) = (each for each in results["steps"] if each["step"] == int(row["step"]))
        (account,) = (each for each in step["ranks"] if each["rank"] == int(row["rank"]))
        assert {name: int(row[name]) for name in account} == account
        assert row["steady_state"] == str(int(step["settled"]))


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a"])
def test_no_name_is_a_formula(name: str) -> None:
    page = text.accounts_csv(report_sample.results(host=name))
    hosts = {row["host"] for row in csv.DictReader(io.StringIO(page))}
    assert f"'{name}" in hosts
    assert name not in hosts


def test_markdown_says_the_verdict_and_each_finding_with_its_command() -> None:
    results = report_sample.results()
    page = text.markdown(results)
    assert page.splitlines()[0] == text.MARKDOWN_MARK
    assert page.splitlines()[1].startswith("**Rank 2")
    for finding in results["findings"]:
        code = text.escaped(finding["code"])
        assert f"| {code} | {finding['severity']} |" in page
        assert finding["next"] in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {7, 8}
    assert len(re.findall("^```", page, re.MULTILINE)) % 2 == 0


@pytest.mark.parametrize(
    ("command", "blanks"),
    [
        ("clusterprof run --ranks 2 -- a.py --lr <value>", ["&lt;value&gt;"]),
        ("clusterprof srun --ranks 2 ... -- PROGRAM...", ["...", "PROGRAM..."]),
        ("clusterprof run --ranks 2 -- a.py", []),
    ],
)
def test_the_page_names_what_to_fill_in_where_a_copied_command_does_not_run(
    command: str, blanks: list[str]
) -> None:
    results = report_sample.results()
    for finding in results["findings"]:
        finding["next"] = command
    page = html.render(results, report_sample.collectives(), title="x")
    named = ", ".join(f"<code>{blank}</code>" for blank in blanks)
    assert (f"<dt>to fill in first</dt><dd>{named}</dd>" in page) is bool(blanks)
    assert ("to fill in first" in page) is bool(blanks)


def test_every_form_says_what_a_repair_saves_alone_where_that_differs(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = report_sample.results()
    results["findings"][1]["saved_alone_ns"] = 13_450_000
    run = shutil.copytree(merged, tmp_path / "run")
    results_json.write(run / "merged" / "results.json", results)
    gate.fails(gate.parse("warning"), results["findings"][1:])
    forms = {
        "terminal": text.render(results, width=200),
        "markdown": text.markdown(results),
        "page": html.render(results, report_sample.collectives(), title="x"),
        "gate": capsys.readouterr().err,
        "notebook": clusterprof.load(run)._repr_html_(),
    }
    assert [name for name, written in forms.items() if "13.4 ms alone" not in written] == []


def test_a_wait_that_the_clocks_may_make_up_is_no_number_in_markdown_either() -> None:
    results = report_sample.results()
    for clock in results["clock"]["ranks"]:
        clock["uncertainty_ns"] = 30_000_000
    cells = [line.split("|")[5].strip() for line in text.markdown(results).splitlines()
             if re.match(r"\| \d", line)]  # fmt: skip
    assert len(cells) == 4
    assert all(cell.startswith("\\<") for cell in cells if not cell.startswith("0"))
    assert any(cell.startswith("\\<") for cell in cells)


def test_no_name_of_a_report_is_markdown() -> None:
    hostile = "</details><script>|`x`@team [a](http://b) ![i](c)"
    results = report_sample.results(host=hostile, operation=hostile)
    results["warnings"] = [hostile]
    results["findings"][0] |= {"summary": hostile, "next": f"clusterprof -- ```\n{hostile}"}
    page = text.markdown(results)
    around = re.sub(r"(?ms)^(`{3,})sh\n.*?^\1$", "", page).replace("<details><summary>", "")
    around = around.replace("</summary>", "").replace("</details>", "", 1)
    for part in ("</details>", "<script>", "[a](", "@team"):
        assert not re.search(rf"(?<!\\){re.escape(part)}", around), part
    assert "<script>" in page  # in the command, which is code


def test_what_was_not_merged_or_lacks_a_table_says_so(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["report", str(tmp_path), "--markdown"]) == 3
    assert "clusterprof merge" in capsys.readouterr().err
    (tmp_path / "merged").mkdir()
    source = merged / "merged" / "results.json"
    (tmp_path / "merged" / "results.json").write_bytes(source.read_bytes())
    assert main.main(["report", str(tmp_path), "--html"]) == 3
    assert "collectives.parquet" in capsys.readouterr().err


def test_what_is_shared_names_no_host_path_or_argument(capsys: pytest.CaptureFixture[str]) -> None:
    results = report_sample.results(host="gpu-07.example.org")
    secrets = ["gpu-07", "example.org", "/home/me", "train.py", "my-account", "/data", "me/x"]
    results["warnings"] = ["gpu-07: /home/me/x.sqlite cannot be read", "see me/x/y.log on gpu-07"]
    results["ranks"][0]["source"] = "/home/me/run/a.nsys-rep"
    results["findings"][0] |= {
        "summary": "Rank 2 on gpu-07.example.org is late. It reads /data/corpus.",
        "next": "clusterprof srun --steps=5:9 --ranks 2,0 --profiler nsys -A my-account "
        "-- python train.py --data /data/corpus",
    }
    public = anonymous(results)
    page = results_json.dumps(public).decode() + text.markdown(public) + text.accounts_csv(public)
    assert [each for each in secrets if each in page] == []
    assert "host-1" in page
    assert public["findings"][0]["next"] == (
        "clusterprof srun --steps=5:9 --ranks 2,0 --profiler nsys ... -- PROGRAM..."
    )
    assert public["findings"][0]["summary"] == "Rank 2 on host-1 is late. It reads PATH."
    # and all else is as it was
    assert public["steps"] == results["steps"]
    assert public["verdict"] == results["verdict"]


def test_names_that_only_look_like_a_host_stay() -> None:
    results = report_sample.results(host="a")
    results["warnings"] = ["a rank, a-b and 4.5 GB/s of 50.0 GB/s"]
    assert anonymous(results)["warnings"] == ["host-1 rank, a-b and 4.5 GB/s of 50.0 GB/s"]


SECRETS = ("gpu-07", "gpu-08", "example.org", "/home", "train.py", "my-account", "corpus")


def test_the_page_and_what_it_embeds_name_no_host_path_or_argument(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "gpu-07-my-account"
    shutil.copytree(merged, run)
    results = results_json.read(run / "merged" / "results.json")
    for entry in results["ranks"]:
        entry |= {"host": f"gpu-0{7 + entry['rank'] % 2}", "source": "/home/a.json"}
    results["warnings"] = ["/home/me/a.json on gpu-08.example.org is short"]
    for finding in results["findings"]:
        finding["next"] = "clusterprof run --steps=5:9 -A my-account -- python train.py --x corpus"
    (run / "merged" / "results.json").write_bytes(results_json.dumps(results))
    spans = read_table(run / "merged" / "lanes.parquet", SPANS)
    names = pa.array([f"read /home/me/corpus on gpu-0{7 + at % 2}" for at in range(len(spans))])
    planted = spans.set_column(spans.schema.get_field_index("name"), "name", names)
    merge_run.write_table(planted.cast(SPANS), run / "merged" / "lanes.parquet")

    def page(*options: str) -> str:
        """The page with what it has packed in it."""
        assert main.main(["report", str(run), "--html", *options]) == 0
        text = capsys.readouterr().out
        (packed,) = re.findall(r'"gzip":"([^"]+)"', text)
        return text + gzip.decompress(base64.b64decode(packed)).decode()

    assert [each for each in SECRETS if each not in page()] == []
    public = page("--anonymous")
    assert [each for each in SECRETS if each in public] == []
    assert "read PATH on host-1" in public
    assert "read PATH on host-2" in public


def test_of_a_whole_job_no_host_and_no_command_is_shared() -> None:
    results = report_sample.results(host="gpu-07.example.org")
    job = Job(
        hosts={0: "gpu-07", 9: "gpu-08"},
        command="srun -A my-account python train.py --data corpus",
        launcher="srun",
    )
    names = host_names(results, job.hosts.values())
    public = anonymous_job(job, names)
    assert public.hosts == {0: names["gpu-07"], 9: names["gpu-08"]}
    assert len({*public.hosts.values()} | {"host-1"}) == 2
    assert (public.command, public.launcher) == ("", "srun")
    assert "host-1" in str(anonymous(results, names))
