"""OpenTelemetry spans of requests, where a service configures them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.models.python import imported
from cauc_ray.serving.request_state import RequestState


class Spans:
    """Reports each request to a tracer: a span for it, and one for each stage that its rows waited for.

    tracer: of OpenTelemetry, None without tracing.
    """

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    @classmethod
    def configured(cls, setup: str | None) -> Spans:
        """Call "package.module:function", which sets up OpenTelemetry's tracer provider; none without it."""
        if setup is None:
            return cls()
        from opentelemetry import trace

        imported(setup)()
        return cls(trace.get_tracer("cauc_ray"))

    def report(
        self, headers: Mapping[str, str], started_ns: int, request: RequestState, own: Mapping[str, Any]
    ) -> None:
        """Make the spans of an answered request, as a child of the caller's (header traceparent).

        started_ns: of the request, since the epoch.   own: attributes of its span.
        """
        if self._tracer is None:
            return
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        attributes = {f"cauc.{name}": value for name, value in own.items()}
        context = extract(dict(headers))
        span = self._tracer.start_span("cauc.infer", context, start_time=started_ns, attributes=attributes)
        inside = trace.set_span_in_context(span, context)
        for stage, (ready_ns, answered_ns) in sorted(request.spans_ns.items()):
            name = request.policy.models[stage]
            own = {"cauc.stage": name, "cauc.rows": int((request.stages >= stage).sum())}
            self._tracer.start_span(f"cauc.stage {name}", inside, start_time=ready_ns, attributes=own).end(answered_ns)
        span.end()
