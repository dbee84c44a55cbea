"""Everything that crosses a process or a stage, as msgspec structs (msgpack on the wire, never pickle).

::

    frontend ── EngineCoreRequest, abort ──► EngineCore ── SchedulerOutput ──► Worker
    frontend ◄───── EngineCoreOutputs ────── EngineCore ◄─ ModelRunnerOutput ── Worker
"""

import enum

import msgspec

from quire_engine.config import EngineCoreConfig
from quire_engine.draft_chances import DraftChances
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.lora import AdaptableModules, Adapter
from quire_engine.pooling import NO_POOLING_INFO, Pooled, PoolingInfo, PoolingParams
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.slo import NO_TARGETS, SLOTargets
from quire_engine.snapshot import EngineCoreSnapshot
from quire_engine.stats import SchedulerStats, StepStats
from quire_engine.timeline import PhaseChange

TokenLogprobs = list[tuple[int, float, int]]
"""One position's log-probabilities as `(token id, logprob, rank)`: the sampled token first, then the most likely."""


ExpertMove = tuple[int, int, int]
"""A layer, a physical expert, and the expert whose weights it takes over; see `models/expert_placement.py`."""


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives vLLM's (and OpenAI's) word for it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive prompt tokens, packed: a long prompt has too many for one object each.

    ::

        token_ids, logprobs   │ the prompt's token │ most likely │ … │ num_logprobs-th │   one row per position
        ranks                 │ of the prompt's token │                                  the others have 1, 2, …
    """

    start: int
    """Position of the first scored prompt token; at least 1, as nothing predicts token 0."""
    num_logprobs: int
    token_ids: bytes
    """int32, [n, 1 + num_logprobs]."""
    logprobs: bytes
    """float32, [n, 1 + num_logprobs]."""
    ranks: bytes
    """int32, [n]."""


class PromptPart(msgspec.Struct, array_like=True, frozen=True):
    """Positions of a prompt with given hidden states. Their token ids are placeholders: 0 each, or the token of an
    image's states."""

    start: int
    """The first position. Parts of a prompt are in order and do not overlap."""
    length: int
    digest: bytes
    """Identifies the content. The hashes of the KV blocks that the part overlaps include it."""
    tensor: bytes = b""
    """float32, [length, E]: replaces the embeddings of the tokens."""
    grid: tuple[int, ...] = ()
    """Frames, rows and columns of an image's hidden states, where rotary positions have three dimensions."""
    is_bidirectional: bool = False
    """Whether its positions see each other on both sides, as those of Gemma 3's images do. A step that computes any of
    them then computes all that are left."""
    frame_interval: float = 1.0
    """Rotary positions from a frame of the grid to the next."""

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.length

    @property
    def position_shift(self) -> int:
        """What is added to rotary positions after it: the longest side of its grid counts, and not its length."""
        if not self.grid:
            return 0
        return max(int((self.grid[0] - 1) * self.frame_interval) + 1, *self.grid[1:]) - self.length


class RequestType(enum.Enum):
    """First frame of a message to the engine core; the second is the request id, the third the payload.

    With `UTILITY`, the second is the call's number and the third a `UtilityCall`.
    """

    ADD = b"add"
    ABORT = b"abort"
    SHUTDOWN = b"shutdown"
    UTILITY = b"utility"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request: the record of the frontend and of the journal, and the message to the engine
    core. It is never changed.
    """

    request_id: str
    prompt_token_ids: list[int]
    """0 where a part stands."""
    sampling_params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    prompt_parts: list[PromptPart] = []
    arrived_at: float = 0.0
    """On `time.monotonic`, which all processes of a machine share; 0: when the engine core takes it in. Time that it
    spends in the engine core's socket, while a step runs, counts for its objectives."""
    slo_targets: SLOTargets = NO_TARGETS
    """Its class's targets, and its own in their place."""
    prompt: str | None = None
    """Its text, in the frontend alone; None when it came as token ids or hidden states."""
    output_token_ids: list[int] = []
    """Tokens that an earlier engine sampled for it before it died: generation goes on after these."""
    num_preemptions: int = 0
    """Under earlier engines."""
    max_new_tokens: int | None = None
    """Upper bound on the tokens to sample now, whatever its parameters say."""
    is_replay: bool = False
    """Whether an earlier engine had accepted it: then a full queue does not reject it."""
    was_prefilled: bool = False
    """Whether another engine has computed its prompt, and saved its blocks where this one finds them, or will soon."""
    encode_seconds: float = 0.0
    """From its arrival until its images were encoded; 0 without any."""
    eos_token_id: int | None = None
    """The tokenizer's end-of-sequence token, if the checkpoint's configuration does not name it."""


