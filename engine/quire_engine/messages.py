"""Everything that crosses a process or a stage, as msgspec structs (msgpack on the wire, never pickle).

::

    frontend ── EngineCoreRequest, abort ──► EngineCore ── SchedulerOutput ──► Worker
    frontend ◄───── EngineCoreOutputs ────── EngineCore ◄─ ModelRunnerOutput ── Worker
"""

import enum

import msgspec

from quire_engine.config import EngineCoreConfig
from quire_engine.sampling_params import SamplingParams
from quire_engine.snapshot import EngineCoreSnapshot
from quire_engine.stats import SchedulerStats, StepStats

__all__ = [
    "CachedRequestData",
    "Call",
    "DetermineNumBlocks",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReady",
    "EngineCoreRequest",
    "ErrorCode",
    "ExecuteModel",
    "FinishReason",
    "ForgetGroups",
    "GrammarBitmask",
    "InitializeCache",
    "IsSleeping",
    "ModelRunnerOutput",
    "NewRequestData",
    "ProcessArguments",
    "PromptLogprobs",
    "RequestType",
    "ResetPrefixCache",
    "SchedulerOutput",
    "Shutdown",
    "Sleep",
    "StepNanoseconds",
    "TakeSnapshot",
    "TokenLogprobs",
    "UsesGpu",
    "UtilityCall",
    "UtilityOutput",
    "UtilityResult",
    "WakeUp",
    "WorkerCall",
    "WorkerProcessCall",
    "WorkerRequest",
    "WorkerResponse",
]

TokenLogprobs = list[tuple[int, float, int]]
"""One position's log-probabilities as `(token id, logprob, rank)`: the sampled token first, then the most likely."""


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives vLLM's (and OpenAI's) word for it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive prompt tokens, packed: a long prompt has too many for an object each.

    ::

        token_ids, logprobs   │ the prompt's token │ most likely │ … │ num_logprobs-th │   one row per position
        ranks                 │ of the prompt's token │                                  the others' are 1, 2, …
    """

    start: int
    """Position of the first prompt token that is scored; at least 1, as nothing comes before token 0."""
    num_logprobs: int
    token_ids: bytes
    """int32, [n, 1 + num_logprobs]."""
    logprobs: bytes
    """float32, [n, 1 + num_logprobs]."""
    ranks: bytes
    """int32, [n]."""


class RequestType(enum.Enum):
    """First frame of a message to the engine core; the second is the request id, the third the payload.

    With `UTILITY`, the second is the call's number and the third a `UtilityCall`.
    """

    ADD = b"add"
    ABORT = b"abort"
    SHUTDOWN = b"shutdown"
    UTILITY = b"utility"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request on its way to the engine core."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    deadline_ms: float | None = None
    """Milliseconds from now in which it has to be finished; unset: it may take as long as it does."""
    output_token_ids: list[int] = []
    """What an earlier engine, which died, has sampled for it: generation goes on after these."""
    num_preemptions: int = 0
    """Under earlier engines."""
    max_new_tokens: int | None = None
    """Tokens to sample now at most, whatever its parameters say."""
    is_replay: bool = False
    """Whether an earlier engine had accepted it: then it is not refused because the queue is full."""


class ErrorCode(enum.Enum):
    """What kind of error ended a request, where the caller can do something about it."""

    UNAVAILABLE = "unavailable"
    """For want of capacity, or of an engine: the same request can succeed later."""
    DEADLINE = "deadline"
    """Its own deadline passed while it waited or ran."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended the request; None for end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, when asked for."""
    error: str | None = None
    """Why it failed, with `FinishReason.ERROR`."""
    queue_seconds: float | None = None
    """Time in the waiting queue, with the first token, or with the refusal after a wait for too long."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Of the whole prompt, chunk by chunk, with the first token, when asked for."""
    error_parameter: str | None = None
    """The request's parameter that `error` is about: the caller's fault then. None: ours."""
    error_code: ErrorCode | None = None
    """The kind of `error`, where it is not the request's or the engine's fault."""
    retry_after_seconds: float | None = None
    """With `ErrorCode.UNAVAILABLE`: an estimate of when it is worth trying again."""


class Call(msgspec.Struct, array_like=True, tag=True):
    """What the engine core or its ranks are told to do, with its arguments: a class each."""


class ResetPrefixCache(Call):
    """Forget all cached prefixes."""


class Sleep(Call):
    """Give memory back: the KV cache's (level 1), and the weights' as well (level 2)."""

    level: int


class WakeUp(Call):
    """Have again what `Sleep` gave back."""


class IsSleeping(Call):
    """Say whether the last one of the two above was `Sleep`."""


class TakeSnapshot(Call):
    """Say all that an operator may want to see of this moment."""


UtilityCall = ResetPrefixCache | Sleep | WakeUp | IsSleeping | TakeSnapshot
"""What the engine core can be told between two steps."""
UtilityResult = bool | EngineCoreSnapshot
"""The snapshot, or whether it did what it was told to; of `IsSleeping`, whether it sleeps."""


