"""A page of runs, served to this machine alone.

The server listens on 127.0.0.1, every address holds a random token, and the ``Host`` header must name this
server. The last keeps out pages of other sites whose names are made to lead here (DNS rebinding). It answers
GET and HEAD, and changes nothing. Names in requests only choose among checkpoints that were found.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from everystep.errors import CheckpointNotFound, EverystepError
from everystep.view.budget import Budget
from everystep.view.html_page import embedded_json
from everystep.view.run_reader import RunReader
from everystep.view.timeline import MAX_SAVES
from everystep.view.web_page import ShownRun, page_text

HOST = "127.0.0.1"
_SAMPLE_SECONDS = 2.0
_CHANGE_SECONDS = 8.0
_MAX_PLACES = 400
_LEAST_POLL_SECONDS = 1.5
_THINNED_POLL_SECONDS = 15.0
"""A log that is too long to be drawn whole is sent as a whole each time."""
_POLL_SHARE = 20
"""Reading a long log again takes at most a twentieth of the time."""


class PageServer:
    """Serves until `close`. `url` is the whole address, with the token.

    >>> import everystep, tempfile
    >>> run = tempfile.mkdtemp()
    >>> with everystep.Checkpointer(run, {"epoch": 1}, mode="sync") as ckpt:
    ...     _ = ckpt.save(1)
    >>> with everystep.view.serve_page([run]) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, readers: Sequence[RunReader], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._server = _Server((HOST, port), tuple(readers), self.token)
        self.port = self._server.server_port
        self.url = f"http://{HOST}:{self.port}/{self.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="everystep-view",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the server is closed, or for Ctrl-C."""
        self._thread.join()

    def close(self) -> None:
        """Stops serving and frees the port. Answers that have begun may still be sent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], readers: tuple[RunReader, ...], token: str) -> None:
        super().__init__(address, _Handler)
        self.readers = readers
        self.token = token
        # Arrays are read for one request at a time.
        self.reading = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that closes a connection is not an error, and a terminal should not show tracebacks."""


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    # One answer per connection: kept open, it would be served after `close`.
    protocol_version = "HTTP/1.0"
    server_version = "everystep"
    sys_version = ""
    timeout = 60  # for a silent connection

    def do_GET(self) -> None:
        try:
            kind, body = self._answer()
            status = HTTPStatus.OK
        except _Refused as error:
            kind, body, status = "application/json", _told(error), error.status
        except CheckpointNotFound as error:
            kind, body, status = "application/json", _told(error), HTTPStatus.GONE
        except (EverystepError, OSError) as error:
            kind, body, status = "application/json", _told(error), HTTPStatus.UNPROCESSABLE_ENTITY
        except Exception as error:  # a defect: the page shows it
            told = RuntimeError(f"this is a defect of everystep: {type(error).__name__}: {error}")
            kind, body, status = "application/json", _told(told), HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(status, kind, body)

    do_HEAD = do_GET

    def _answer(self) -> tuple[str, str]:
        if self.headers.get("Host") not in self._names():
            raise _Refused(HTTPStatus.FORBIDDEN, "this server has another name")
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"not an address: {error}") from None
        given, _, rest = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, "open the whole address that `everystep view` printed")
        if not rest:
            views = [ShownRun(reader.view()) for reader in self.server.readers]
            return "text/html; charset=utf-8", page_text(views, served=True)
        return "application/json", self._data(rest.split("/"), parse_qs(address.query))

    def _data(self, parts: list[str], query: dict[str, list[str]]) -> str:
        if len(parts) != 3 or parts[0] != "runs":
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        number, what = parts[1:]
        readers = self.server.readers
        if not (number.isascii() and number.isdigit() and len(number) < 6 and int(number) < len(readers)):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such run")
        reader, given = readers[int(number)], {name: found[-1] for name, found in query.items()}
        answers: dict[str, Callable[[RunReader, dict[str, str]], object]] = {
            "view": _view,
            "contents": _contents,
            "samples": _samples,
            "changes": _changes,
        }
        if what not in answers:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        try:
            if what in ("samples", "changes"):
                with self.server.reading:
                    return embedded_json(answers[what](reader, given))
            return embedded_json(answers[what](reader, given))
        except (KeyError, ValueError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"not understood: {error}") from None

    def _names(self) -> tuple[str, ...]:
        port = self.server.server_port
        return f"{HOST}:{port}", f"localhost:{port}"

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests hold the token, so they are not printed."""


def _view(reader: RunReader, given: dict[str, str]) -> object:
    began = time.perf_counter()
    origin = float(given["origin"]) if given.get("origin") else None
    found = reader.view(origin=origin, first_event=int(given.get("first_event", "0")))
    took = time.perf_counter() - began
    thinned = found.timeline.all_saves > MAX_SAVES
    least = _THINNED_POLL_SECONDS if thinned else _LEAST_POLL_SECONDS
    return {"view": found, "poll_seconds": max(least, _POLL_SHARE * took)}


def _contents(reader: RunReader, given: dict[str, str]) -> object:
    return reader.contents(given["name"])


def _samples(reader: RunReader, given: dict[str, str]) -> object:
    places = [int(place) for place in given["places"].split(",")[:_MAX_PLACES]]
    found = reader.samples(given["name"], places, budget=Budget(_SAMPLE_SECONDS))
    return {str(place): sample for place, sample in found.items()}


def _changes(reader: RunReader, given: dict[str, str]) -> object:
    return reader.changes(given["a"], given["b"], budget=Budget(_CHANGE_SECONDS))


def _told(error: Exception) -> str:
    return embedded_json({"error": str(error)})
