"""Spans of requests, for OpenTelemetry."""

from __future__ import annotations

from typing import Any

from cauc_ray.models.python import imported
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.request_state import RequestState


class Spans(Observer):
    """Reports each answered request to a tracer: a span for it, and one for each stage that its rows waited for.

    Args:
        setup: "package.module:function", which sets up OpenTelemetry's tracer provider.
    """

    def __init__(self, setup: str) -> None:
        from opentelemetry import trace

        imported(setup)()
        self._tracer: Any = trace.get_tracer("cauc_ray")

    def on_answer(self, request: RequestState) -> None:
        """Make the spans of a request, as a child of the caller's (header traceparent)."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        question = request.question
        if question is None or not request.is_answered:
            return
        attributes = {f"cauc.{name}": value for name, value in {"rows": request.n, **request.parameters()}.items()}
        context = extract(dict(question.headers))
        span = self._tracer.start_span("cauc.infer", context, start_time=question.started_ns, attributes=attributes)
        inside = trace.set_span_in_context(span, context)
        for stage in sorted({visit.stage for visit in request.visits}):
            visits = [visit for visit in request.visits if visit.stage == stage]
            attributes = {
                "cauc.stage": request.policy.models[stage],
                "cauc.rows": sum(len(visit.costs) for visit in visits),
            }
            ready_ns = visits[0].at_ns - int(visits[0].waited_s * 1e9)
            name = f"cauc.stage {attributes['cauc.stage']}"
            child = self._tracer.start_span(name, inside, start_time=ready_ns, attributes=attributes)
            child.end(visits[-1].at_ns)
        span.end()
