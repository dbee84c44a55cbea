"""RequestOutput → tensors and errors."""

import json
from typing import Any

import numpy as np
import pytest
from quire_backend import triton_api
from quire_backend.model_config import OUTPUTS
from quire_backend.request import ResponseOptions
from quire_backend.responses import failure_of, tensors_of
from quire_backend.triton_api import ErrorCode
from quire_engine.messages import ErrorCode as EngineErrorCode
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire_engine.sampling_params import RequestOptions
from quire_engine.slo import RequestSLO
from quire_engine.stats import FinishedRequestStats
from quire_engine.timeline import REQUEST_PHASES

ALL = frozenset(spec.name for spec in OUTPUTS) - {"text_output"}
NUMPY_TYPES = {"TYPE_STRING": np.object_, "TYPE_FP32": np.float32, "TYPE_UINT32": np.uint32, "TYPE_INT32": np.int32}


def output(finish_reason=None, error=None, **fields):
    completion = CompletionOutput(
        text="né", token_ids=[7, 8], cumulative_logprob=-1.5, finish_reason=finish_reason,
        logprobs=[{7: Logprob(-0.5, 1, "n")}, {8: Logprob(float("-inf"), 2, "é"), 9: Logprob(-0.1, 1, "x")}],
    )  # fmt: skip
    return RequestOutput("r", "Hi", [1, 2, 3], [completion], finished=finish_reason is not None, error=error, **fields)


def test_text_alone() -> None:
    tensors = tensors_of(output(), ResponseOptions(stream=True))
    assert list(tensors) == ["text_output"]
    assert tensors["text_output"].tolist() == ["né".encode()]


def test_prompt_goes_first_when_wanted() -> None:
    tensors = tensors_of(output(), ResponseOptions(prepend_prompt=True))
    assert tensors["text_output"].tolist() == ["Hiné".encode()]


def test_every_additional_output_has_the_type_and_shape_of_the_configuration() -> None:
    tensors = tensors_of(output(), ResponseOptions(outputs=ALL, logprobs=True))
    assert tensors.keys() == {spec.name for spec in OUTPUTS}
    for spec in OUTPUTS:
        assert tensors[spec.name].dtype == NUMPY_TYPES[spec.data_type], spec.name
        assert spec.dims in ((-1,), tensors[spec.name].shape), spec.name


def test_values_before_the_end() -> None:
    tensors = tensors_of(output(), ResponseOptions(outputs=ALL, logprobs=True))
    assert tensors["finish_reason"].tolist() == [b"None"]
    assert tensors["cumulative_logprob"].tolist() == [-1.5]
    assert tensors["num_input_tokens"].tolist() == [3]
    assert tensors["num_output_tokens"].tolist() == [2]
    assert tensors["token_ids"].tolist() == [7, 8]
    assert tensors["perf_metrics"].tolist() == [b"null"]
    assert json.loads(tensors["logprobs"][0]) == [
        {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "n"}},
        {
            "8": {"logprob": -9999.0, "rank": 2, "decoded_token": "é"},
            "9": {"logprob": -0.1, "rank": 1, "decoded_token": "x"},
        },
    ]