class ErrorCode(enum.Enum):
    """The kind of error that ended a request, where the caller can act on it."""

    UNAVAILABLE = "unavailable"
    """No capacity, or no engine: the same request may succeed later."""
    DEADLINE = "deadline"
    """Its deadline passed while it waited or ran."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended the request; None for end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, if requested."""
    error: str | None = None
    """Why it failed, with `FinishReason.ERROR`."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Log-probabilities of the whole prompt, in chunks; set with the first token, if requested."""
    error_parameter: str | None = None
    """The request's parameter that caused `error`; None if the request is valid."""
    error_code: ErrorCode | None = None
    """The kind of `error`, if it is neither the request's nor the engine's fault."""
    retry_after_seconds: float | None = None
    """With `ErrorCode.UNAVAILABLE`: an estimate of when to try again."""
    num_draft_tokens: int = 0
    """Drafts that the step computed. All new tokens but one are accepted drafts."""
    grammar_seconds: float | None = None
    """Time from its arrival in the engine core until its grammar was compiled; set with the first token."""
    prefill_chunks: list[tuple[float, int]] = []
    """The latest chunks of a long prompt: seconds from its first step, and tokens. Set with the first token."""
    predicted_ttft_seconds: float | None = None
    """The predicted time from its arrival to its first token, if there is a prediction. Set with that or a
    rejection."""
    pooled: Pooled | None = None
    """The result of a request that is pooled."""
    refusal: str | None = None
    """Why it was rejected for lack of capacity: "ttft" (it would miss its objective), "queue_full" or "queue_delay"."""


class Call(msgspec.Struct, array_like=True, tag=True):
    """A call to the engine core or its ranks: one class per call, with its arguments."""


class ResetPrefixCache(Call):
    """Clear the prefix cache."""


class Sleep(Call):
    """Free the memory of the KV cache, and on a GPU move the weights to host memory (level 1); or discard the weights
    as well (level 2)."""

    level: int


class WakeUp(Call):
    """Allocate again what `Sleep` freed."""


class LoadWeights(Call):
    """Load the weights of another folder beside the present ones, in the place of the KV cache. No step may follow
    before `UseWeights`."""

    folder: str


class UseWeights(Call):
    """Compute with the weights of `LoadWeights` from now on, or drop them; and allocate the KV cache again."""

    is_accepted: bool


class TakeSnapshot(Call):
    """Return the engine core's state, for operators."""


class ReportPrefixCache(Call):
    """Report changes of the prefix cache with every message from now on; its present contents count as new."""


class PinAdapter(Call):
    """Load an adapter, if need be, and keep it in memory; or keep it no longer."""

    adapter: Adapter
    is_pinned: bool = True


UtilityCall = (
    ReportPrefixCache | ResetPrefixCache | Sleep | WakeUp | LoadWeights | UseWeights | TakeSnapshot | PinAdapter
)
"""Calls to the engine core, made between two steps."""
UtilityResult = bool | EngineCoreSnapshot
"""The snapshot of `TakeSnapshot`; for the others whether they succeeded."""


