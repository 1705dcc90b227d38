"""A page in a headless Chromium, asked over the DevTools protocol: what it requested, logged and drew.

`python -m tests.orchestrator.report.browser REPORT FOLDER` takes screenshots at both widths, light and dark.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (path := shutil.which(name))
    ),
    None,
)
WIDTHS = (390, 1440)
_STARTS_S, _DRAWS_S = 120, 120
# Without the last ones Chromium looks for its maker's hosts by itself.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--remote-debugging-port=0", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@dataclass
class Page:
    """A page that is open."""

    socket: aiohttp.ClientWebSocketResponse
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # exceptions, and what the console calls an error
    loads: int = 0
    _asked: int = 0

    async def ask(self, method: str, **params: Any) -> Any:
        """Return the answer to a command; what happens meanwhile is noted."""
        self._asked += 1
        await self.socket.send_json({"id": self._asked, "method": method, "params": params})
        while True:
            message = await self.socket.receive_json(timeout=_DRAWS_S)
            if message.get("id") == self._asked:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    async def open(self, file: Path, *, width: int, dark: bool = False, scripts: bool = True) -> None:
        """Open a file at a width; returns when its charts are drawn."""
        self.requests.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.ask(f"{domain}.enable")
        await self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])
        before = self.loads
        await self.ask("Page.navigate", url=file.resolve().as_uri())
        while self.loads == before:
            message = await self.socket.receive_json(timeout=_DRAWS_S)
            self._note(message.get("method", ""), message.get("params", {}))

    async def value(self, expression: str) -> Any:
        """Return what an expression gives in the page."""
        answer = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def picture(self, to: Path) -> None:
        """Write a picture of the whole page."""
        size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        shot = await self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(shot["data"]))

    async def paper(self) -> bytes:
        """Return the page as it prints."""
        return base64.b64decode((await self.ask("Page.printToPDF", printBackground=True))["data"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loads += 1


@contextlib.asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """Start a Chromium of our own and return a page of it; it is gone afterwards."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={home}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"HOME": home},
        )
        try:
            port = await asyncio.wait_for(asyncio.to_thread(_port, process), _STARTS_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = [t for t in await answer.json() if t["type"] == "page"]
                url = targets[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[bytes]) -> int:
    assert process.stderr is not None
    received = b""
    for line in process.stderr:
        received += line
        results = re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
        if results:
            return int(results[1])
    raise AssertionError(f"Chromium did not start: {received[-2000:]!r}")


async def _pictures(report: Path, folder: Path) -> None:
    async with page() as opened:
        for width in WIDTHS:
            for dark in (False, True):
                await opened.open(report, width=width, dark=dark)
                await opened.picture(folder / f"{report.stem}-{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    asyncio.run(_pictures(Path(sys.argv[1]), Path(sys.argv[2])))
