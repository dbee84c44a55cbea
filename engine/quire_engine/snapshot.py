"""Snapshot: the engine's state at one moment, for operators. Plain data, assembled in two places.

::

    engine core ── EngineCoreSnapshot ──► frontend ── Snapshot ──► operator
    its requests, blocks, steps           + ages, labels, SLO slack, held requests, restarts

The engine core answers between two steps: it copies packed numbers, and the frontend derives all else. Each age is of
one clock: a request's age and its first event of the frontend's, other events of the engine core's. All times are in
seconds.
"""

from typing import Any, Literal

import msgspec

from quire_engine.lora import AdapterInfo
from quire_engine.timeline import RequestPhase

Phase = Literal["held", "waiting", "grammar", "adapter", "prefill", "decode", "preempted"]
"""`held`: no engine has it; `waiting`: for its first step; `grammar`: until that is compiled."""

EventKind = Literal["arrived", "scheduled", "prefill_chunk", "first_token", "preempted", "replayed"]

MAX_EVENTS = 64
"""Events in one request's timeline: the arrival and the latest are kept."""
MAX_WAITING_REQUESTS = 1000
"""Waiting requests in a snapshot: the next to run, and as many that no engine has."""


class RequestEvent(msgspec.Struct):
    """Something that happened to a request."""

    kind: EventKind
    age_seconds: float
    num_tokens: int = 0
    """Tokens of this step; of an arrival the prompt's, of a preemption the lost ones, of a replay the output's."""


class RequestSnapshot(msgspec.Struct):
    """One live request of the engine core: with `n` sequences there is one for each."""

    id: str
    phase: Phase
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0
    adapter: str = ""
    """The name of its LoRA adapter; empty: none."""
    queue_seconds: float | None = None
    """Time until its first step; None before."""
    events: list[RequestEvent] = []
    """The oldest first."""
    start_slack_seconds: float | None = None
    """For a waiting request: the time left for its first step to meet its time to first token, below 0 if it is late;
    None unless the scheduler works for objectives."""
    predicted_start_seconds: float | None = None
    """For a waiting request: the predicted time until its first step, if there is a prediction."""
    # Set by the frontend:
    label: str = ""
    """The client's name for it; it need not be unique."""
    age_seconds: float = 0.0
    phases: list[tuple[RequestPhase, float]] = []
    """Its phases, and how long ago each began."""
    slo_class: str = "default"
    slo_slack_seconds: float | None = None
    """Time until it misses its first target, below 0 afterwards; None without targets."""
    engine: int = 0
    """Index of the engine that has it, as in `EngineSnapshot`."""
    task: str = ""
    """What it returns instead of tokens, such as `embed`; empty: it generates."""


class StepSeconds(msgspec.Struct):
    """Medians of the last steps, by phase."""

    schedule: float = 0.0
    execute: float = 0.0
    update: float = 0.0


class StepComposition(msgspec.Struct):
    """The last step."""

    num_requests: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class RankSnapshot(msgspec.Struct):
    """One rank of the engine."""

    rank: int
    pid: int
    """0 if Ray may run it on another machine."""
    up: bool = True
    step_seconds_p50: float | None = None
    """Its own part of the last steps, without waits for other ranks; None if that is not known."""


class PackedBlocks(msgspec.Struct, array_like=True):
    """The block pool, in compact form: int32 except the roots, which are int64."""

    block_size: int
    num_blocks: int
    block_ids: list[bytes] = []
    """The block table of each request, in the order of the snapshot's requests."""
    cached_block_ids: bytes = b""
    cached_depths: bytes = b""
    """Index of each cached block in its prefix."""
    cached_roots: bytes = b""
    """A number that cached blocks have in common if their prefixes begin with the same block."""


class EngineCoreSnapshot(msgspec.Struct):
    """The engine core's part of a snapshot."""

    step: int
    batches_in_flight: int
    step_seconds: StepSeconds
    last_step: StepComposition
    ranks: list[RankSnapshot]
    requests: list[RequestSnapshot]
    """Running requests in their order, then waiting ones in theirs."""
    blocks: PackedBlocks


class QueueDepths(msgspec.Struct):
    """Messages that wait between processes and threads."""

    to_engine: int = 0
    """Sent to the engine core, and not yet received."""
    responses: int = 0
    """Requests with a response that is not yet sent."""


