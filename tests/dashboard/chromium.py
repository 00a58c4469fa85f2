"""A headless chromium, driven by its DevTools protocol over a pipe: no package is needed for it."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in _NAMES if (found := shutil.which(name))), None)
_PATIENCE_S = 60.0


class Chromium:
    """One browser with a profile of its own; `page` opens tabs."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="lp-pipe-chromium-")
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        # Chromium reads commands from descriptor 3 and writes replies to descriptor 4.
        script = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        command = ["bash", "-c", script, PROGRAM, *flags, f"--user-data-dir={self._folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        self._out, self._in = os.fdopen(to_it, "wb", buffering=0), os.fdopen(from_it, "rb")
        self._numbers = itertools.count(1)
        self._replies: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.errors: list[str] = []
        self.pages: list[Page] = []
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        said = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._out.write(json.dumps(said).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._replies, _PATIENCE_S), f"no reply to {method}"
            reply = self._replies.pop(number)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        return reply["result"]

    def page(self, url: str, width: int = 1280, height: int = 800, *, is_dark: bool = False) -> "Page":
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        self.pages.append(page)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        page.ask("Emulation.setEmulatedMedia", features=scheme)
        page.open(url)
        return page

    def close_pages(self) -> None:
        for page in self.pages:
            self.ask("Target.closeTarget", targetId=page.target)
        self.pages.clear()

    def close(self) -> None:
        try:
            self.ask("Browser.close")
        except (AssertionError, OSError):
            self.process.kill()
        self.process.wait(20)
        self._out.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in.fileno(), 1 << 20):
            *whole, rest = (rest + data).split(b"\0")
            for one in whole:
                found = json.loads(one)
                if "id" in found:
                    with self._changed:
                        self._replies[found["id"]] = found
                        self._changed.notify_all()
                elif found["method"] == "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(found["params"]["exceptionDetails"])[:2000])
                elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                    self.errors.append(json.dumps(found["params"]["entry"])[:2000])


class Page:
    """A tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self.target = target

    def ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, **params)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def js(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def wait(self, expression: str, patience_s: float = 10.0) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + patience_s
        while not self.js(f"!!({expression})"):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true: {expression}\n{self.js('document.body.innerText')[:2000]}")
            time.sleep(0.02)

    def ready(self, page: str, patience_s: float = 10.0) -> None:
        """Wait until a page is drawn."""
        self.wait(f"document.body?.dataset.ready === {json.dumps(page)}", patience_s)

    def go(self, page: str, patience_s: float = 10.0) -> None:
        self.js(f"document.querySelector('nav a[data-page={page}]').click()")
        self.ready(page, patience_s)

    def set_hidden(self, is_hidden: bool) -> None:
        """Tell the page that it is hidden or shown: a headless browser shows all of its tabs."""
        self.js(
            f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {json.dumps(is_hidden)}}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    def screenshot(self, path: Path) -> None:
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(found["data"]))
