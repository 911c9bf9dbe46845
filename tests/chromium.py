"""Headless Chromium, driven through its own protocol: what a page logs, asks the network for, shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0
# The protocol goes through file descriptors 3 and 4 of the browser.
_START = 'exec "$@" 3<&{} 4>&{}'
# Not used over file:, but the browser itself would like to know whether it is up to date.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe"),
)


class Browser:
    """A browser process and a connection to it; pages are opened one after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", _START.format(theirs_in, theirs_out), "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        for theirs in (theirs_in, theirs_out):
            os.close(theirs)
        self._out, self._in, self._read = ours_out, ours_in, b""
        self._n_sent, self.events = 0, []

    def send(self, method, session=None, **arguments):
        """Send a command of the protocol and return its result; events that come before it are kept."""
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": arguments}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._n_sent:
                break
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _next(self):
        while b"\0" not in self._read:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError(f"{CHROMIUM} has ended")
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, path, *, width=1200, height=900, scheme="light"):
        """Return a new page with a file loaded."""
        return Page(self, Path(path), width, height, scheme)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        for ours in (self._out, self._in):
            os.close(ours)
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """A loaded page."""

    def __init__(self, browser, path, width, height, scheme) -> None:
        self._browser = browser
        self._target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.url = path.resolve().as_uri()
        self.send("Page.navigate", url=self.url)
        deadline = time.monotonic() + DEADLINE_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def send(self, method, **arguments):
        return self._browser.send(method, self._session, **arguments)

    def _events(self):
        self.run("0")  # what has happened before this has come
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def complaints(self):
        """Return what the page has logged, thrown or been refused."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self._events() if event["method"] in kinds]

    def requests(self):
        """Return all addresses that the page has asked for, the page's own among them."""
        asked = [e["params"]["request"]["url"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return asked + [e["params"]["url"] for e in self._events() if e["method"] == "Network.webSocketCreated"]

    def run(self, script):
        """Return what an expression of the page's own language is, as JSON has it."""
        message = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in message:
            raise RuntimeError(message["exceptionDetails"])
        return message["result"].get("value")

    def press(self, key, times=1):
        """Press a key, as its name in KeyboardEvent.key is."""
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}[key]
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def write(self, text):
        """Write text where the focus is."""
        self.send("Input.insertText", text=text)

    def close(self):
        self._browser.send("Target.closeTarget", targetId=self._target)
