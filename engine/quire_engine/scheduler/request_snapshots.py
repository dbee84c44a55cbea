"""Snapshots of the scheduler's requests, for operators."""

from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.snapshot import Phase, RequestEvent, RequestSnapshot


def request_snapshot(
    request: Request, now: float, num_blocks: int, outlook: tuple[float | None, float | None]
) -> RequestSnapshot:
    """What the scheduler knows of a request.

    Args:
        request: a live one.
        now: time on the scheduler's clock.
        num_blocks: blocks that it refers to.
        outlook: of a waiting one; see `SchedulingPolicy.outlook`.
    """
    return RequestSnapshot(
        id=request.request_id,
        phase=_phase(request),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_blocks=num_blocks,
        num_preemptions=request.num_preemptions,
        priority=request.sampling_params.priority,
        start_slack_seconds=outlook[0],
        predicted_start_seconds=outlook[1],
        queue_seconds=None if request.scheduled_at is None else request.scheduled_at - request.queued_at,
        events=[RequestEvent(kind, now - time, num_tokens) for kind, time, num_tokens in request.events],
    )


def _phase(request: Request) -> Phase:
    if request.status is RequestStatus.WAITING_FOR_FSM:
        return "grammar"
    if request.status is RequestStatus.PREEMPTED:
        return "preempted"
    if request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS):
        return "waiting"
    # Computing its tokens again after a preemption is a prefill like any other.
    has_next_token = request.num_output_tokens > 0 and request.num_tokens - request.num_computed_tokens <= 1
    return "decode" if has_next_token else "prefill"
