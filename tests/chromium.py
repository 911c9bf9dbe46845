"""Headless Chromium, driven through its own protocol: what a page logs, asks the network for, shows."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0
# Not used over file:, but the browser itself would like to know whether there are newer versions and the like.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


class Browser:
    """A browser process and a connection to it; pages are opened one after the other."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="chromium-"))
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self._connect())

    def call(self, doing):
        """Do something in the connection's loop, and return what comes of it."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(DEADLINE_S)

    async def _connect(self) -> None:
        self._ids, self._answers, self.events = 0, {}, []
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(await self._address(), max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())

    async def _address(self) -> str:
        file, deadline = self._folder / "DevToolsActivePort", time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                port, path = file.read_text().split()
                return f"ws://127.0.0.1:{port}{path}"
            if self._process.poll() is not None:
                raise RuntimeError(f"{CHROMIUM} ended with {self._process.returncode}")
            await asyncio.sleep(0.05)
        raise TimeoutError("the browser does not say where it listens")

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self.events.append(said)

    async def _send(self, method, session, arguments):
        self._ids += 1
        answer = self._answers[self._ids] = self._loop.create_future()
        message = {"id": self._ids, "method": method, "params": arguments}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        said = await asyncio.wait_for(answer, DEADLINE_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    def send(self, method, session=None, **arguments):
        """Send a command of the protocol and return its result."""
        return self.call(self._send(method, session, arguments))

    def open(self, path, *, width=1200, height=900, scheme="light"):
        """Return a new page with a file loaded."""
        return Page(self, Path(path), width, height, scheme)

    def close(self) -> None:
        async def leave() -> None:
            await self._socket.close()
            await self._http.close()
            await self._reader

        with suppress(Exception):
            self.send("Browser.close")
        with suppress(Exception):
            self.call(leave())
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
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
        self._wait_for("Page.loadEventFired")

    def send(self, method, **arguments):
        return self._browser.send(method, self._session, **arguments)

    def _events(self):
        return [event for event in list(self._browser.events) if event.get("sessionId") == self._session]

    def _wait_for(self, method):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if any(event["method"] == method for event in self._events()):
                return
            time.sleep(0.02)
        raise TimeoutError(method)

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
        said = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"])
        return said["result"].get("value")

    def press(self, key, times=1):
        """Press a key, as its name in KeyboardEvent.key is."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9, "Enter": 13, " ": 32}
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                code = codes[key]
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def write(self, text):
        """Write text where the focus is."""
        self.send("Input.insertText", text=text)

    def screenshot(self, path):
        """Save a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._browser.send("Target.closeTarget", targetId=self._target)
