"""A headless Chromium that is asked through a pipe: a page is looked at until it shows what is awaited."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# It reads from 3 and writes to 4. The first copies lie above all others.
START = """
import os, sys
ends = [os.dup2(int(end), 100 + place) for place, end in enumerate(sys.argv[1:3])]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser; `send` and `receive` are the ends of the pipes of `--remote-debugging-pipe`."""

    def __init__(self, send: int, receive: int) -> None:
        self._send = os.fdopen(send, "wb")
        self._receive = os.fdopen(receive, "rb")
        self._number = 0

    def close(self) -> None:
        self._send.close()
        self._receive.close()

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; what is reported meanwhile is passed over."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            text = b""
            while not text.endswith(b"\0"):
                byte = self._receive.read(1)
                assert byte, "the browser has left"
                text += byte
            answer = json.loads(text[:-1])
            if answer.get("id") == self._number:
                return answer.get("result", {})

    def page(self, address: str, shows: str, *, seconds: float = 60) -> str:
        """The page's elements once an element matches the selector `shows`, or after so many seconds."""
        target = self.ask("Target.createTarget", url=address)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        limit = time.monotonic() + seconds
        while True:
            found = self.ask(
                "Runtime.evaluate",
                session,
                expression=f"[!!document.querySelector({shows!r}), document.documentElement.outerHTML]",
                returnByValue=True,
            )
            ready, text = found.get("result", {}).get("value") or (False, "")
            if ready or time.monotonic() > limit:
                return text
            time.sleep(0.05)


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in an empty folder."""
    assert BROWSER is not None
    commands, send = os.pipe()
    receive, answers = os.pipe()
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(commands), str(answers), BROWSER, *options, "about:blank"],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    browser = Browser(send, receive)
    try:
        yield browser
        browser.ask("Browser.close")
        process.wait(20)
    finally:
        browser.close()
        process.kill()
        process.wait()
