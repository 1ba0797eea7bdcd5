"""The page over HTTP: on the loopback, at its secret address, and nothing else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.cli import main, view


@pytest.fixture
def page(tmp_path: Path) -> Path:
    found = tmp_path / "run" / "report.html"
    found.parent.mkdir()
    found.write_text("<!doctype html>the page")
    return found


@pytest.fixture
def server(page: Path) -> Iterator[view.Server]:
    made = view.Server(page)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def asked(
    server: view.Server, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    response = connection.getresponse()
    found = response.status, response.read().decode(), response.headers
    connection.close()
    return found


def test_the_page_is_at_its_address_and_says_it_to_no_other_site(
    server: view.Server, page: Path
) -> None:
    status, body, headers = asked(server, f"/{server.secret}/")
    assert (status, body) == (200, page.read_text())
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert asked(server, f"/{server.secret}")[0] == 200
    assert asked(server, f"/{server.secret}/", "HEAD")[:2] == (200, "")
    assert asked(server, f"/{server.secret}/", host="localhost:1")[0] == 200


@pytest.mark.parametrize("path", ["/", "/report.html", "/x/", "/../run/report.html", "/%2e%2e/"])
def test_nothing_else_is_served(server: view.Server, path: str) -> None:
    assert asked(server, path)[0] == 404
    assert asked(server, path.rstrip("/") + "/" + server.secret[:-1] + "/")[0] == 404
    assert asked(server, f"/{server.secret}/", "POST")[0] == 501


def test_by_another_name_there_is_nothing(server: view.Server) -> None:
    assert asked(server, f"/{server.secret}/", host="evil.example:80")[0] == 404


def test_a_page_that_is_gone_is_gone(server: view.Server, page: Path) -> None:
    page.unlink()
    assert asked(server, f"/{server.secret}/")[0] == 410


def test_it_listens_on_the_loopback_alone_and_each_time_at_another_address(page: Path) -> None:
    with view.Server(page) as one, view.Server(page) as other:
        assert one.server_address[0] == "127.0.0.1"
        assert len(one.secret) >= 32
        assert one.secret != other.secret
        with pytest.raises(OSError):
            view.Server(page, one.server_address[1])


def test_over_ssh_the_address_and_the_command_that_forwards_it_are_printed(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 1 192.0.2.2 22")
    monkeypatch.setattr(view.Server, "serve_forever", interrupted)
    assert main.main(["view", str(page.parent)]) == 0
    out, err = capsys.readouterr()
    port = out.split(":")[2].split("/")[0]
    assert out.startswith("http://127.0.0.1:")
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in err
    assert out.strip().rpartition("/")[0].rpartition("/")[2] not in err


def test_where_there_is_a_screen_the_browser_opens_the_file(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert main.main(["view", str(page.parent)]) == 0
    assert opened == [page.as_uri()]


def test_what_cannot_be_viewed_says_so(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["view", str(tmp_path)]) == 3
    assert "clusterprof merge" in capsys.readouterr().err
    assert main.main(["view", str(page.parent), "--port", "70000"]) == 2
