"""Merges the engine core's and the frontend's views of the same moment into a Snapshot.

It knows no process and no clock. The two sides may have different requests, as the engine core answered a moment
before: those that have ended since are left out, and the frontend alone describes those that are unknown to the engine
core.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quire_engine.frontend.request_state import RequestState
from quire_engine.scheduler.validation import max_output_tokens
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
from quire_engine.timeline import phase_seconds

NUM_HOTTEST_PREFIXES = 8


def combine_requests(
    core: Sequence[RequestSnapshot],
    live: Mapping[str, RequestState],
    labels: Mapping[str, str],
    is_held: Callable[[str], bool],
    now: float,
    max_model_len: int,
) -> list[RequestSnapshot]:
    """The live requests, those of the engine core in its order and then the others by arrival.

    Args:
        core: the engine core's; this function completes them in place.
        live: the frontend's, by id and in order of arrival.
        labels: the clients' names, by the caller's request id.
        is_held: whether no engine has a request.
        now: of the frontend's monotonic clock.
        max_model_len: of the model.
    """
    requests = [request for request in core if request.id in live]
    known = {request.id for request in requests}
    others = [state for request_id, state in live.items() if request_id not in known][:MAX_WAITING_REQUESTS]
    for state in others:
        request, stats = state.request, state.stats
        requests.append(
            RequestSnapshot(
                id=request.request_id,
                phase="held" if is_held(request.request_id) else "waiting",
                num_prompt_tokens=stats.num_prompt_tokens,
                num_output_tokens=stats.num_output_tokens,
                num_preemptions=stats.num_preemptions,
                max_tokens=max_output_tokens(stats.num_prompt_tokens, request.sampling_params, max_model_len),
                priority=request.sampling_params.priority,
            )
        )
    for one in requests:
        _complete(one, live[one.id], now)
        one.label = labels.get(live[one.id].caller_request_id, "")
    return requests


def _complete(request: RequestSnapshot, state: RequestState, now: float) -> None:
    """Add the frontend's part: an engine that was restarted does not know earlier events."""
    age, phases = now - state.request.arrived_at, state.timeline.phases
    request.age_seconds = age
    request.phases = [(phase, age - begin) for phase, begin in phases]
    if state.first_token_time is not None:
        request.queue_seconds = phase_seconds(phases, age)["queue"]
        request.num_cached_tokens = state.stats.num_cached_tokens
        if not any(event.kind == "first_token" for event in request.events):
            request.events.append(RequestEvent("first_token", now - state.first_token_time, 1))
            request.events.sort(key=lambda event: -event.age_seconds)
    request.events.insert(0, RequestEvent("arrived", age, state.stats.num_prompt_tokens))
    options = state.request.options
    request.slo_class = options.slo.slo_class
    if options.pooling_params is not None:
        request.task, request.max_tokens = options.pooling_params.task or "pool", 0
    request.slo_slack_seconds = state.slack_seconds(request.num_output_tokens, now)


def combine_engines(engines: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """All engines as one, as `EngineSnapshot` defines it."""
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
        step_seconds=StepSeconds(*map(max, zip(*map(msgspec.structs.astuple, steps), strict=True))),
        last_step=StepComposition(*map(sum, zip(*map(msgspec.structs.astuple, last), strict=True))),
        ranks=[RankSnapshot(rank, one.pid, one.up, one.step_seconds_p50) for rank, one in enumerate(ranks)],
        queues=QueueDepths(to_engine=sum(one.queues.to_engine for one in engines)),
        engines=list(engines),
    )  # fmt: skip


def combine_cores(answers: Sequence[EngineCoreSnapshot | None], num_blocks: Sequence[int]) -> EngineCoreSnapshot | None:
    """The requests and blocks of all engines, engine by engine; the rest is the first one's.

    Args:
        answers: of each engine, None if it has not answered; this function changes them.
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
        core: unchanged; only the ids of its requests and its blocks are read.
        requests: the snapshot's requests, which owners are indices into.
    """
    packed = core.blocks
    indices = {request.id: index for index, request in enumerate(requests)}
    owner = np.full(packed.num_blocks, -1, np.int32)
    ref_count = np.zeros(packed.num_blocks, np.int32)
    tables = [(indices.get(request.id), table) for request, table in zip(core.requests, packed.block_ids, strict=True)]
    for index, table in reversed(tables):  # the first of several owners stays
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
