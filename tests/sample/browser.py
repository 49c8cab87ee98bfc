"""A headless Chromium driven over its DevTools pipe: nothing to install but the browser."""

from __future__ import annotations

import atexit
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def executable() -> str:
    """The path of a Chromium; RuntimeError with what to install when there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(
        f"no browser found on PATH (looked for {', '.join(NAMES)}): install Chromium, "
        f"for example with 'apt-get install chromium'."
    )


class Chromium:
    """The browser of this process. It starts with the first page; `end` ends it."""

    running: ClassVar[Chromium | None] = None

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="outbox-chromium-", ignore_cleanup_errors=True)
        self._ids = 0
        self._buffer = b""
        self._process, self._commands, self._answers = _start(self._profile.name)

    @classmethod
    def get(cls) -> Chromium:
        """The running browser, or a new one."""
        if cls.running is None or cls.running._process.poll() is not None:
            cls.end()
            cls.running = cls()
        return cls.running

    @classmethod
    def end(cls) -> None:
        """End the browser, if one was started."""
        browser, cls.running = cls.running, None
        if browser is not None:
            os.close(browser._commands)
            os.close(browser._answers)
            browser._process.terminate()
            browser._process.wait(10)
            browser._profile.cleanup()

    def call(self, method: str, parameters: dict[str, Any], session: str | None, timeout: float) -> dict[str, Any]:
        """The result of a method of the DevTools protocol: of a page's session, or of the browser."""
        self._ids += 1
        command: dict[str, Any] = {"id": self._ids, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            if not self._has_answer(deadline):
                # Its late answer would be read by the next page.
                self.end()
                raise AssertionError(f"the browser did not answer {method} within {timeout} s")
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._ids:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _has_answer(self, deadline: float) -> bool:
        """Read until the buffer holds a message; False when time is up."""
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise AssertionError("the browser ended")
            self._buffer += data
        return True


atexit.register(Chromium.end)


class Browser:
    """One page with a profile of its own: no cookie, cache or storage of another page. A context manager closes it."""

    def __init__(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True, timeout: float = 20.0
    ) -> None:
        self._timeout = timeout
        self._chromium = Chromium.get()
        self._session: str | None = None
        self._marks = 0
        self._context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def goto(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        answer = self._call("Page.navigate", url=url)
        if "errorText" in answer:
            raise AssertionError(f"{url}: {answer['errorText']}")
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until a JavaScript expression is truthy and return it."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                value = self.evaluate(expression)
            except AssertionError:
                # The page is being replaced; its next one is asked.
                value = None
            if value:
                return value
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"not within {self._timeout} s: {expression}\nthe page says:\n{text}")
            select.select([], [], [], 0.03)

    def click(self, selector: str) -> None:
        """Click the first element that matches, and wait for the page that follows when it is a form's button."""
        self._marks += 1
        mark = f"left-{self._marks}"
        self.evaluate(f"document.documentElement.id = {mark!r}")
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e?.click(); return e !== null }})()"
        )
        assert found, f"nothing on the page matches {selector!r}"
        self.wait_for(f"document.documentElement.id !== {mark!r} && document.readyState === 'complete'")

    def text(self, selector: str = "body") -> str:
        """The visible text of an element."""
        return str(self.evaluate(f"document.querySelector({selector!r}).innerText"))

    def screenshot(self, path: Path) -> None:
        """Store a picture of the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The other methods of the DevTools protocol."""
        return self._call(method, **parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        if Chromium.running is self._chromium:
            self._call("Target.disposeBrowserContext", browserContextId=self._context)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._chromium.call(method, parameters, self._session, self._timeout)


def _start(profile: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start the browser with its commands on descriptor 3 and its answers on 4, as it expects them."""
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()

    def arrange() -> None:
        commands, answers = os.dup(command_in), os.dup(answer_out)
        high = [os.dup(commands), os.dup(answers)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=arrange,
        pass_fds=(3, 4),
    )
    os.close(command_in)
    os.close(answer_out)
    return process, command_out, answer_in