class UtilityOutput(msgspec.Struct, array_like=True):
    """The result of a `UtilityCall`."""

    call_id: int
    result: UtilityResult = True
    error: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """One message per step."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    utility_outputs: list[UtilityOutput] = []
    step_stats: StepStats | None = None
    freed_request_ids: list[str] = []
    """Requests that the frontend has aborted, and that hold no blocks any more."""
    cache_events: bytes = b""
    """Changes of the prefix cache since the last message, as in `CacheEvents`, for a frontend that routes by them."""
    phase_changes: list[PhaseChange] = []
    """Requests that were scheduled or preempted since the last message."""
    engine_index: int = 0
    """The replica that sent it; set by the frontend."""


class LockstepArguments(msgspec.Struct, frozen=True):
    """What engine cores that share experts inherit."""

    cores: LockstepHandle
    """Synchronises the engine cores before each step."""
    ranks: LockstepHandle
    """Synchronises all of their ranks in each layer with experts."""


class ProcessArguments(msgspec.Struct):
    """Arguments of an engine core's process: one line of JSON on its stdin."""

    config: EngineCoreConfig
    input_address: str
    output_address: str
    heartbeat_fd: int
    """Inherited descriptor of the heartbeat's shared page."""
    num_blocks: int | None = None
    """Size of the KV cache, as of the engine that it replaces or of those that it joins; unset: by the settings."""
    lockstep: LockstepArguments | None = None
    """Set if it shares experts with other engines."""

    def descriptors(self) -> list[int]:
        """Descriptors that the process inherits."""
        found = [self.heartbeat_fd]
        if self.config.cache.kv_memory is not None:
            found.append(self.config.cache.kv_memory)
        if self.lockstep is not None:
            found += [*self.lockstep.cores.descriptors(), *self.lockstep.ranks.descriptors()]
        return found


class EngineCoreReady(msgspec.Struct):
    """The engine core's first message: the facts that the frontend validates requests with, or why the start failed."""

    vocab_size: int = 0
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    eos_token_ids: list[int] = []
    error: str | None = None
    scheduling_policy: str = "fcfs"
    worker_pids: list[int] = []
    """Processes of the ranks; empty if they run in the engine core's own process."""
    num_kv_cache_tokens: int = 0
    """Tokens of the longest request that fits the whole KV cache."""
    max_num_batched_tokens: int = 0
    cpu_cache_bytes: int = 0
    """Memory of the machine that its KV cache takes once all of it is used; 0 on GPUs and with Ray."""
    hidden_size: int = 0
    num_deepstack_layers: int = 0
    """Layers that take features of images."""
    kv_namespace: str = ""
    """What KV blocks that it saves outside its cache depend on, in JSON; empty: it saves none."""
    pooling: PoolingInfo = NO_POOLING_INFO
    """What the checkpoint offers besides generation."""
    adaptable: AdaptableModules | None = None
    """The layers that LoRA adapters may change; None: requests may name none."""


class NewRequestData(msgspec.Struct, array_like=True):
    """A request that is new to the workers, sent once. They forget a preempted request, which is sent again with its
    output so far.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    """Ids that `min_tokens` excludes: end-of-sequence and the request's own."""
    block_ids: list[int]
    """With several groups of layers, a block of each group in turn. Ids before the window of a group that found only
    its window in the prefix cache are meaningless."""
    num_computed_tokens: int
    prompt_parts: list[PromptPart] = []
    pooling_params: PoolingParams | None = None
    adapter_slot: int = -1
    """The slot that its LoRA adapter has for as long as the workers know it; -1: none."""


class CachedRequestData(msgspec.Struct, array_like=True):
    """What changed for requests that the worker knows, column by column."""

    request_ids: list[str] = []
    new_block_ids: list[list[int]] = []
    """With several groups of layers, a block of each group in turn. Blocks that are freed behind a window are not
    reported: the workers keep their ids and do not read them."""
    num_computed_tokens: list[int] = []
    """Before this step; with async scheduling this includes tokens that only the ranks know."""
    new_token_ids: list[list[int]] = []
    """Tokens sampled since each request's last step, for the ranks that do not sample. Empty with one rank. With async
    scheduling the ranks exchange them, except those of requests with drafts, which are here."""


