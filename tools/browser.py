"""A headless Chromium that is spoken to through its debugging pipe; needs nothing but the browser.

Used by the tests of the HTML report and by ``tools/pictures.py``. It is never needed by pediag itself.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
"""Seconds that one answer may take."""


def found() -> str | None:
    """The browser's program: what ``PEDIAG_CHROMIUM`` names, else the first on the path; None where there is none."""
    named = os.environ.get("PEDIAG_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless Chromium. ``complaints`` are the errors and warnings on its console."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write)]

        def connected() -> None:
            """The browser reads from descriptor 3 and writes to 4."""
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [program, *self._flags()],
            pass_fds=(3, 4),
            preexec_fn=connected,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read, write, *theirs):
            os.close(end)
        self._numbers, self._rest = itertools.count(1), b""
        self._events: list[str] = []
        self._session = ""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _flags(self) -> list[str]:
        return [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            f"--user-data-dir={self._folder.name}",
        ]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the Chrome DevTools Protocol. Raises RuntimeError for an error."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def open(
        self, path: Path, fragment: str = "", *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Load a file in a window of this size, in CSS pixels, and wait until it has loaded."""
        self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self._wait("Page.loadEventFired")
        self.complaints.clear()
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self._wait("Page.loadEventFired")

    def resize(self, width: int, height: int = 900, ratio: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and how many pixels of a picture one of these has."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=width < 500,
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, of plain values."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the ``whole`` page, as PNG."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def pdf(self, path: Path) -> None:
        """Write the page as it is printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _wait(self, event: str) -> None:
        until = time.monotonic() + PATIENCE
        while event not in self._events:
            self._note(self._next(until))
        self._events.clear()

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(said["entry"]))
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
            ("file:", "about:")
        ):
            self.complaints.append(f"asked for {said['request']['url']}")

    def _next(self, until: float | None = None) -> dict[str, Any]:
        until = until if until is not None else time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))
