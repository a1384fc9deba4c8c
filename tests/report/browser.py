"""Headless Chromium, driven over its debugging pipe: no package and no open port is needed.

The protocol is JSON between zero bytes, on file descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
LIMIT_S = 60.0


def program() -> str:
    """The browser; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium here: install it, on Debian with apt-get install chromium")
    return found


class Tab:
    """One page, with everything that it said and asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], f"the browser did not answer {what}"
            self._rest += os.read(self._read, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, file: Path, drawn: str = "document.documentElement?.dataset.drawn", query: str = "") -> float:
        """Open a file, and wait until its script has drawn; returns the seconds that this took."""
        self.events.clear()
        began = time.monotonic()
        self.call("Page.navigate", url=file.resolve().as_uri() + query)
        # two frames after the script has run, charts are drawn: their sizes come with the first one
        done = (
            f"new Promise(done => {{ const look = () => {drawn} "
            "? requestAnimationFrame(() => requestAnimationFrame(() => done(true))) : setTimeout(look, 10); look() })"
        )
        assert self.value(done) is True
        return time.monotonic() - began

    def value(self, expression: str) -> Any:
        """What an expression evaluates to, in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click on the middle of an element with the mouse."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.value(f"(() => {{ const b = {find}.getBoundingClientRect(); "
                          "return [b.x + b.width / 2, b.y + b.height / 2] })()")  # fmt: skip
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, text: str = "") -> None:
        """Press a key on the keyboard."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text or ("\r" if key == "Enter" else text), **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, file: Path) -> None:
        """A picture of the whole page."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        self.value("1")  # what the browser has said until now has arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself included."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """A page in a browser of its own."""
    command = program()
    to_browser, from_browser = os.pipe(), os.pipe()

    def in_child() -> None:
        # the browser reads 3 and writes 4; first out of the way of these two numbers
        read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={profile}"], preexec_fn=in_child, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
            for descriptor in (*to_browser, *from_browser):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
