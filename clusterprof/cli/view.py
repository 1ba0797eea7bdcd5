"""`clusterprof view RUN`: the page of a merged run, in a browser here or on another machine."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from clusterprof.agent.contracts import files
from clusterprof.cli import Parser, verb_parser
from clusterprof.console import say
from clusterprof.errors import ReportError, UsageError
from clusterprof.run_directory import Window

#: The page loads nothing from anywhere; no other site may show it in a frame, or learn its address.
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Open the page of a merged run in the browser. Over SSH, or with --serve, serve it "
        "on the loopback at an address that cannot be guessed, until Ctrl-C, and print the ssh "
        "command that forwards it.",
        "view runs/...",
        "view runs/... --serve --port 8080",
        run="a run directory, or merge's --output",
    )  # fmt: skip
    add = parser.add_argument
    add("--serve", action="store_true", help="serve it, also where a browser is")
    add("--port", type=int, default=0, metavar="N", help="default: one that is free")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Open the page, or serve it until Ctrl-C."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port} is no port", "leave it out: one that is free")
    page = Window.at(arguments.run.absolute()).html
    if not arguments.run.exists():
        raise ReportError(f"{arguments.run} does not exist", "check the path")
    if not page.is_file():
        raise ReportError(
            f"{arguments.run} has no page: it was not merged",
            f"merge it: clusterprof merge {arguments.run}",
        )
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    is_seen = has_screen and "SSH_CONNECTION" not in os.environ
    if is_seen and not (arguments.serve or arguments.port) and webbrowser.open(page.as_uri()):
        say(f"opened {page}")
    else:
        serve(page, arguments.port)
    return 0


def serve(page: Path, port: int) -> None:
    """Serve the page until Ctrl-C, and say how to see it. Raises UsageError."""
    try:
        server = Server(page, port)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used: {error.strerror or error}",
            "leave --port out: one that is free",
        ) from None
    with server:
        port = server.server_address[1]
        print(f"http://127.0.0.1:{port}/{server.secret}/", flush=True)
        me = f"{os.environ.get('USER', 'USER')}@{socket.gethostname()}"
        say("to see it from your own machine, run there, and open the address above:",
            f"ssh -N -L {port}:127.0.0.1:{port} {me}")  # fmt: skip
        say("Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class Server(ThreadingHTTPServer):
    """One page on the loopback, at an address with a secret, which other users do not know."""

    daemon_threads = True

    def __init__(self, page: Path, port: int = 0) -> None:
        """Raises OSError where the port cannot be used."""
        self.page = page
        self.secret = secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Request)


class _Request(BaseHTTPRequestHandler):
    """GET and HEAD of the page at its address; nothing else is there."""

    server: Server
    server_version, sys_version = "clusterprof", ""
    #: s, for a client that asks for nothing
    timeout = 10

    def do_GET(self) -> None:
        """The page; of a HEAD its headers."""
        # By another name a page elsewhere could reach us (DNS rebinding).
        host = self.headers.get("Host", "").rpartition(":")[0]
        path = self.path.partition("?")[0].strip("/")
        has_secret = hmac.compare_digest(path.encode(), self.server.secret.encode())
        if not has_secret or host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = files.content(self.server.page, 1 << 30)  # of a thousand ranks it has millions
        except OSError:
            self.send_error(HTTPStatus.GONE)
            return
        self.send_response(HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - as http.server asks for it

    def log_message(self, *_: object) -> None:
        """The address is a secret: it stands in no log."""
