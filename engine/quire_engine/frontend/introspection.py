"""Merges the engine core's and the frontend's views of the same moment into a Snapshot.

It knows no process and no clock. The two sides may disagree on which requests there are, as the engine core was asked a
moment before: those that have ended since are left out, and those that it does not have are described by the frontend
alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_engine.slo import SLOTargets
from quire_engine.snapshot import (
    MAX_WAITING_REQUESTS,
    BlocksSnapshot,
    EngineCoreSnapshot,
    EngineSnapshot,
    PackedBlocks,
    PrefixSnapshot,
    PrefixTreeSnapshot,
    QueueDepths,
    RankSnapshot,
    RequestEvent,
    RequestSnapshot,
    StepComposition,
    StepSeconds,
)
from quire_engine.timeline import RequestPhase, phase_seconds

NUM_HOTTEST_PREFIXES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRequest:
    """A live request of the engine core as the frontend sees it. Times are of the frontend's monotonic clock."""

    request_id: str
    caller_request_id: str
    """Differs from `request_id` for one of several sequences, whose request has an id of its own."""
    arrival_time: float
    first_token_time: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int
    priority: int
    phases: list[tuple[RequestPhase, float]]
    """As in `Timeline`."""
    slo_class: str
    slo_targets: SLOTargets


def combine_requests(
    core: Sequence[RequestSnapshot],
    live: Mapping[str, LiveRequest],
    labels: Mapping[str, str],
    is_held: Callable[[str], bool],
    now: float,
) -> list[RequestSnapshot]:
    """The live requests, those of the engine core in its order and then the others by arrival.

    Args:
        core: the engine core's; this function completes and takes them over.
        live: the frontend's, by id and in order of arrival.
        labels: the clients' names, by the caller's request id.
        is_held: whether no engine has a request.
        now: of the frontend's monotonic clock.
    """
    requests = [request for request in core if request.id in live]
    known = {request.id for request in requests}
    others = [one for request_id, one in live.items() if request_id not in known]
    requests += [_from_frontend(one, is_held(one.request_id)) for one in others[:MAX_WAITING_REQUESTS]]
    for request in requests:
        _complete(request, live[request.id], now)
        request.label = labels.get(live[request.id].caller_request_id, "")
    return requests


def _from_frontend(live: LiveRequest, is_held: bool) -> RequestSnapshot:
    return RequestSnapshot(
        id=live.request_id,
        phase="held" if is_held else "waiting",
        num_prompt_tokens=live.num_prompt_tokens,
        num_output_tokens=live.num_output_tokens,
        num_preemptions=live.num_preemptions,
        max_tokens=live.max_tokens,
        priority=live.priority,
    )


def _complete(request: RequestSnapshot, live: LiveRequest, now: float) -> None:
    """Add the frontend's part. An engine that was started again does not know earlier events."""
    request.age_seconds = now - live.arrival_time
    request.phases = [(phase, request.age_seconds - begin) for phase, begin in live.phases]
    if live.first_token_time is not None:
        request.queue_seconds = phase_seconds(live.phases, request.age_seconds)["queue"]
        request.num_cached_tokens = live.num_cached_tokens
        if not any(event.kind == "first_token" for event in request.events):
            request.events.append(RequestEvent("first_token", now - live.first_token_time, 1))
            request.events.sort(key=lambda event: -event.age_seconds)
    request.events.insert(0, RequestEvent("arrived", request.age_seconds, live.num_prompt_tokens))
    request.slo_class = live.slo_class
    request.slo_slack_seconds = slo_slack_seconds(live, request.num_output_tokens, now)


def slo_slack_seconds(live: LiveRequest, num_output_tokens: int, now: float) -> float | None:
    """Time until the first target is missed, below 0 once one is; None without targets.

    The target for the mean time per token is missed when the next token comes later than that: for n tokens so far,
    n times the target after the first.
    """
    arrival, first_token, targets = live.arrival_time, live.first_token_time, live.slo_targets
    slacks = []
    if targets.ttft_ms is not None:
        slack = arrival + targets.ttft_ms / 1000 - (now if first_token is None else first_token)
        if first_token is None or slack < 0:
            slacks.append(slack)
    if targets.tpot_ms is not None and first_token is not None:
        slacks.append(first_token + max(num_output_tokens, 1) * targets.tpot_ms / 1000 - now)
    if targets.e2e_ms is not None:
        slacks.append(arrival + targets.e2e_ms / 1000 - now)
    return min(slacks, default=None)