class GrammarBitmask(msgspec.Struct, array_like=True):
    """The tokens that may come next, for the requests of a step that are sampled and have a grammar."""

    request_ids: list[str]
    bitmask: bytes
    """[rows, ceil(vocabulary / 32)] int32; bit i % 32 of word i // 32 is set if token i is allowed. Each request has
    one row, followed by one row per draft, for the token after that draft."""


class DraftTokens(msgspec.Struct, array_like=True):
    """Drafts of a model on the workers for a request."""

    start: int
    """Position of the first draft: the number of the request's tokens then."""
    token_ids: list[int]
    chances: list[float]
    """For each draft, the estimated chance in (0, 1] that it is accepted if those before it were."""


class KVLoad(msgspec.Struct, array_like=True, omit_defaults=True):
    """Blocks to read into host memory, in this order, up to the first that is missing or damaged."""

    number: int
    """Counts from 1."""
    slot: int
    """The cell in which the ranks report how many were read; see `kv_connector/board.py`."""
    block_hashes: list[bytes]
    is_coming: bool = False
    """Whether another engine may still be saving them: then the rank waits a short time for a missing one."""


class KVPlacement(msgspec.Struct, array_like=True):
    """Blocks of a load to write to the KV cache. The load's other blocks are not needed any more."""

    number: int
    """The load's."""
    first: int
    """Index of the first block in the load."""
    block_ids: list[list[int | None]]
    """For each block its id in each group of layers but that of states; None where no token will see it."""
    state_id: int | None = None
    """The block for the state after the last one, whose parts are the last of the load; None without states."""


class KVConnectorMetadata(msgspec.Struct, array_like=True, omit_defaults=True):
    """What the workers do for a KV connector before they compute a step, in this order."""

    forgets_loads: bool = False
    """End all earlier loads: a step has failed, and some ranks may not know them."""
    saves: list[tuple[bytes, list[int]]] = []
    """For each full block to save its hash, and its id in each group of layers but that of states."""
    placements: list[KVPlacement] = []
    ended_loads: list[int] = []
    """Loads whose blocks are not needed any more."""
    loads: list[KVLoad] = []
    """Loads that begin; no step waits for them."""
    state_saves: list[tuple[list[bytes], int]] = []
    """For each state to save the hashes of its parts, and the id of its block."""


class AdapterLoad(msgspec.Struct, array_like=True):
    """A LoRA adapter to read into host memory."""

    number: int
    """Counts from 1. A rank reports the load by it; see `adapters/board.py`."""
    cell: int
    """Its place in memory. What was there is not needed any more."""
    adapter: Adapter


