import asyncio

import numpy as np
import pytest
from fake_stages import Stage, a_pool, cascade_of, columns_of
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from synthetic import chain

from cauc_ray.errors import ConfigError
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.serving.tracing import Spans

DATA = chain(5, n=40)
EXPORTER = InMemorySpanExporter()


def set_up():
    """What a user's module does."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


def test_a_request_is_a_span_of_its_caller_with_one_for_each_stage():
    spans = Spans.configured("test_tracing:set_up")
    policy = fit_rf(DATA, rule=ThresholdRule(threshold=0.8))

    async def main():
        cascade, _ = cascade_of(a_pool(DATA.models), [Stage(f"logits{stage}") for stage in range(3)])
        return await cascade.answer(policy, columns_of(DATA.logits, np.arange(40)), 40)

    answer = asyncio.run(main())
    first_ns = min(ready for ready, _ in answer.spans_ns.values())
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    spans.report({"traceparent": caller}, first_ns - 1000, answer, {"rows": 40, "policy_id": policy.id})
    import test_tracing  # as the configuration names it

    found = {span.name: span for span in test_tracing.EXPORTER.get_finished_spans()}
    request = found["cauc.infer"]
    assert f"{request.context.trace_id:032x}" == "ab" * 16
    assert f"{request.parent.span_id:016x}" == "cd" * 8
    assert request.attributes["cauc.policy_id"] == policy.id
    stages = [found[f"cauc.stage {name}"] for name in DATA.models]
    for span in stages:
        assert span.parent.span_id == request.context.span_id
        assert request.start_time < span.start_time <= span.end_time <= request.end_time
    assert [span.attributes["cauc.rows"] for span in stages] == [
        int((answer.stages >= stage).sum()) for stage in range(3)
    ]


def test_without_a_setting_there_are_no_spans_and_a_bad_one_is_reported():
    Spans.configured(None).report({}, 0, None, {})
    with pytest.raises(ConfigError, match="nowhere"):
        Spans.configured("nowhere:set_up")