def test_logprobs_are_json_whatever_the_numbers_are() -> None:
    numbers = {7: Logprob(float("nan"), 1, "n"), 8: Logprob(float("-inf"), 2, "x"), 9: Logprob(-0.25, 3, "y")}
    values = output()
    values.outputs[0].logprobs = [numbers]
    (text,) = tensors_of(values, ResponseOptions(outputs=ALL, logprobs=True))["logprobs"]
    (position,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [item["logprob"] for item in position.values()] == [-9999.0, -9999.0, -0.25]


def test_values_at_the_end() -> None:
    stats = FinishedRequestStats(
        "length", num_output_tokens=3, generation_seconds=0.4, time_to_first_token_seconds=0.2, e2e_seconds=0.6,
        phases=[("queue", 0.0), ("prefill", 0.1), ("decode", 0.2)],
        options=RequestOptions(slo=RequestSLO(slo_class="fast"), label="mine"),
    )  # fmt: skip
    tensors = tensors_of(output("length", metrics=stats), ResponseOptions(outputs=ALL))
    assert tensors["finish_reason"].tolist() == [b"length"]
    metrics = json.loads(tensors["perf_metrics"][0])
    assert metrics["queue_seconds"] == 0.1
    assert sum(metrics[f"{phase}_seconds"] for phase in REQUEST_PHASES) == pytest.approx(0.6)
    assert metrics["time_to_first_token_seconds"] == 0.2
    assert metrics["time_per_output_token_seconds"] == 0.2
    assert metrics["slo_class"] == "fast"
    told = {"finish_reason", "phases", "error_code", "slo_class", "slo_verdict", "slo_cause", "refusal"}
    counted = {name for name in metrics if name.endswith("_seconds") or name.startswith("num_")}
    assert metrics.keys() - counted == told | {"acceptance_length"}, "nothing else of the request leaves the server"


def test_logprobs_that_nobody_asked_for_are_null() -> None:
    tensors = tensors_of(output(), ResponseOptions(outputs=ALL, logprobs=False))
    assert tensors["logprobs"].tolist() == [b"null"]


@pytest.mark.parametrize(
    ("reason", "error", "cancelled", "draining", "code"),
    [
        ("stop", None, False, False, None),
        ("length", None, True, True, None),
        ("abort", None, True, False, ErrorCode.CANCELLED),
        ("abort", None, False, True, ErrorCode.UNAVAILABLE),
        ("abort", None, True, True, ErrorCode.CANCELLED),
        ("error", "it broke", False, False, ErrorCode.INTERNAL),
    ],
)
def test_failures(reason: Any, error: Any, cancelled: Any, draining: Any, code: Any) -> None:
    failure = failure_of(output(reason, error), cancelled=cancelled, draining=draining)
    assert (failure and failure[0]) == code
    if error:
        assert failure[1] == error


def test_every_response_has_one_entry_per_sequence() -> None:
    """A delta holds only the sequences that have something new; the others keep their place."""
    new = [CompletionOutput(2, "c", [3]), CompletionOutput(0, "a", [1], finish_reason="stop")]
    answer = RequestOutput("r", "Hi", [1], sorted(new, key=lambda item: item.index))
    wanted = frozenset({"finish_reason", "token_ids", "num_output_tokens"})
    tensors = tensors_of(answer, ResponseOptions(num_sequences=3, outputs=wanted))
    assert tensors["text_output"].tolist() == [b"a", b"", b"c"]
    assert tensors["finish_reason"].tolist() == [b"stop", b"None", b"None"]
    assert tensors["num_output_tokens"].tolist() == [1, 0, 1]
    assert tensors["token_ids"].tolist() == [1, 3]


def test_prompt_logprobs_begin_with_null() -> None:
    answer = output(prompt_logprobs=[None, {5: Logprob(-0.25, 1, "p")}])
    tensors = tensors_of(answer, ResponseOptions(outputs=frozenset({"prompt_logprobs"})))
    assert json.loads(tensors["prompt_logprobs"][0]) == [
        None,
        {"5": {"logprob": -0.25, "rank": 1, "decoded_token": "p"}},
    ]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"error_parameter": "structured_outputs"}, ErrorCode.INVALID_ARG),
        ({"error_code": EngineErrorCode.UNAVAILABLE, "retry_after_seconds": 2.0}, ErrorCode.UNAVAILABLE),
        ({"error_code": EngineErrorCode.DEADLINE}, ErrorCode.UNAVAILABLE),
        ({}, ErrorCode.INTERNAL),
    ],
)
def test_whose_fault_an_error_was(fields: dict[str, Any], code: ErrorCode) -> None:
    answer = output("error", error="the reason", **fields)
    assert failure_of(answer, cancelled=False, draining=False) == (code, "the reason")


def test_a_log_probability_has_bytes_where_the_text_cannot_show_them() -> None:
    """And an offset where the token is one of the output: messages stay small."""
    entry = {5: Logprob(-0.5, 1, "\N{REPLACEMENT CHARACTER}", [0xE6], 3), 6: Logprob(-1.0, 2, "x")}
    answer = output()
    answer.outputs[0].logprobs = [entry]
    tensors = tensors_of(answer, ResponseOptions(outputs=frozenset({"logprobs"}), logprobs=True))
    assert json.loads(tensors["logprobs"][0]) == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "\N{REPLACEMENT CHARACTER}", "bytes": [0xE6],
                  "text_offset": 3},
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "x"},
        }
    ]  # fmt: skip


def test_prompt_token_ids_come_once_and_the_stop_reason_as_json() -> None:
    options = ResponseOptions(outputs=frozenset({"prompt_token_ids", "stop_reason"}), num_sequences=3)
    completions = [CompletionOutput(0, stop_reason="é"), CompletionOutput(1, stop_reason=7), CompletionOutput(2)]
    for is_first in (True, False):
        answer = RequestOutput("r", "Hi", [1, 2], completions, is_first=is_first)
        tensors = tensors_of(answer, options)
        assert tensors["prompt_token_ids"].tolist() == ([1, 2] if is_first else [])
        assert [json.loads(text) for text in tensors["stop_reason"]] == ["é", 7, None]


@pytest.mark.parametrize("values", [[], [b"a"], [b"", b"x" * 3_000_001, b"", "é".encode() * 700_000, b"\0"]])
def test_a_large_tensor_is_serialized_as_the_stub_does_it_and_copied_once(values: list[bytes]) -> None:
    expected = b"".join(len(value).to_bytes(4, "little") + value for value in values)
    serialized = triton_api.serialize_in_slices(triton_api.byte_strings(values), lambda _: expected)
    assert bytes(serialized) == expected
    assert isinstance(serialized, np.ndarray) is (sum(map(len, values)) > 1 << 20)
