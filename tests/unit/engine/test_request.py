"""Request: when it ends, and what is refused before it starts."""

from typing import Any

import pytest
from quire_engine.errors import RequestError
from quire_engine.messages import EngineCoreReady, EngineCoreRequest, FinishReason, PromptLogprobs
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.validation import max_output_tokens, validate_request

EOS, STOP, OTHER = 2, 5, 9


def after(output: list[int], max_model_len: int = 1000, **params: Any) -> tuple[FinishReason, int | None] | None:
    """`check_stop` of a request with a three-token prompt that ends in the stop ids themselves, and this output."""
    request = Request(
        EngineCoreRequest("r", [EOS, STOP, OTHER], SamplingParams(stop_token_ids=[STOP], **params)),
        [EOS],
        max_model_len,
    )
    request.all_token_ids.extend(output)
    return request.check_stop()


def test_ordinary_token_does_not_stop() -> None:
    assert after([OTHER]) is None


def test_end_of_sequence_stops_without_a_stop_id() -> None:
    assert after([OTHER, EOS]) == (FinishReason.STOP, None)


def test_stop_token_stops_and_is_named() -> None:
    assert after([OTHER, STOP]) == (FinishReason.STOP, STOP)


def test_only_the_last_token_counts() -> None:
    assert after([EOS, STOP, OTHER]) is None


def test_ignore_eos_goes_on_after_end_of_sequence_only() -> None:
    assert after([EOS], ignore_eos=True) is None
    assert after([STOP], ignore_eos=True) == (FinishReason.STOP, STOP)


def test_ignored_end_of_sequence_still_stops_when_asked_for_as_stop_token() -> None:
    request = Request(EngineCoreRequest("r", [1], SamplingParams(stop_token_ids=[EOS], ignore_eos=True)), [EOS])
    request.all_token_ids.append(EOS)
    assert request.check_stop() == (FinishReason.STOP, EOS)


def test_end_of_sequence_that_is_a_stop_token_too_counts_as_end_of_sequence() -> None:
    request = Request(EngineCoreRequest("r", [1], SamplingParams(stop_token_ids=[EOS])), [EOS])
    request.all_token_ids.append(EOS)
    assert request.check_stop() == (FinishReason.STOP, None)


def test_every_end_of_sequence_id_stops() -> None:
    for eos in (2, 3):
        request = Request(EngineCoreRequest("r", [1], SamplingParams()), [2, 3])
        request.all_token_ids.append(eos)
        assert request.check_stop() == (FinishReason.STOP, None)


@pytest.mark.parametrize("last", [EOS, STOP])
def test_nothing_stops_before_min_tokens(last: int) -> None:
    assert after([last], min_tokens=3) is None
    assert after([OTHER, last], min_tokens=3) is None
    stopped = after([OTHER, OTHER, last], min_tokens=3)
    assert stopped is not None
    assert stopped[0] is FinishReason.STOP


def test_max_tokens_ends_for_length() -> None:
    assert after([OTHER], max_tokens=2) is None
    assert after([OTHER, OTHER], max_tokens=2) == (FinishReason.LENGTH, None)


def test_stop_wins_over_length() -> None:
    assert after([OTHER, EOS], max_tokens=2) == (FinishReason.STOP, None)


def test_max_tokens_holds_under_ignore_eos() -> None:
    assert after([EOS, EOS], max_tokens=2, ignore_eos=True) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_model_len_ends_for_length(max_tokens: int | None) -> None:
    assert after([OTHER], max_model_len=5, max_tokens=max_tokens) is None
    assert after([OTHER, OTHER], max_model_len=5, max_tokens=max_tokens) == (FinishReason.LENGTH, None)


def test_output_is_limited_by_max_tokens_or_by_the_context_whichever_is_less() -> None:
    assert max_output_tokens(10, SamplingParams(max_tokens=4), 100) == 4
    assert max_output_tokens(98, SamplingParams(max_tokens=4), 100) == 2
    assert max_output_tokens(10, SamplingParams(max_tokens=None), 100) == 90


def test_request_counts_prompt_and_output_apart() -> None:
    prompt = [1, 2, 3]
    request = Request(EngineCoreRequest("r", prompt, SamplingParams()))
    request.all_token_ids.append(4)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 1, 4)
    assert prompt == [1, 2, 3]


def prompt_logprobs(start: int) -> PromptLogprobs:
    return PromptLogprobs(start=start, num_logprobs=0, token_ids=b"", logprobs=b"", ranks=b"")


def test_prompt_logprobs_are_collected_given_out_once_and_begun_anew_after_a_preemption() -> None:
    request = Request(EngineCoreRequest("r", [1] * 40, SamplingParams(prompt_logprobs=0)))
    assert request.skip_reading_prefix_cache
    for start in (1, 9, 1, 17, 33):
        request.add_prompt_logprobs(prompt_logprobs(start))
    assert [chunk.start for chunk in request.take_prompt_logprobs() or ()] == [1, 17, 33]
    request.add_prompt_logprobs(prompt_logprobs(1))
    assert request.take_prompt_logprobs() is None
    assert not request.skip_reading_prefix_cache, "what was given out need not be computed again"
    assert not Request(EngineCoreRequest("r", [1], SamplingParams())).skip_reading_prefix_cache