class UtilityOutput(msgspec.Struct, array_like=True):
    """What came of a `UtilityCall`."""

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
    """Requests that the frontend has aborted: nothing of them is left."""


class ProcessArguments(msgspec.Struct):
    """What the process of an engine core is told on its stdin, as one line of JSON."""

    config: EngineCoreConfig
    input_address: str
    output_address: str
    heartbeat_fd: int
    """Descriptor of the page where it shows that it moves; inherited."""
    num_blocks: int | None = None
    """Size of the KV cache, when it replaces an engine that died: the same as that one's."""


class EngineCoreReady(msgspec.Struct):
    """The engine core's first message: what the edge needs in order to validate, or why there is no engine."""

    vocab_size: int = 0
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    eos_token_ids: list[int] = []
    error: str | None = None
    scheduling_policy: str = "fcfs"
    worker_pids: list[int] = []
    """Processes of the ranks, where they are not the engine core's own."""

    @property
    def num_kv_cache_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.block_size


class NewRequestData(msgspec.Struct, array_like=True):
    """A request that the worker does not know (any more): everything about it, once.

    A preempted request is forgotten by the worker and introduced again like this, its output so far included.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    """Ids that `min_tokens` keeps from being sampled: end-of-sequence and the request's own."""
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, array_like=True):
    """What changed for requests that the worker knows, column by column."""

    request_ids: list[str] = []
    new_block_ids: list[list[int]] = []
    num_computed_tokens: list[int] = []
    """Before this step; with async scheduling, tokens that are known to nobody but the ranks are counted too."""
    new_token_ids: list[list[int]] = []
    """With several ranks, what was sampled since each request's last step: most ranks do not sample. Empty with one
    rank; with async scheduling the ranks tell each other, of all but the requests that had drafts."""


class GrammarBitmask(msgspec.Struct, array_like=True):
    """Which tokens may come next, for the requests of a step that are sampled and have a grammar."""

    request_ids: list[str]
    bitmask: bytes
    """[rows, ceil(vocabulary / 32)] int32; bit i % 32 of word i // 32 is set when token i may come. A row for each
    request, and behind it one for each of its drafts: for the token behind that."""


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step: how many tokens to compute for which request. Prefill and decode differ in nothing but the number."""

    num_scheduled_tokens: dict[str, int]
    new_requests: list[NewRequestData] = []
    cached_requests: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    dropped_request_ids: list[str] = []
    """Finished or preempted since the last step: the worker forgets them first."""
    grammar_bitmask: GrammarBitmask | None = None
    step: int = 0
    """Its number, counted by the scheduler from 1."""
    draft_token_ids: dict[str, list[int]] = {}
    """Guesses at the tokens to come, for requests whose last token is computed. They are among the scheduled tokens:
    the step samples behind each of them, too."""


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """What one step sampled. A request whose prompt is not yet wholly computed has no entry.

    Of a request with drafts, there are as many tokens as drafts were right, and one more.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """Of the prompt tokens that this step came to, for requests that want them."""


class DetermineNumBlocks(Call):
    """Say how many KV blocks there is room for."""


class InitializeCache(Call):
    """Allocate the KV cache."""

    num_blocks: int


class UsesGpu(Call):
    """Say whether it computes on a GPU."""


WorkerCall = DetermineNumBlocks | InitializeCache | UsesGpu | Sleep | WakeUp
"""What the ranks can be told between two steps, wherever they run. Each answers with a number, 0 for want of one."""


class ExecuteModel(Call, tag=""):
    """Compute a step. It has the shortest tag there is: it is sent some thousand times a second."""

    scheduler_output: SchedulerOutput


class StepNanoseconds(Call):
    """Say the median time of the rank's own part of its last steps, 0 when there were none."""


class ForgetGroups(Call):
    """Expect the shared memory of the rank's groups to be as new: they are reset once all ranks have answered."""


class Shutdown(Call):
    """End. It is not answered."""


WorkerProcessCall = ExecuteModel | WorkerCall | StepNanoseconds | ForgetGroups | Shutdown
"""What the processes of the ranks can be told."""


class WorkerRequest(msgspec.Struct, array_like=True):
    """A call, the same to all ranks."""

    call_id: int
    call: WorkerProcessCall


class WorkerResponse(msgspec.Struct, array_like=True, omit_defaults=True):
    """What came of a `WorkerRequest` on one rank. Of a step, only the output rank tells when nothing went wrong."""

    call_id: int
    """0, which no call has: the worker is ready, or could not start."""
    result: int = 0
    output: ModelRunnerOutput | None = None
    error: str | None = None
    error_type: str = ""
    """Name of the exception's class, when `error` is its text; else `error` says it all."""
    is_aborted: bool = False
    """The error is only that another rank had one."""
