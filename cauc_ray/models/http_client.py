"""An HTTP client for the models of other servers: deadlines, repeated attempts, rate limits and counted bytes."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import ssl
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from cauc_ray.errors import CaucError, ConfigError, first_line, one_line
from cauc_ray.models.background import Background

# Pauses between attempts double from the first to the longest, unless the server asks for longer ones.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# The longest pause of all requests after rate limits in a row.
LONGEST_RATE_PAUSE_S = 60.0
IDLE_CONNECTION_S = 60.0
# Unpacked bytes of the longest answer.
MAX_ANSWER_BYTES = 1 << 28
MESSAGE_LENGTH = 200
# TCP and TLS each have this share of an attempt's time: a host that is away must not take the time of other attempts.
CONNECT_SHARE = 0.45
# Servers give this status to clients without credit, too; the code is OpenAI's.
RATE_LIMITED, NO_CREDIT = 429, b"insufficient_quota"


@dataclass(frozen=True, slots=True)
class Response:
    """A server's answer.

    Attributes:
        status: HTTP status.
        headers: Headers, whatever the case of their names.
        content: Unpacked body.
        n_attempts: Attempts made until then.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes
    n_attempts: int = 1

    @property
    def retry_after_s(self) -> float:
        """Return how long the server asks to wait, 0 if it does not."""
        text = self.headers.get("retry-after", "")
        try:
            return max(0.0, float(text))
        except ValueError:
            pass
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (TypeError, ValueError):
            return 0.0

    def json(self) -> Any:
        """Return the parsed body, None if it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


class NoAnswerError(Exception):
    """A request without any answer; the message says why."""


class RateGate:
    """Limits the requests in flight: additive increase, multiplicative decrease.

    A rate limit halves the number of requests at a time, and stops all of them for a pause; each answer raises the
    number by its reciprocal, up to the maximum.
    """

    def __init__(self, max_concurrency: int) -> None:
        self._max, self._limit = max_concurrency, float(max_concurrency)
        self._n_in_flight = self._n_limits_in_row = 0
        self._opens_at = self._halved_at = 0.0
        self._left = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._left:
            await self._left.wait_for(lambda: self._n_in_flight < int(self._limit))
            self._n_in_flight += 1
        try:
            while (pause_s := self._opens_at - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *error: object) -> None:
        async with self._left:
            self._n_in_flight -= 1
            self._left.notify(2)  # the limit may have risen by one

    def slow_down(self, sent_at: float, asked_s: float) -> float:
        """Halve the limit, once for all requests in flight.

        Args:
            sent_at: When the limited request was sent, by the monotonic clock.
            asked_s: Pause that the server asks for, 0 if none.

        Returns:
            Pause until the next request, in seconds.
        """
        now = time.monotonic()
        if sent_at >= self._halved_at:
            self._limit, self._halved_at = max(1.0, self._limit / 2), now
            self._n_limits_in_row += 1
        pause_s = asked_s or _backoff_s(self._n_limits_in_row, LONGEST_RATE_PAUSE_S)
        self._opens_at = max(self._opens_at, now + pause_s)
        return pause_s

    def speed_up(self, sent_at: float) -> None:
        """Raise the limit after an answer to a request that was sent since the last rate limit."""
        if sent_at >= self._halved_at:
            self._limit = min(self._max, self._limit + 1 / self._limit)
            self._n_limits_in_row = 0


def _not_counted() -> None:
    pass


class HttpClient:
    """Sends requests to one server over connections that stay open.

    Proxies come from the environment: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

    Attributes:
        bytes_out: Bytes of headers and bodies sent so far, packed if they are, without TLS and TCP.
        bytes_in: Bytes of headers and bodies received so far, likewise.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        token: str | None,
        headers: Mapping[str, str],
        secrets: Sequence[str],
        transient: frozenset[int],
        retries: int,
        max_concurrency: int,
        outlasts_rate_limits: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: Beginning of every URL.
            name: Model and server, for messages.
            token: Sent as a bearer token, unless headers have an authorization.
            headers: Sent with every request.
            secrets: Texts besides the token that no message may contain.
            transient: Statuses after which a request is repeated.
            retries: Further attempts of a request.
            max_concurrency: Requests in flight.
            outlasts_rate_limits: Whether rate limits do not count as attempts, so that only the deadline ends them.
            tls: How servers are verified; None verifies by the system's certificates.
        """
        self._url, self._name = url.rstrip("/"), name
        self._secrets = [*secrets, *([] if not token else [token])]
        self._transient, self._retries, self._outlasts = transient, retries, outlasts_rate_limits
        self._gate = RateGate(max_concurrency)
        self.bytes_out = self.bytes_in = 0
        sent = httpx2.Headers({"User-Agent": "cauc-ray", "Accept-Encoding": "gzip, deflate"})
        sent.update({"Authorization": f"Bearer {token}"} if token else {})
        sent.update(headers)
        try:
            self._client = httpx2.AsyncClient(
                headers=sent,
                verify=True if tls is None else tls,
                limits=httpx2.Limits(max_connections=max_concurrency, keepalive_expiry=IDLE_CONNECTION_S),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            hint = "check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
            raise ConfigError(f"{name}: the environment's proxy cannot be used: {first_line(error)}; {hint}") from None
        self._background = Background(f"{name}: requests")
        self.run = self._background.run
        weakref.finalize(self, self._background.end, self._client.aclose)

    async def request(
        self,
        method: str,
        path: str,
        deadline: float,
        compose: Callable[[float], tuple[Mapping[str, str], bytes]] = lambda left_s: ({}, b""),
        *,
        attempt_s: float = float("inf"),
        on_lost: Callable[[], None] = _not_counted,
    ) -> Response:
        """Make a request, and repeat it after faults that pass.

        Args:
            method: HTTP method.
            path: Rest of the URL, or a whole URL.
            deadline: When the last attempt ends, by the monotonic clock.
            compose: Makes headers and body of an attempt from the seconds that are left.
            attempt_s: Longest time of one attempt, in seconds.
            on_lost: Called when an attempt was sent and has had no answer in time.

        Returns:
            The answer; one with a transient status if attempts or time ran out.

        Raises:
            ConfigError: TLS is refused.
            NoAnswerError: No attempt was answered.
        """
        url, n_attempts, n_faults = path if "://" in path else f"{self._url}{path}", 0, 0
        left_s = deadline - time.monotonic()
        reason = f"no answer within {left_s:.2g} s" if left_s > 0 else "no time is left for it"
        while True:
            n_attempts, response = n_attempts + 1, None
            try:
                async with asyncio.timeout(deadline - time.monotonic()), self._gate:
                    sent_at = time.monotonic()
                    left_s = min(attempt_s, deadline - sent_at)
                    connect_s = CONNECT_SHARE * min(left_s, (deadline - sent_at) / (self._retries + 1 - n_faults))
                    response = await self._exchange(method, url, *compose(left_s), left_s, connect_s, on_lost)
            except TimeoutError:
                raise NoAnswerError(reason) from None
            except (httpx2.TransportError, OSError) as error:
                self._require_tls(error)
                n_faults, pause_s = n_faults + 1, 0.0
                late = isinstance(error, httpx2.TimeoutException)
                reason = f"no answer within {left_s:.2g} s" if late else self.redacted(one_line(error))
            else:
                if response.status == RATE_LIMITED and NO_CREDIT not in response.content:
                    n_faults += not self._outlasts
                    pause_s = self._gate.slow_down(sent_at, response.retry_after_s)
                elif response.status in self._transient - {RATE_LIMITED}:
                    n_faults, pause_s = n_faults + 1, response.retry_after_s
                else:
                    self._gate.speed_up(sent_at)
                    return response
                reason = f"{response.status}: {self.message(response)}"
            pause_s = max(pause_s, _backoff_s(n_faults, LONGEST_PAUSE_S))
            if n_faults > self._retries or pause_s >= deadline - time.monotonic():
                if response is not None:
                    return replace(response, n_attempts=n_attempts)
                raise NoAnswerError(f"{reason}, {n_attempts} attempts")
            await asyncio.sleep(pause_s)

    async def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        left_s: float,
        connect_s: float,
        on_lost: Callable[[], None],
    ) -> Response:
        """Make one attempt. Raises NoAnswerError for an answer that cannot be read, and what httpx2 raises."""
        timeout = httpx2.Timeout(left_s, connect=connect_s, pool=None)
        request = self._client.build_request(method, url, headers=headers, content=body or None, timeout=timeout)
        # Counted as HTTP/1.1 writes them.
        self.bytes_out += len(f"{method} {request.url.raw_path.decode()} HTTP/1.1\r\n") + _n_bytes(request.headers)
        self.bytes_out += len(body)
        chunks, n_bytes = [], 0
        try:
            async with asyncio.timeout(left_s):
                answer = await self._client.send(request, stream=True)
                try:
                    async for chunk in answer.aiter_bytes():
                        chunks.append(chunk)
                        n_bytes += len(chunk)
                        if n_bytes > MAX_ANSWER_BYTES:
                            raise NoAnswerError(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes")
                finally:
                    await answer.aclose()
        except httpx2.DecodingError as error:
            raise NoAnswerError(f"its answer cannot be unpacked: {error}") from None
        except (TimeoutError, asyncio.CancelledError, httpx2.ReadTimeout) as error:
            on_lost()
            if isinstance(error, TimeoutError):
                raise httpx2.ReadTimeout("") from None
            raise
        status_line = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}\r\n"
        self.bytes_in += len(status_line) + _n_bytes(answer.headers) + answer.num_bytes_downloaded
        return Response(answer.status_code, answer.headers, b"".join(chunks))

    def message(self, response: Response) -> str:
        """Return a server's message as one short line without secrets, which some servers repeat."""
        content = response.json()
        for key in ("error", "message", "detail"):  # servers put it into different fields, or into one in another
            content = content[key] if isinstance(content, dict) and content.get(key) else content
        text = response.content.decode(errors="replace") if content is None else str(content)
        return self.redacted(text) or "no message"

    def redacted(self, text: str) -> str:
        """Return a text as one short line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        line = " ".join(text.split())
        return line if len(line) <= MESSAGE_LENGTH else f"{line[:MESSAGE_LENGTH]}…"

    def _require_tls(self, error: BaseException) -> None:
        """Raise ConfigError if an error is that of a TLS handshake which will always fail."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, ssl.SSLCertVerificationError):
            hint = "check ca in the stage's model, or the environment variable SSL_CERT_FILE"
            raise ConfigError(f"{self._name} is not trusted: {cause.verify_message}; {hint}") from None
        if isinstance(cause, ssl.SSLError) and any(word in (cause.reason or "") for word in ("ALERT", "WRONG_VERSION")):
            why = str(cause.reason).replace("_", " ").lower()
            hint = "check its url, and cert and key in the stage's model"
            raise ConfigError(f"{self._name} refuses the TLS connection: {why}; {hint}") from None


async def all_until_error(jobs: Iterable[Callable[[], Awaitable[None]]], max_concurrency: int) -> None:
    """Run jobs, some at a time; after an error, wait for those under way and start no more.

    None is cancelled: its answer may have been paid for, and its connection may not be closed within a handshake.

    Raises:
        CaucError: The first error.
    """
    gate, errors = asyncio.Semaphore(max_concurrency), list[CaucError]()

    async def run(job: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            try:
                if not errors:
                    await job()
            except CaucError as error:
                errors.append(error)

    await asyncio.gather(*map(run, jobs))
    if errors:
        raise errors[0]


def _n_bytes(headers: httpx2.Headers) -> int:
    """Return the length of headers and of the empty line after them."""
    return sum(len(name) + len(value) + 4 for name, value in headers.raw) + 2


def _backoff_s(n_faults: int, longest_s: float) -> float:
    """Return the pause after so many faults, with jitter: clients that failed together must not return together."""
    return random.uniform(0.5, 1.0) * min(longest_s, FIRST_PAUSE_S * 2.0**n_faults)


def value_at(answer: Any, *path: str | int) -> Any:
    """Return the value at a path in parsed JSON, None if the path does not exist."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            return None
    return answer