def combine_engines(engines: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """All engines as one; see `EngineSnapshot`."""
    if len(engines) == 1:
        return engines[0]
    up = [one for one in engines if one.up]
    ranks = [rank for one in engines for rank in one.ranks]
    steps = [one.step_seconds for one in engines]
    last = [one.last_step for one in engines]
    return EngineSnapshot(
        bool(up),
        engines[0].pid,
        sum(one.restarts for one in engines),
        sum(one.max_num_seqs for one in engines),
        sum(one.max_num_batched_tokens for one in engines),
        answered=bool(up) and all(one.answered for one in up),
        step=sum(one.step for one in engines),
        batches_in_flight=sum(one.batches_in_flight for one in engines),
        step_seconds=StepSeconds(
            max(one.schedule for one in steps), max(one.execute for one in steps), max(one.update for one in steps)
        ),
        last_step=StepComposition(
            sum(one.num_requests for one in last), sum(one.num_tokens for one in last),
            sum(one.num_prefill_tokens for one in last), sum(one.num_decode_tokens for one in last),
        ),
        ranks=[RankSnapshot(rank, one.pid, one.up, one.step_seconds_p50) for rank, one in enumerate(ranks)],
        queues=QueueDepths(to_engine=sum(one.queues.to_engine for one in engines)),
        engines=list(engines),
    )  # fmt: skip


def combine_cores(answers: Sequence[EngineCoreSnapshot | None], num_blocks: Sequence[int]) -> EngineCoreSnapshot | None:
    """The requests and blocks of all engines, those of one after those of the other; the rest is the first one's.

    Args:
        answers: of each engine, None where it has not answered; this function takes them over.
        num_blocks: of each engine.
    """
    if len(answers) == 1 or not any(answers):
        return answers[0]
    all_answered = [answer for answer in answers if answer is not None]
    firsts = np.cumsum([0, *num_blocks]).tolist()
    blocks = PackedBlocks(all_answered[0].blocks.block_size, firsts[-1])
    requests: list[RequestSnapshot] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        requests += answer.requests
        own = answer.blocks
        blocks.block_ids += [_shifted(table, firsts[index]) for table in own.block_ids]
        blocks.cached_block_ids += _shifted(own.cached_block_ids, firsts[index])
        blocks.cached_depths += own.cached_depths
        blocks.cached_roots += own.cached_roots
    first = all_answered[0]
    return EngineCoreSnapshot(
        first.step, first.batches_in_flight, first.step_seconds, first.last_step, first.ranks, requests, blocks
    )


def _shifted(block_ids: bytes, first: int) -> bytes:
    return (np.frombuffer(block_ids, np.int32) + np.int32(first)).astype(np.int32).tobytes()


def combine_blocks(
    core: EngineCoreSnapshot, requests: Sequence[RequestSnapshot]
) -> tuple[BlocksSnapshot, PrefixTreeSnapshot]:
    """Unpack the block pool.

    Args:
        core: as it came; only the ids of its requests and its blocks are read.
        requests: the snapshot's requests: what owners are indices into.
    """
    packed = core.blocks
    indices = {request.id: index for index, request in enumerate(requests)}
    owner = np.full(packed.num_blocks, -1, np.int32)
    ref_count = np.zeros(packed.num_blocks, np.int32)
    tables = [(indices.get(request.id), table) for request, table in zip(core.requests, packed.block_ids, strict=True)]
    for index, table in reversed(tables):  # so that the first of several owners is kept
        if index is not None:
            block_ids = np.frombuffer(table, np.int32)
            owner[block_ids] = index
            ref_count[block_ids] += 1
    cached = np.zeros(packed.num_blocks, np.int32)
    cached[np.frombuffer(packed.cached_block_ids, np.int32)] = 1
    blocks = BlocksSnapshot(packed.block_size, packed.num_blocks, owner.tolist(), ref_count.tolist(), cached.tolist())
    return blocks, _prefix_tree(packed, ref_count)


def _prefix_tree(packed: PackedBlocks, ref_count: npt.NDArray[np.int32]) -> PrefixTreeSnapshot:
    block_ids = np.frombuffer(packed.cached_block_ids, np.int32)
    if not len(block_ids):
        return PrefixTreeSnapshot()
    roots, tree_of_block = np.unique(np.frombuffer(packed.cached_roots, np.int64), return_inverse=True)
    num_blocks = np.bincount(tree_of_block)
    num_references = np.zeros(len(roots), np.int32)
    np.maximum.at(num_references, tree_of_block, ref_count[block_ids])
    hottest = np.lexsort((-num_blocks, -num_references))[:NUM_HOTTEST_PREFIXES]
    return PrefixTreeSnapshot(
        num_cached_blocks=len(block_ids),
        num_roots=len(roots),
        depth=int(np.frombuffer(packed.cached_depths, np.int32).max()) + 1,
        hottest=[PrefixSnapshot(int(num_blocks[i]), int(num_references[i])) for i in hottest],
    )