class AdapterOrders(msgspec.Struct, array_like=True, omit_defaults=True):
    """What the workers do for LoRA adapters before they compute a step, in this order."""

    loads: list[AdapterLoad] = []
    """Loads that begin; no step waits for them."""
    slots: list[tuple[int, int]] = []
    """Slots of the layers' tables, and the cell of the adapter that each of them gets."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step: how many tokens to compute for which request. Prefill and decode differ only in that number."""

    num_scheduled_tokens: dict[str, int]
    new_requests: list[NewRequestData] = []
    cached_requests: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    dropped_request_ids: list[str] = []
    """Finished or preempted since the last step: the worker forgets them first."""
    grammar_bitmask: GrammarBitmask | None = None
    step: int = 0
    """Its number; the scheduler counts from 1."""
    draft_token_ids: dict[str, list[int]] = {}
    """Drafts, for requests whose last token this step computes. They count as scheduled tokens: the step samples after
    each."""
    num_drafts_wanted: dict[str, int] = {}
    """How many tokens the workers draft after this step for requests that it samples, which have blocks for them."""
    least_draft_chance: float = 0.0
    """If all drafts together are accepted with less than this chance, another one is not worth its time."""
    draft_chances: list[DraftChances] = []
    """How well drafts' chances predict acceptance, if drafts are wanted: for sampled requests, and for greedy ones."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    adapter_orders: AdapterOrders | None = None
    generation: int | None = None
    """Identifies the synchronisation with other engines in this step, if they share experts; see `ipc/lockstep.py`."""


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """What one step sampled. A request with a prompt that is not fully computed has no entry.

    A request with drafts has one token per accepted draft, and one more.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """Log-probabilities of the prompt tokens of this step, for requests with `prompt_logprobs`."""
    drafts: dict[str, DraftTokens] = {}
    """For requests in `num_drafts_wanted`, if they have any."""
    draft_seconds: float = 0.0
    """Time of drafting, at the end of the step."""
    first_draft_seconds: float = 0.0
    """Part of these, until each request had its first draft."""
    drafting_stopped: bool = False
    """Whether requests have fewer drafts than wanted because another one had too little chance."""
    pooled: dict[str, Pooled] = {}
    """Results of pooled requests whose prompt is computed."""


class DetermineNumBlocks(Call):
    """Return how many KV blocks fit the memory."""


class InitializeCache(Call):
    """Allocate the KV cache; return how many bytes of the machine's memory it takes once it is used, 0 on a GPU."""

    num_blocks: int


class CountStateParts(Call):
    """Return in how many parts, each as large as keys and values of a block, a KV connector keeps a state of the
    rank."""


class ConnectKV(Call):
    """Start a KV connector; return the bytes of the rank's part of a block."""

    namespace: bytes
    """What saved blocks depend on besides their hashes; see `kv_connector/namespace.py`."""
    num_state_parts: int = 1
    """The largest `CountStateParts` of any rank."""


class DescribeKV(Call):
    """Return a digest of what keys and values are computed with: device, kernels and libraries."""


class UsesGpu(Call):
    """Return whether the rank computes on a GPU."""


class MoveExperts(Call):
    """Send weights of experts to the ranks that take them over, which keep them aside."""

    moves: list[ExpertMove]


class PlaceExperts(Call):
    """Compute with the weights of the last `MoveExperts` from now on."""


WorkerCall = (
    DetermineNumBlocks
    | InitializeCache
    | DescribeKV
    | CountStateParts
    | ConnectKV
    | UsesGpu
    | Sleep
    | WakeUp
    | LoadWeights
    | UseWeights
    | MoveExperts
    | PlaceExperts
)
"""Calls to the ranks between two steps. Each returns a number, 0 if it has no result."""


class ExecuteModel(Call, tag=""):
    """Compute a step. Its tag is empty because it is sent a thousand times a second."""

    scheduler_output: SchedulerOutput


class StepNanoseconds(Call):
    """Return the median time of the rank's own computation in its last steps; 0 without any."""


class ForgetGroups(Call):
    """Reset the rank's groups: their shared memory is reset once all ranks have answered."""


class Shutdown(Call):
    """End the process. There is no response."""


WorkerProcessCall = ExecuteModel | WorkerCall | StepNanoseconds | ForgetGroups | Shutdown
"""Calls to the processes of the ranks."""


class WorkerRequest(msgspec.Struct, array_like=True):
    """A call, the same to all ranks."""

    call_id: int
    call: WorkerProcessCall


class WorkerResponse(msgspec.Struct, array_like=True, omit_defaults=True):
    """One rank's result of a `WorkerRequest`. If a step succeeds, only the output rank responds."""

    call_id: int
    """0, which no call has, reports that the worker is ready or could not start."""
    result: int = 0
    output: ModelRunnerOutput | None = None
    error: str | None = None
    error_type: str = ""
    """Name of the exception's class, if `error` is its text alone."""
    is_aborted: bool = False
    """Whether this rank failed only because another one did."""
