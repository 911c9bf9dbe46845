"""An HTTP client for the models of other servers: deadlines, repeated attempts, rate limits and counted bytes."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import random
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx2
from anyio import CapacityLimiter

from cauc_ray.errors import ConfigError, ExecutionError, first_line, one_line
from cauc_ray.models.credentials import Access

T = TypeVar("T")
# Pauses between attempts double from the first to the longest, unless the server asks for longer ones.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# The longest pause of all requests after rate limits in a row.
LONGEST_RATE_PAUSE_S = 60.0
# Seconds and share of an attempt that TCP and TLS each may take: a host that is away must not take the time of other
# attempts, and a handshake that httpx2 itself ends leaves no socket open.
CONNECT_S, CONNECT_SHARE = 5.0, 0.45
IDLE_CONNECTION_S = 60.0
# Longest body of an answer, unpacked: a server, or a proxy in its place, must not take a replica's memory.
MAX_ANSWER_BYTES = 256 << 20
# Headers that an unpacked body no longer has.
PACKING = ("content-encoding", "content-length", "transfer-encoding")
MESSAGE_LENGTH = 200
# Servers give this status to clients without credit, too; the code is OpenAI's.
RATE_LIMITED, NO_CREDIT = 429, b"insufficient_quota"


class RateGate:
    """Limits the requests in flight: additive increase, multiplicative decrease.

    A rate limit halves the number of requests at a time, and stops all of them for a pause; each answer raises the
    number by its reciprocal, up to the maximum.
    """

    def __init__(self, max_concurrency: int) -> None:
        self._max, self._limit, self._n_limits_in_row = max_concurrency, float(max_concurrency), 0
        self._opens_at = self._halved_at = 0.0
        self._in_flight = CapacityLimiter(max_concurrency)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until a request may be sent; the block sends it."""
        async with self._in_flight:
            while (pause_s := self._opens_at - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            yield

    def slow_down(self, sent_at: float, retry_after_s: float) -> float:
        """Halve the limit, once for all requests in flight.

        Args:
            sent_at: When the limited request was sent, by the monotonic clock.
            retry_after_s: Pause that the server asks for, 0 if none.

        Returns:
            Pause until the next request, in seconds.
        """
        now = time.monotonic()
        if sent_at >= self._halved_at:
            self._set_limit(max(1.0, self._limit / 2))
            self._halved_at = now
            self._n_limits_in_row += 1
        pause_s = retry_after_s or _backoff_s(self._n_limits_in_row, LONGEST_RATE_PAUSE_S)
        self._opens_at = max(self._opens_at, now + pause_s)
        return pause_s

    def speed_up(self, sent_at: float) -> None:
        """Raise the limit after an answer to a request that was sent since the last rate limit."""
        if sent_at >= self._halved_at:
            self._set_limit(min(self._max, self._limit + 1 / self._limit))
            self._n_limits_in_row = 0

    def _set_limit(self, limit: float) -> None:
        self._limit, self._in_flight.total_tokens = limit, int(limit)


class HttpClient:
    """Sends requests to one server, in a thread of its own, over connections that stay open.

    Proxies come from the environment: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

    Attributes:
        bytes_out: Bytes of headers and bodies sent so far, packed if they are, without TLS and TCP.
        bytes_in: Bytes of headers and bodies received so far, likewise.
    """

    def __init__(
        self,
        access: Access,
        *,
        transient: frozenset[int],
        retries: int,
        max_concurrency: int,
        outlasts_rate_limits: bool = False,
    ) -> None:
        """Connect to nothing yet.

        Args:
            access: How the server is reached.
            transient: Statuses after which a request is repeated.
            retries: Further attempts of a request.
            max_concurrency: Requests in flight.
            outlasts_rate_limits: Whether rate limits do not count as attempts, so that only the deadline ends them.
        """
        self._access, self._transient = access, transient
        self._retries, self._outlasts = retries, outlasts_rate_limits
        self._gate = RateGate(max_concurrency)
        self.bytes_out = self.bytes_in = 0
        try:
            self._client = httpx2.AsyncClient(
                headers={"User-Agent": "cauc-ray", "Accept-Encoding": "gzip, deflate"},
                verify=access.tls,
                limits=httpx2.Limits(max_connections=max_concurrency, keepalive_expiry=IDLE_CONNECTION_S),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            hint = "check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
            raise ConfigError(
                f"{access.name}: the environment's proxy cannot be used: {first_line(error)}; {hint}"
            ) from None
        self._client.headers.update(access.headers)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name=f"requests to {access.url}", daemon=True).start()
        weakref.finalize(self, _end, self._loop, self._client)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine that makes requests returns. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def request(
        self,
        method: str,
        path: str,
        deadline: float,
        compose: Callable[[float], tuple[Mapping[str, str], bytes]] = lambda left_s: ({}, b""),
        *,
        attempt_s: float | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> httpx2.Response:
        """Make a request, and repeat it after faults that pass.

        Args:
            method: HTTP method.
            path: Rest of the URL, or a whole URL.
            deadline: When the last attempt ends, by the monotonic clock.
            compose: Makes headers and body of an attempt from the seconds that are left.
            attempt_s: Longest time of one attempt, in seconds; by default half of what is left while others may follow.
            on_lost: Called when an attempt was sent and has had no answer in time.

        Returns:
            The answer; one with a transient status if attempts or time ran out.

        Raises:
            ConfigError: TLS is refused.
            ExecutionError: No attempt was answered.
        """
        url = path if "://" in path else f"{self._access.url}{path}"
        left_s, reason, n_attempts, n_faults = deadline - time.monotonic(), "", 0, 0
        while True:
            n_attempts, response, pause_s = n_attempts + 1, None, 0.0
            try:
                async with asyncio.timeout(deadline - time.monotonic()), self._gate.request():
                    sent_at = time.monotonic()
                    share_s = (deadline - sent_at) / (2 if n_faults < self._retries else 1)
                    left_s = share_s if attempt_s is None else min(attempt_s, deadline - sent_at)
                    headers, body = compose(left_s)
                    timeout = httpx2.Timeout(left_s, connect=min(CONNECT_SHARE * left_s, CONNECT_S), pool=None)
                    request = self._client.build_request(
                        method, url, headers=headers, content=body or None, timeout=timeout
                    )
                    response = await self._attempt(request, left_s, on_lost)
            except (httpx2.RequestError, OSError) as error:
                self._require_tls(error)
                n_faults += 1
                is_late = isinstance(error, TimeoutError | httpx2.TimeoutException)
                if not (is_late and reason):  # while it waited for another attempt, the last answer is the reason
                    reason = f"no answer within {left_s:.2g} s" if is_late else self._redacted(one_line(error))
            else:
                if response.status_code == RATE_LIMITED and NO_CREDIT not in response.content:
                    n_faults += not self._outlasts
                    pause_s = self._gate.slow_down(sent_at, _retry_after_s(response))
                elif response.status_code in self._transient - {RATE_LIMITED}:
                    n_faults, pause_s = n_faults + 1, _retry_after_s(response)
                else:
                    self._gate.speed_up(sent_at)
                    return response
                reason = self.message(response)
            pause_s = max(pause_s, _backoff_s(n_faults, LONGEST_PAUSE_S))
            if n_faults > self._retries or pause_s >= deadline - time.monotonic():
                if response is not None:
                    response.extensions["n_attempts"] = n_attempts
                    return response
                raise self.away(f"{reason}, {n_attempts} attempts")
            await asyncio.sleep(pause_s)

    async def _attempt(self, request: httpx2.Request, left_s: float, on_lost: Callable[[], None]) -> httpx2.Response:
        """Make one attempt; an answer that is too long becomes a refusal of the request.

        Raises:
            TimeoutError: The answer does not come in time.
            httpx2.RequestError: The request fails otherwise.
        """
        # Counted as HTTP/1.1 writes them.
        request_line = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"
        self.bytes_out += _n_bytes(request_line, request.headers) + len(request.content)
        try:
            async with asyncio.timeout(left_s):
                response = await self._client.send(request, stream=True)
                content = await _body(response)
        except (TimeoutError, asyncio.CancelledError, httpx2.ReadTimeout):
            on_lost()
            raise
        status_line = f"HTTP/1.1 {response.status_code} {response.reason_phrase}"
        self.bytes_in += _n_bytes(status_line, response.headers) + response.num_bytes_downloaded
        if content is None:
            return httpx2.Response(413, text=f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB", request=request)
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in PACKING]
        return httpx2.Response(response.status_code, headers=headers, content=content, request=request)

    def message(self, response: httpx2.Response) -> str:
        """Return a server's message as one short line without secrets, which some servers repeat."""
        content = json_of(response)
        for key in ("error", "message", "detail"):  # servers put it into different fields, or into one in another
            content = content[key] if isinstance(content, dict) and content.get(key) else content
        text = self._redacted(response.text if content is None else str(content)) or "no message"
        if location := response.headers.get("location"):
            text += f", see {location}"
        n_attempts = response.extensions.get("n_attempts", 1)
        return f"{response.status_code}: {text}" + (f", {n_attempts} attempts" if n_attempts > 1 else "")

    def away(self, why: str) -> ExecutionError:
        """Return the error of a server that does not answer as it should."""
        # Many servers hang up on a client whose certificate they refuse, without a reason.
        is_unproven = self._access.url.startswith("https:") and not self.bytes_in
        hint = ", and check cert and key if it asks for them" if is_unproven else ""
        return ExecutionError(f"{self._access.name} does not answer ({why}); continue when it does{hint}")

    def refusal(self, response: httpx2.Response) -> ConfigError:
        """Return the error of a server that rejects every request."""
        what = f"rejects requests ({self.message(response)})"
        return ConfigError(f"{self._access.name} {what}; check {self._access.settings}")

    def _redacted(self, text: str) -> str:
        """Return a text as one short line without secrets."""
        for secret in self._access.secrets:
            text = text.replace(secret, "…")
        line = " ".join(text.split())
        return line if len(line) <= MESSAGE_LENGTH else f"{line[:MESSAGE_LENGTH]}…"

    def _require_tls(self, error: BaseException) -> None:
        """Raise ConfigError if an error is that of a TLS handshake which will always fail."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return
        hint = "check url, ca, cert and key in the stage's model, or the environment variable SSL_CERT_FILE"
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise ConfigError(f"{self._access.name} is not trusted: {cause.verify_message}; {hint}") from None
        if any(word in (cause.reason or "") for word in ("ALERT", "WRONG_VERSION")):
            raise ConfigError(f"{self._access.name} refuses the TLS connection: {cause.reason}; {hint}") from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped."""
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, client: httpx2.AsyncClient) -> None:
    """Close a client's connections, then end its thread; wait for neither."""

    async def close() -> None:
        await client.aclose()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)


