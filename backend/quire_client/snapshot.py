"""A model's answer to `introspect`: its requests, KV blocks and ranks at one moment.

Fields missing in an answer, for example of an older server, get their defaults; unknown ones are ignored.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a request."""

    kind: str = ""
    """`arrived`, `scheduled`, `prefill_chunk`, `first_token`, `preempted` or `replayed`."""
    age_seconds: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a request's life. Ages count back from the snapshot, so `start_age` is the larger one."""

    phase: str
    """`held`, `queue`, `prefill`, `decode`, `preempted` or `replayed`."""
    start_age: float
    end_age: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestState:
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
    engine: int = 0
    """The replica that has it, by `index`."""
    slo_class: str = ""
    slo_slack_seconds: float | None = None
    """Time until the next target is missed; negative once it is."""
    start_slack_seconds: float | None = None
    """How long a waiting request's first turn may be put off; negative if its first token will be late."""
    predicted_start_seconds: float | None = None
    """Time until that turn."""
    phases: Sequence[tuple[str, float]] = ()
    """What its time went to so far: each phase, and how long ago it began."""
    events: Sequence[Event] = ()

    def segments(self) -> list[Segment]:
        """The request's life so far, cut where its phase changed."""
        ends = [*(age for _, age in self.phases[1:]), 0.0]
        found = [Segment(phase, start, end) for (phase, start), end in zip(self.phases, ends, strict=False)]
        return [segment for segment in found if segment.start_age > segment.end_age]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """One rank of the engine."""

    rank: int = 0
    pid: int = 0
    up: bool = True
    step_seconds_p50: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """The engine core, its last step and its ranks."""

    up: bool = False
    pid: int = 0
    restarts: int = 0
    step: int = 0
    batches_in_flight: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Median by phase: schedule, execute, update."""
    last_step: Mapping[str, int] = field(default_factory=dict)
    """`num_requests`, `num_tokens`, `num_prefill_tokens`, `num_decode_tokens`."""
    ranks: Sequence[RankState] = ()
    queues: Mapping[str, int] = field(default_factory=dict)
    """Messages that wait: `to_engine`, `responses`."""
    engines: Sequence[Mapping[str, Any]] = ()
    """Each replica by itself, if there are several: then all else is of all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The KV cache, block by block."""

    block_size: int = 0
    num_blocks: int = 0
    owner: Sequence[int] = ()
    """Index into the snapshot's requests, -1 of a block that no request holds."""
    ref_count: Sequence[int] = ()
    cached: Sequence[int] = ()
    """1 where a later request with an equal prefix can use it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """Contents of the prefix cache."""

    num_cached_blocks: int = 0
    num_roots: int = 0
    depth: int = 0
    hottest: Sequence[Mapping[str, int]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One model at one moment."""

    model: str = ""
    version: str = ""
    time_unix: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineState = EngineState()
    requests: Sequence[RequestState] = ()
    blocks: Blocks = Blocks()
    prefix_tree: PrefixTree = PrefixTree()

    @classmethod
    def from_answer(cls, said: Mapping[str, Any]) -> "Snapshot":
        """Read an answer, which has an `engine`."""
        engine = dict(said["engine"])
        engine["ranks"] = [build(RankState, rank) for rank in engine.get("ranks") or ()]
        requests = []
        for request in said.get("requests") or ():
            events = [build(Event, event) for event in request.get("events") or ()]
            requests.append(build(RequestState, {**request, "events": events}))
        return build(
            cls,
            {
                **said,
                "version": str(said.get("version", "")),
                "engine": build(EngineState, engine),
                "requests": requests,
                "blocks": build(Blocks, said.get("blocks") or {}),
                "prefix_tree": build(PrefixTree, said.get("prefix_tree") or {}),
            },
        )


def build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A dataclass from what it knows of an answer; what is missing or null gets its default."""
    known = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known and value is not None})
