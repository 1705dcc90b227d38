"""A webhook on this machine that keeps what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What arrived, and the answers that are given: status codes in turn, the last one for ever."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes) or [200]
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.held = threading.Event()  # an answer waits for it
        self.held.set()
        self.url = ""


@contextmanager
def receiver(*codes: int) -> Iterator[Receiver]:
    """Return a receiver that listens while the block runs."""
    kept = Receiver(*codes)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.paths.append(self.path)
            kept.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            kept.held.wait(30)
            code = kept.codes.pop(0) if len(kept.codes) > 1 else kept.codes[0]
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/hook/of-mine"
    try:
        yield kept
    finally:
        kept.held.set()
        server.shutdown()
        server.server_close()