async def all_until_error(jobs: Iterable[Callable[[], Awaitable[T]]], gate: asyncio.Semaphore) -> list[T]:
    """Run jobs as a gate lets them in; after an error, wait for those under way and start no more.

    None is cancelled: its answer may have been paid for, and its connection may not be closed within a handshake.

    Returns:
        Their results.

    Raises:
        Exception: The first error.
    """
    errors = list[Exception]()

    async def run(job: Callable[[], Awaitable[T]]) -> list[T]:
        async with gate:
            try:
                return [] if errors else [await job()]
            except Exception as error:
                errors.append(error)
                return []

    results = await asyncio.gather(*map(run, jobs))
    if errors:
        raise errors[0]
    return [*itertools.chain.from_iterable(results)]


async def _body(response: httpx2.Response) -> bytes | None:
    """Return a streamed body, unpacked; None if it is too long."""
    content = bytearray()
    try:
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                return None
    finally:
        await response.aclose()
    return bytes(content)


def _n_bytes(first_line: str, headers: httpx2.Headers) -> int:
    """Return the length of what precedes a body: its first line, headers and an empty line."""
    return len(first_line) + sum(len(name) + len(value) + 4 for name, value in headers.raw) + 4


def _backoff_s(n_faults: int, longest_s: float) -> float:
    """Return the pause after so many faults, with jitter: clients that failed together must not return together."""
    return random.uniform(0.5, 1.0) * min(longest_s, FIRST_PAUSE_S * 2.0**n_faults)


def _retry_after_s(response: httpx2.Response) -> float:
    """Return how long a server asks to wait, in seconds or until a date; 0 if it does not."""
    text = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def json_of(response: httpx2.Response) -> Any:
    """Return a parsed body, None if it is not JSON."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def value_at(answer: Any, *path: str | int) -> Any:
    """Return the value at a path in parsed JSON, None if the path does not exist."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            return None
    return answer
