"""A model's answer to `introspect`: its requests, KV blocks and ranks at one moment.

Fields missing in an answer, for example of an older server, get their defaults; unknown ones are ignored. The fields
are those of `quire_engine.snapshot`, which a client does not need; a test compares the two.
"""

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a request."""

    kind: str = ""
    """`arrived`, `scheduled`, `prefill_chunk`, `first_token`, `preempted` or `replayed`."""
    age_seconds: float = 0.0
    num_tokens: int = 0


class Segment(msgspec.Struct, frozen=True):
    """A stretch of a request's life. Ages count back from the snapshot, so `start_age` is the larger one."""

    phase: str
    """`encode`, `held`, `queue`, `prefill`, `decode`, `preempted` or `replayed`."""
    start_age: float
    end_age: float


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has not ended."""

    id: str = ""
    label: str = ""
    """The client's own id for it."""
    phase: str = ""
    age_seconds: float = 0.0
    queue_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int | None = None
    num_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0
    adapter: str = ""
    """The name of its LoRA adapter; empty: none."""
    engine: int = 0
    """The replica that has it, by `index`."""
    task: str = ""
    """What it returns instead of tokens, such as `embed`; empty: it generates."""
    slo_class: str = ""
    slo_slack_seconds: float | None = None
    """Time until the next target is missed; negative once it is."""
    start_slack_seconds: float | None = None
    """How long a waiting request's first turn may be put off; negative if its first token will be late."""
    predicted_start_seconds: float | None = None
    """Time until that turn."""
    phases: list[tuple[str, float]] = []
    """What its time went to so far: each phase, and how long ago it began."""
    events: list[Event] = []

    def segments(self) -> list[Segment]:
        """The request's life so far, cut where its phase changed."""
        ends = [*(age for _, age in self.phases[1:]), 0.0]
        found = [Segment(phase, start, end) for (phase, start), end in zip(self.phases, ends, strict=False)]
        return [segment for segment in found if segment.start_age > segment.end_age]


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the engine."""

    rank: int = 0
    pid: int = 0
    up: bool = True
    step_seconds_p50: float | None = None


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the last steps, by phase."""

    schedule: float = 0.0
    execute: float = 0.0
    update: float = 0.0


class StepComposition(msgspec.Struct, frozen=True, kw_only=True):
    """The last step."""

    num_requests: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class QueueDepths(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that wait."""

    to_engine: int = 0
    responses: int = 0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The engine core, its last step and its ranks."""

    up: bool = False
    pid: int = 0
    restarts: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    answered: bool = False
    """Whether the engine core has answered; if not, its part has defaults."""
    step: int = 0
    batches_in_flight: int = 0
    step_seconds: StepSeconds = StepSeconds()
    last_step: StepComposition = StepComposition()
    ranks: list[RankState] = []
    queues: QueueDepths = QueueDepths()
    engines: "list[EngineState]" = []
    """One entry per replica, if there are several; all other fields are then totals."""
    host: str = ""
    """The host of a replica that has joined from another one; empty: the server's."""
    index: int = 0
    """Of a replica, as in a request's `engine`."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests may name."""

    name: str = ""
    folder: str = ""
    """On the server."""
    digest: str = ""
    """SHA-256 of its files, in hexadecimal."""
    rank: int = 0
    """The largest of its matrices'."""
    num_bytes: int = 0
    target_modules: list[str] = []
    """The last parts of the names of the layers that it changes."""
    state: str = ""
    """`disk`, `ready` or `in use`."""
    is_pinned: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_loads: int = 0
    """How often it was loaded, summed over the engines, since they started."""


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, block by block."""

    block_size: int = 0
    num_blocks: int = 0
    owner: list[int] = []
    """Index into the snapshot's requests, -1 of a block that no request holds."""
    ref_count: list[int] = []
    cached: list[int] = []
    """1 where a later request with an equal prefix can use it."""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """Cached prefixes that begin with the same block."""

    num_blocks: int = 0
    num_references: int = 0


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the prefix cache."""

    num_cached_blocks: int = 0
    num_roots: int = 0
    depth: int = 0
    hottest: list[Prefix] = []
    """Those with the most references, then the largest."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one moment."""

    engine: EngineState
    model: str = ""
    version: str = ""
    time_unix: float = 0.0
    settings: dict[str, Any] = {}
    requests: list[RequestState] = []
    num_requests: int = 0
    """All that have not ended; `requests` may have fewer."""
    blocks: Blocks = Blocks()
    prefix_tree: PrefixTree = PrefixTree()
    adapters: list[AdapterInfo] = []
    """The LoRA adapters that requests may name."""
