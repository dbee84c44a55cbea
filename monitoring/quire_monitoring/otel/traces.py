"""The trace of an ended request, from the times in its statistics."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from quire_engine.stats import FinishedRequestStats
from quire_engine.timeline import stretches

REJECTED = "rejected"
_NAMES = {"preempted": "preemption", "replayed": "replay"}
"""Of spans, where a phase's own is not what it is."""


class RequestTraces:
    """Makes spans.

    Args:
        tracer: of the SDK.
        attributes: of every request: provider and model.
    """

    def __init__(self, tracer: Tracer, attributes: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._attributes = dict(attributes)
        self._model = attributes["gen_ai.request.model"]
        self._propagator = TraceContextTextMapPropagator()

    def make(self, end: int, request: FinishedRequestStats) -> None:
        """Create a request's spans.

        Args:
            end: when it ended, in nanoseconds of the wall clock; all else is counted back from that.
            request: its times.
        """
        start = end - int(1e9 * request.e2e_seconds)
        parent = Context()
        if request.options.traceparent is not None:
            parent = self._propagator.extract({"traceparent": request.options.traceparent}, parent)
        span = self._tracer.start_span(
            f"{request.options.operation} {self._model}", parent, SpanKind.SERVER, self._span_attributes(request),
            start_time=start,
        )  # fmt: skip
        if span.is_recording():
            for kind in error_type(request).values():
                span.set_status(Status(StatusCode.ERROR, request.error or kind))
            context = set_span_in_context(span, parent)
            events = _events(request)
            for phase, begin_seconds, end_seconds in stretches(request.phases, request.e2e_seconds):
                child = self._tracer.start_span(
                    _NAMES.get(phase, phase), context, start_time=start + int(1e9 * begin_seconds)
                )
                for event, seconds, event_attributes in events.pop(phase, ()):
                    at = min(begin_seconds + seconds, end_seconds)
                    child.add_event(event, event_attributes, start + int(1e9 * at))
                child.end(start + int(1e9 * end_seconds))
        span.end(end)

    def _span_attributes(self, request: FinishedRequestStats) -> dict[str, Any]:
        options = request.options
        named = {
            "gen_ai.operation.name": options.operation,
            "gen_ai.response.id": options.response_id or options.label or request.request_id,
            "quire.request.id": request.request_id,
            "quire.request.label": options.label,
            "quire.slo.class": options.slo.slo_class if request.slo_verdict else None,
            "quire.slo.predicted_ttft": request.predicted_ttft_seconds,
            "quire.refusal": request.refusal,
            "quire.slo.verdict": request.slo_verdict,
            "quire.slo.cause": request.slo_cause,
            "quire.aborted_by": request.aborted_by,
        }
        attributes = self._attributes | error_type(request) | {name: value for name, value in named.items() if value}
        if request.finish_reason == REJECTED:
            return attributes
        return attributes | {name: value for name, value in _figures(request).items() if value is not None}


def _figures(request: FinishedRequestStats) -> dict[str, Any]:
    """What was asked for and computed; None: it does not apply."""
    computed = {
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "quire.num_preemptions": request.num_preemptions,
        "quire.num_replays": request.num_replays,
    }
    pooling = request.options.pooling_params
    if pooling is not None:
        return {"gen_ai.embeddings.dimension.count": pooling.dimensions, "quire.task": pooling.task or "", **computed}
    has_drafts = request.acceptance_length is not None
    return {
        **_asked(request),
        "gen_ai.request.choice.count": request.num_sequences,
        "gen_ai.request.stream": request.is_streamed,
        "gen_ai.response.finish_reasons": [request.finish_reason],
        "gen_ai.response.time_to_first_chunk": request.time_to_first_token_seconds if request.is_streamed else None,
        "gen_ai.usage.output_tokens": request.num_output_tokens,
        **computed,
        "quire.num_draft_tokens": request.num_draft_tokens if has_drafts else None,
        "quire.num_accepted_tokens": request.num_accepted_tokens if has_drafts else None,
        "quire.acceptance_length": request.acceptance_length,
    }


def _asked(request: FinishedRequestStats) -> dict[str, Any]:
    """What the client asked for. Stop strings are left out: they are text of the client's."""
    params = request.params
    if params is None:
        return {}
    structure = params.structured_outputs
    is_json = structure is not None and (structure.json is not None or structure.json_object)
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        # OTLP's integers have a sign, and a seed may have all 64 bits.
        "gen_ai.request.seed": params.seed if params.seed is None or params.seed < 1 << 63 else None,
        "gen_ai.output.type": "json" if is_json else "text",
    }


def _events(request: FinishedRequestStats) -> dict[str, list[tuple[str, float, dict[str, int]]]]:
    """What happened within the first phase of a kind: `(event, seconds from its begin, attributes)`."""
    chunks: list[tuple[str, float, dict[str, int]]] = [
        ("chunk", seconds, {"quire.num_tokens": tokens}) for seconds, tokens in request.prefill_chunks
    ]
    if request.grammar_seconds is None:
        return {"prefill": chunks}
    return {"queue": [("grammar compiled", request.grammar_seconds, {})], "prefill": chunks}


def error_type(request: FinishedRequestStats) -> dict[str, str]:
    """The attribute with the kind of error; none if there was no error."""
    if request.finish_reason not in ("error", REJECTED):
        return {}
    return {"error.type": request.error_code or "error"}