class EngineSnapshot(msgspec.Struct):
    """The engine as a whole; with `data_parallel_size` engines all of them together, or one in `engines`.

    Together: numbers of requests, tokens, steps and restarts are sums, times are those of the slowest engine, and ranks
    are numbered on. The snapshot's blocks are those of all, engine by engine.
    """

    up: bool
    pid: int
    restarts: int
    max_num_seqs: int
    max_num_batched_tokens: int
    answered: bool = False
    """Whether the engine core has answered; if not, this is the frontend's part alone."""
    step: int = 0
    batches_in_flight: int = 0
    step_seconds: StepSeconds = msgspec.field(default_factory=StepSeconds)
    last_step: StepComposition = msgspec.field(default_factory=StepComposition)
    ranks: list[RankSnapshot] = []
    queues: QueueDepths = msgspec.field(default_factory=QueueDepths)
    engines: "list[EngineSnapshot]" = []
    """Each by itself, if there are several."""
    host: str = ""
    """Its host, if it has joined from another one; empty for several together."""
    index: int = 0
    """Its rank among the replicas, as in a request's `engine`. Replicas that have left leave gaps."""


class BlocksSnapshot(msgspec.Struct):
    """The block map: three columns with a row per block."""

    block_size: int
    num_blocks: int
    owner: list[int] = []
    """Index into the snapshot's requests of the first that refers to the block, or -1."""
    ref_count: list[int] = []
    cached: list[int] = []
    """1 if an equal prefix would find the block, free or not."""


class PrefixSnapshot(msgspec.Struct):
    """Cached prefixes that begin with the same block."""

    num_blocks: int
    num_references: int
    """Live requests that refer to the most shared of its blocks."""


class PrefixTreeSnapshot(msgspec.Struct):
    """The prefix cache as a forest: a cached block's parent is the one before it in its prefix."""

    num_cached_blocks: int = 0
    num_roots: int = 0
    depth: int = 0
    """Blocks of the longest cached prefix."""
    hottest: list[PrefixSnapshot] = []
    """Those with the most references, then the largest."""


class EndedRequest(msgspec.Struct, omit_defaults=True):
    """A request that has ended: `FinishedRequestStats` as the log keeps them."""

    number: int
    """Counts the requests that have ended since the model was loaded, from 0."""
    time_unix: float
    """When it ended."""
    finish_reason: str
    id: str = ""
    label: str = ""
    slo_class: str = ""
    slo_verdict: str = ""
    """`good`, `miss`, or empty."""
    slo_cause: str = ""
    """The objective that was missed first."""
    error: str = ""
    error_code: str = ""
    aborted_by: str = ""
    e2e_seconds: float = 0.0
    """The sum of the phases that follow."""
    encode_seconds: float = 0.0
    """Its images were encoded, or waited for others."""
    held_seconds: float = 0.0
    """No engine had it."""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preempted_seconds: float = 0.0
    """From each loss of its blocks to its next token."""
    replayed_seconds: float = 0.0
    """From each hand-over to another engine, after the death of one, to its next token."""
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_sequences: int = 1
    num_preemptions: int = 0
    num_replays: int = 0
    num_running_before: int = 0
    num_waiting_before: int = 0
    traceparent: str = ""
    task: str = ""
    """What it returned instead of tokens, such as `embed`; empty: it generated."""
    adapter: str = ""
    """The name of its LoRA adapter; empty: none."""
    parameters: dict[str, Any] = {}
    """Those of sampling, or of the task, that differ from their defaults; numbers only, unless text is kept."""
    prompt: str | None = None
    """None for a prompt of token ids, and unless text is kept."""


class EndedRequests(msgspec.Struct):
    """The log of ended requests, or what was added since a cursor."""

    cursor: str
    """Sent with the next query, for requests that have ended since."""
    num_ended: int
    """Since the model was loaded; the last `capacity` of them are kept."""
    capacity: int
    since_unix: float
    """When the model was loaded."""
    slo: dict[str, dict[str, float]]
    """The targets of each class, `ttft`, `tpot` and `e2e`, in seconds, if they are set."""
    requests: list[EndedRequest]
    """The oldest first."""


class Snapshot(msgspec.Struct):
    """The whole snapshot."""

    time_unix: float
    settings: dict[str, Any]
    engine: EngineSnapshot
    requests: list[RequestSnapshot]
    num_requests: int
    """Live requests of the frontend; `requests` may have fewer."""
    blocks: BlocksSnapshot
    prefix_tree: PrefixTreeSnapshot
    adapters: list[AdapterInfo] = []
    """The registered LoRA adapters."""
    model: str = ""
    version: str = ""