def test_finish_reason_reads_like_vllm() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


# -- validate_request ------------------------------------------------------------------------------------------------

LIMITS: dict[str, Any] = {"vocab_size": 100, "max_model_len": 50, "num_kv_cache_tokens": 64}


def validate(prompt: list[int], *, limits: dict[str, Any] | None = None, **params: Any) -> None:
    ready = EngineCoreReady(**{**LIMITS, **(limits or {})})
    validate_request(EngineCoreRequest("r", prompt, SamplingParams(**params)), ready)


@pytest.mark.parametrize(
    ("prompt", "params", "limits", "parameter", "message"),
    [
        ([], {}, {}, "input_ids", "at least one token"),
        ([1, -1], {}, {}, "input_ids", r"token id -1, which is out of vocabulary; ids must be in \[0, 100\)"),
        ([1, 100], {}, {}, "input_ids", r"token id 100, which is out of vocabulary; ids must be in \[0, 100\)"),
        ([1] * 50, {}, {}, "input_ids", "50 tokens; with max_model_len=50"),
        ([1] * 50, {"max_tokens": 51}, {}, "input_ids", "50 tokens; with max_model_len=50"),
        ([1], {"max_tokens": 51, "min_tokens": 50}, {}, "min_tokens", "leaves room for 49"),
        ([1] * 40, {"max_tokens": 50, "min_tokens": 11}, {}, "min_tokens", "leaves room for 10"),
        ([1] * 40, {"max_tokens": None, "min_tokens": 11}, {}, "min_tokens", "leaves room for 10"),
        ([1], {"stop_token_ids": [5, 100]}, {}, "stop_token_ids", r"holds 100; ids must be in \[0, 100\)"),
        ([1], {"stop_token_ids": [-1]}, {}, "stop_token_ids", r"holds -1; ids must be in \[0, 100\)"),
        ([1], {"logit_bias": {5: 1.0, 100: 1.0}}, {}, "logit_bias", r"holds 100; ids must be in \[0, 100\)"),
        ([1], {"logit_bias": {-1: 1.0}}, {}, "logit_bias", r"holds -1; ids must be in \[0, 100\)"),
        ([1], {"allowed_token_ids": [5, 100]}, {}, "allowed_token_ids", r"holds 100; ids must be in \[0, 100\)"),
        ([1], {"bad_words_token_ids": [[5], [1, 100]]}, {}, "bad_words", r"holds 100; ids must be in \[0, 100\)"),
        ([1] * 23_810, {"prompt_logprobs": 20}, {"max_model_len": 10**5}, "prompt_logprobs", "23810 tokens these are"),
        ([1] * 17, {}, {"num_kv_cache_tokens": 16}, "input_ids", "can never fit the KV cache of 16 tokens"),
        ([1] * 16, {"max_tokens": 2}, {"num_kv_cache_tokens": 16}, "max_tokens", "16 tokens with 2 to generate"),
        ([1] * 4, {"max_tokens": None}, {"num_kv_cache_tokens": 16}, "max_tokens", "4 tokens with 46 to generate"),
        ([1] * 4, {"max_tokens": 10**6}, {"num_kv_cache_tokens": 16}, "max_tokens", "4 tokens with 46 to generate"),
    ],
)
def test_request_that_could_never_be_served_is_refused_by_name(
    prompt: list[int], params: dict[str, Any], limits: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        validate(prompt, limits=limits, **params)
    assert error.value.parameter == parameter
    assert parameter in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "params", "limits"),
    [
        ([0, 99], {}, {}),
        ([1] * 49, {"max_tokens": 1}, {}),
        ([1] * 49, {"max_tokens": 50}, {}),
        ([1], {"max_tokens": 50}, {}),
        ([1], {"max_tokens": 51}, {}),
        ([1], {"max_tokens": 2**63 - 1}, {"num_kv_cache_tokens": 49}),
        ([1] * 40, {"max_tokens": 10, "min_tokens": 10}, {}),
        ([1], {"stop_token_ids": [0, 99]}, {}),
        ([1], {"logit_bias": {0: 1.0, 99: 1.0}, "allowed_token_ids": [0, 99], "bad_words_token_ids": [[0, 99]]}, {}),
        ([1] * 16, {"max_tokens": 1}, {"num_kv_cache_tokens": 16}),
        ([1] * 15, {"max_tokens": 2}, {"num_kv_cache_tokens": 16}),
    ],
)
def test_request_that_just_fits_is_let_through(
    prompt: list[int], params: dict[str, Any], limits: dict[str, Any]
) -> None:
    validate(prompt, limits=limits, **params)


def test_prompt_is_called_what_the_caller_calls_it() -> None:
    with pytest.raises(RequestError, match=r"^text_input is empty") as error:
        validate_request(EngineCoreRequest("r", [], SamplingParams()), EngineCoreReady(**LIMITS), "text_input")
    assert error.value.parameter == "text_input"
