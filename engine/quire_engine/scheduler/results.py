"""Turns the result of a step into output of its requests. Knows tokens, but no queues and no blocks.

Several steps may be in flight, and their results come in the order in which they were scheduled. With a pipeline::

    schedule()    1: a b   2: c d   3: (a b: their tokens are in flight)   3: a b    4: c d …
    update                                                     1: a b         2: c d

With async scheduling a request goes on after a token before the token is known::

    schedule()    1: a b   2: a b              3: a
    update                          1: a b           2: a (b has ended at its token of step 1)

If a request ends while a step with it is in flight, that step's result for it is skipped. A preempted request and
a suspect ignore the result, too; each samples the same token again later, as noise depends only on seed and
position (with `acceptance: rejection`, one of the same distribution). Steps are numbered for this, and
`last_stale_step` is the last one whose result the request ignores.
"""

import logging
from collections.abc import Mapping

from quire_engine.messages import EngineCoreOutput, FinishReason, ModelRunnerOutput, SchedulerOutput
from quire_engine.scheduler.request import Request

logger = logging.getLogger(__name__)

NOT_FINITE = (
    "the model computes NaN or infinity for this prompt: its weights are damaged, or the numbers exceed its dtype, as "
    "happens with float16"
)


def take_result(
    requests: Mapping[str, Request], scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
) -> tuple[list[EngineCoreOutput], list[str], list[EngineCoreOutput]]:
    """Append the sampled tokens to their requests; rejected drafts no longer count as computed.

    Args:
        requests: the live ones.
        scheduler_output: a step.
        runner_output: its result.

    Returns:
        The new output of each request, the ids of the requests that are complete, and the outputs that are a request's
        first.
    """
    step, drafts = scheduler_output.step, scheduler_output.draft_token_ids
    for request_id, chunk in runner_output.prompt_logprobs.items():
        request = requests.get(request_id)
        if request is not None and request.last_stale_step < step:
            request.add_prompt_logprobs(chunk)
    outputs: list[EngineCoreOutput] = []
    complete: list[str] = []
    first: list[EngineCoreOutput] = []
    logprobs = runner_output.logprobs
    for request_id, new_token_ids in runner_output.sampled_token_ids.items():
        request = requests.get(request_id)
        if request is None or request.last_stale_step >= step:
            continue
        output = EngineCoreOutput(request_id, num_preemptions=request.num_preemptions)
        if request_id in drafts:
            output.num_draft_tokens = len(drafts[request_id])
            request.num_computed_tokens -= 1 + output.num_draft_tokens - len(new_token_ids)
        token_ids, grammar, allowed = request.all_token_ids, request.grammar, request.allowed_token_ids
        if len(token_ids) == request.num_prompt_tokens:
            _describe_prefill(output, request)
            first.append(output)
        stopped: tuple[FinishReason, int | None] | None = None
        for token_id in new_token_ids:
            if grammar is not None and not _accepts(request, token_id):
                stopped = FinishReason.ERROR, None
                output.error = (
                    "structured_outputs: no token that the grammar allows is left by the other parameters or the "
                    "adapter"
                )
                output.error_parameter = "structured_outputs"
                break
            if allowed is not None and token_id not in allowed:
                stopped = FinishReason.ERROR, None
                output.error = "allowed_token_ids: no allowed token is left by the other parameters or the adapter"
                output.error_parameter = "allowed_token_ids"
                break
            token_ids.append(token_id)
            if request.num_output_placeholders:
                request.num_output_placeholders -= 1
            output.new_token_ids.append(token_id)
            stopped = request.check_stop()
            if stopped:
                break
        if logprobs:
            output.logprobs = logprobs.get(request_id, [])[: len(output.new_token_ids)] or None
        if stopped:
            output.finish_reason, output.stop_reason = stopped
            complete.append(request_id)
        outputs.append(output)
    for request_id, pooled in runner_output.pooled.items():
        request = requests.get(request_id)
        if request is not None and request.last_stale_step < step:
            output = EngineCoreOutput(request_id, finish_reason=FinishReason.STOP, pooled=pooled)
            if not pooled.is_finite:
                output = EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=NOT_FINITE)
            output.num_preemptions = request.num_preemptions
            _describe_prefill(output, request)
            first.append(output)
            outputs.append(output)
            complete.append(request_id)
    return outputs, complete, first


def _describe_prefill(output: EngineCoreOutput, request: Request) -> None:
    if request.scheduled_at is not None:
        output.num_cached_tokens = request.num_cached_tokens
        output.grammar_seconds = request.grammar_seconds
        output.prefill_chunks = _prefill_chunks(request)
        output.prompt_logprobs = request.take_prompt_logprobs()


def _prefill_chunks(request: Request) -> list[tuple[float, int]]:
    """When each chunk of a prompt was scheduled, if there were several; see `EngineCoreOutput`."""
    computed = [(at, tokens) for kind, at, tokens in request.events if kind in ("scheduled", "prefill_chunk")]
    first = request.scheduled_at or 0.0
    return [(at - first, tokens) for at, tokens in computed] if len(computed) > 1 else []


def _accepts(request: Request, token_id: int) -> bool:
    """Advance a request's grammar; if it raises, only this request fails."""
    assert request.grammar is not None
    try:
        return request.grammar.accept_tokens([token_id])
    except Exception:
        logger.exception("a grammar cannot be advanced")
        return False
