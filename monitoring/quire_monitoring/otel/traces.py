"""The trace of an ended request, from the times in its statistics."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from quire_engine.stats import FinishedRequestStats

__all__ = ["OPERATION", "RequestTraces", "error_type"]

OPERATION = "text_completion"
REJECTED = "rejected"


class RequestTraces:
    """Makes spans.

    Args:
        tracer: of the SDK.
        attributes: of every request: operation, provider and model.
    """

    def __init__(self, tracer: Tracer, attributes: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._attributes = dict(attributes)
        self._span_name = f"{OPERATION} {attributes['gen_ai.request.model']}"
        self._propagator = TraceContextTextMapPropagator()

    def make(self, end: int, request: FinishedRequestStats) -> None:
        """Create a request's spans.

        Args:
            end: when it ended, in nanoseconds of the wall clock; all else is counted back from that.
            request: its times.
        """
        start = end - int(1e9 * request.e2e_seconds)
        parent = Context()
        if request.traceparent is not None:
            parent = self._propagator.extract({"traceparent": request.traceparent}, parent)
        span = self._tracer.start_span(
            self._span_name, parent, SpanKind.SERVER, self._span_attributes(request), start_time=start
        )
        if span.is_recording():
            for kind in error_type(request).values():
                span.set_status(Status(StatusCode.ERROR, kind))
            context = set_span_in_context(span, parent)
            for name, begin_seconds, end_seconds in _phases(request):
                child = self._tracer.start_span(name, context, start_time=start + int(1e9 * begin_seconds))
                child.end(start + int(1e9 * end_seconds))
        span.end(end)

    def _span_attributes(self, request: FinishedRequestStats) -> dict[str, Any]:
        optional = {
            "gen_ai.response.id": request.label,
            "quire.slo.class": request.slo_class,
            "quire.slo.verdict": request.slo_verdict,
            "quire.slo.cause": request.slo_cause,
        }
        attributes = {
            **self._attributes,
            **error_type(request),
            **{name: value for name, value in optional.items() if value},
        }  # fmt: skip
        if request.finish_reason == REJECTED:
            return attributes
        return {
            **attributes,
            "gen_ai.request.choice.count": request.num_sequences,
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "quire.num_cached_tokens": request.num_cached_tokens,
            "quire.num_preemptions": request.num_preemptions,
            **_drafts(request),
        }


def error_type(request: FinishedRequestStats) -> dict[str, str]:
    """The attribute with the kind of error; none if there was no error."""
    if request.finish_reason not in ("error", REJECTED):
        return {}
    return {"error.type": request.error_code or "error"}


def _drafts(request: FinishedRequestStats) -> dict[str, float]:
    """The attributes of speculative decoding; none if the request had no drafts."""
    if request.acceptance_length is None:
        return {}
    return {
        "quire.num_draft_tokens": request.num_draft_tokens,
        "quire.num_accepted_tokens": request.num_accepted_tokens,
        "quire.acceptance_length": request.acceptance_length,
    }


def _phases(request: FinishedRequestStats) -> list[tuple[str, float, float]]:
    """`(name, begin, end)` of the child spans, in seconds from the request's arrival."""
    if request.finish_reason == REJECTED:
        return []
    first_token = request.time_to_first_token_seconds
    if first_token is None:  # it ended while it waited, or in its prefill
        return [("queue", 0.0, request.e2e_seconds)]
    prefill = max(first_token - request.prefill_seconds, 0.0)
    return [
        ("queue", 0.0, prefill),
        ("prefill", prefill, first_token),
        ("decode", first_token, first_token + request.decode_seconds),
        *(("preemption", begin, end) for begin, end in request.preemptions),
    ]
