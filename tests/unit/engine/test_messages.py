"""Messages: each survives the wire unchanged, and none carries what the receiver would have to trust."""

from typing import Any

import msgspec
import pytest
from quire_engine.messages import (
    CachedRequestData,
    DetermineNumBlocks,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ExecuteModel,
    FinishReason,
    ForgetGroups,
    GrammarBitmask,
    InitializeCache,
    LoadWeights,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    ResetPrefixCache,
    SchedulerOutput,
    Shutdown,
    Sleep,
    StepNanoseconds,
    TakeSnapshot,
    UsesGpu,
    UseWeights,
    UtilityCall,
    UtilityOutput,
    WakeUp,
    WorkerCall,
    WorkerProcessCall,
    WorkerRequest,
)
from quire_engine.sampling_params import SamplingParams
from quire_engine.stats import FinishedRequestStats, SchedulerStats

PARAMS = SamplingParams(temperature=0.0, stop_token_ids=[3])
PROMPT_LOGPROBS = PromptLogprobs(
    start=1, num_logprobs=0, token_ids=b"\1\0\0\0", logprobs=b"\0\0\x80\xbf", ranks=b"\2\0\0\0"
)

MESSAGES: list[Any] = [
    EngineCoreRequest("r", [1, 2], PARAMS),
    EngineCoreRequest("r", [1, 2], SamplingParams()),
    EngineCoreOutputs(
        [
            EngineCoreOutput("a", [1], FinishReason.STOP, 3, [[(1, -0.5, 1), (2, -1.5, 2)]], None, 16, 1),
            EngineCoreOutput("b", finish_reason=FinishReason.ERROR, error="why"),
            EngineCoreOutput("c", [5]),
            EngineCoreOutput("d", [5], prompt_logprobs=[PROMPT_LOGPROBS]),
            EngineCoreOutput("e", [5], prompt_logprobs=[]),
            EngineCoreOutput(
                "f", finish_reason=FinishReason.ERROR, error="whose", error_parameter="structured_outputs"
            ),
        ],
        SchedulerStats(num_running=1, num_preemptions=2, rank_busy_seconds=[0.5, 1.5]),
    ),
    EngineCoreOutputs(),
    EngineCoreReady(vocab_size=100, max_model_len=50, num_blocks=10, block_size=16, eos_token_ids=[2]),
    EngineCoreReady(error="no checkpoint"),
    SchedulerOutput(
        {"a": 3, "b": 1},
        [NewRequestData("a", [1, 2, 3], 3, PARAMS, [2, 3], [0, 7], 0)],
        CachedRequestData(["b"], [[4]], [8]),
        ["c"],
    ),
    SchedulerOutput({}),
    SchedulerOutput({"a": 1}, grammar_bitmask=GrammarBitmask(["a"], b"\xff\x00\x01\x80")),
    ModelRunnerOutput({"a": [5]}, {"a": [[(5, -0.1, 1)]]}),
    ModelRunnerOutput({}, prompt_logprobs={"a": PROMPT_LOGPROBS}),
    UtilityOutput(3, error="why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


CALLS: dict[Any, list[Any]] = {
    UtilityCall: [
        ResetPrefixCache(),
        Sleep(2),
        WakeUp(),
        LoadWeights("/w"),
        UseWeights(True),
        TakeSnapshot(),
    ],
    WorkerCall: [DetermineNumBlocks(), InitializeCache(9), UsesGpu(), Sleep(1), WakeUp()],
    WorkerProcessCall: [ExecuteModel(SchedulerOutput({"a": 1})), StepNanoseconds(), ForgetGroups(), Shutdown()],
}


@pytest.mark.parametrize("kind", CALLS, ids=["utility", "worker", "process"])
def test_call_is_known_by_its_class(kind: Any) -> None:
    for call in CALLS[kind]:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=kind) == call


def test_a_call_adds_four_bytes_to_a_step() -> None:
    step = SchedulerOutput({"a": 1})
    request = msgspec.msgpack.encode(WorkerRequest(1, ExecuteModel(step)))
    assert len(request) == len(msgspec.msgpack.encode(step)) + 4, "two lists, the number, and an empty tag"


def test_finish_reason_keeps_its_type_on_the_wire() -> None:
    output = EngineCoreOutput("a", finish_reason=FinishReason.ABORT)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineCoreOutput)
    assert decoded.finish_reason is FinishReason.ABORT


def test_bad_sampling_params_inside_a_request_are_refused_on_the_wire() -> None:
    good = EngineCoreRequest("r", [1], SamplingParams(top_p=0.5))
    frame = msgspec.msgpack.encode(good).replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(1.5))
    with pytest.raises(msgspec.ValidationError, match=r"top_p is 1\.5"):
        msgspec.msgpack.decode(frame, type=EngineCoreRequest)


def test_messages_share_no_default_lists() -> None:
    first, second = SchedulerOutput({}), SchedulerOutput({})
    first.dropped_request_ids.append("a")
    first.cached_requests.request_ids.append("a")
    assert second == SchedulerOutput({})


def test_cache_usage_is_the_share_that_live_requests_hold() -> None:
    assert SchedulerStats(num_blocks_used=1, num_blocks_cached=2, num_blocks_free=1).kv_cache_usage == 0.25
    assert SchedulerStats().kv_cache_usage == 0.0


def test_time_per_output_token_leaves_out_the_first() -> None:
    stats = FinishedRequestStats("stop", num_output_tokens=5, generation_seconds=2.0)
    assert stats.time_per_output_token_seconds == 0.5
    assert FinishedRequestStats("stop", num_output_tokens=1).time_per_output_token_seconds is None
