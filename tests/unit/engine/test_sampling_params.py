"""SamplingParams: the ranges, what clients may send as strings, and that the wire is checked like the edge."""

import re
from typing import Any

import msgspec
import pytest
from quire_engine.errors import RequestError
from quire_engine.sampling_params import (
    MAX_ABSOLUTE_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BEAM_LOGPROBS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestOutputKind,
    SamplingParams,
)
from quire_engine.structured_outputs_params import StructuredOutputsParams

NAN, INFINITY = float("nan"), float("inf")

OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e4 + 1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INFINITY}, "temperature"),
    ({"top_p": -0.001}, "top_p"),
    ({"top_p": 1.001}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.001}, "min_p"),
    ({"min_p": 1.001}, "min_p"),
    ({"min_p": NAN}, "min_p"),
    ({"seed": -2}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": 4, "structured_outputs": {"choice": ["yes", "né"]}}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["ok", "x" * (MAX_STOP_STRING_LENGTH + 1)]}, "stop"),
    ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    ({"presence_penalty": 2.01}, "presence_penalty"),
    ({"presence_penalty": NAN}, "presence_penalty"),
    ({"frequency_penalty": -2.01}, "frequency_penalty"),
    ({"frequency_penalty": NAN}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"repetition_penalty": INFINITY}, "repetition_penalty"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"logit_bias": {5: 1.0, 6: MAX_ABSOLUTE_BIAS + 1}}, "logit_bias"),
    ({"logit_bias": {5: -INFINITY}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a\0b"]}, "bad_words"),
    ({"stop": ["a\0"]}, "stop"),
    ({"cache_salt": "tenant\0x"}, "cache_salt"),
    ({"bad_words": ["x" * (MAX_BAD_WORD_LENGTH + 1)]}, "bad_words"),
    ({"bad_words": ["x"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
    ({"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
    ({"bad_words_token_ids": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}, "bad_words_token_ids"),
    ({"bad_words_token_ids": [[1]] * (2 * MAX_BAD_WORDS + 1)}, "bad_words_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"detokenize": False, "stop": ["x"]}, "stop"),
]

IN_RANGE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e4},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": 0},
    {"temperature": 0.0, "n": 2},
    {"seed": 2**64 - 1},
    {"max_tokens": 1},
    {"max_tokens": None, "min_tokens": 1000},
    {"min_tokens": 4, "max_tokens": 4},
    {"min_tokens": 3, "structured_outputs": StructuredOutputsParams(choice=["no", "né"])},
    {"stop": ["x" * MAX_STOP_STRING_LENGTH] * MAX_STOP_STRINGS},
    {"stop_token_ids": [1] * MAX_STOP_TOKEN_IDS},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 1e-4},
    {"repetition_penalty": 1e4},
    {"logit_bias": {}},
    {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), -MAX_ABSOLUTE_BIAS)},
    {"allowed_token_ids": [1] * MAX_ALLOWED_TOKEN_IDS},
    {"bad_words": ["x" * MAX_BAD_WORD_LENGTH] * MAX_BAD_WORDS},
    {"bad_words_token_ids": [[1] * MAX_BAD_WORD_TOKENS] * (2 * MAX_BAD_WORDS)},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": MAX_LOGPROBS},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1},
    {"detokenize": False, "stop_token_ids": [1]},
    {"output_kind": RequestOutputKind.FINAL_ONLY},
]


def short(case: object) -> str:
    """A name for a case."""
    return str(case)[:40]


@pytest.mark.parametrize(("values", "parameter"), OUT_OF_RANGE, ids=short)
def test_value_out_of_range_is_refused_by_name(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError, match=f"^{parameter} is .*; it must be ") as error:
        SamplingParams(**values)
    assert error.value.parameter == parameter


@pytest.mark.parametrize("values", IN_RANGE, ids=short)
def test_value_at_the_edge_of_its_range_is_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_message_holds_the_offending_value() -> None:
    with pytest.raises(RequestError, match=re.escape("top_p is 1.5; it must be in [0, 1]")):
        SamplingParams(top_p=1.5)


def test_error_of_a_request_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1.0)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids) == ([], [])
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == (None, None, [])
    assert (params.prompt_logprobs, params.truncate_prompt_tokens, params.detokenize) == (None, None, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0),
        ("DELTA", 1),
        ("FINAL_ONLY", 2),
    ]


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_top_p_of_zero_is_greedy_as_with_openai() -> None:
    params = SamplingParams(top_p=0.0, temperature=0.7)
    assert params == SamplingParams(temperature=0.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams.from_mapping({"seed": "-1"}) == SamplingParams(seed=-1) == SamplingParams()


def test_lists_may_be_none_and_a_single_string_is_a_list_of_one() -> None:
    nothing: Any = None
    assert SamplingParams(stop=nothing, bad_words=nothing, stop_token_ids=nothing) == SamplingParams()
    one: Any = "END"
    assert SamplingParams(stop=one, bad_words=one) == SamplingParams(stop=["END"], bad_words=["END"])


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_any_penalty_counts(name: str) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 0.5}).has_penalties


def test_params_are_frozen() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 0.0  # type: ignore[misc]


def test_lists_are_not_shared_between_params() -> None:
    assert SamplingParams().stop is not SamplingParams().stop


# -- from clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sent", "value"),
    [
        ("temperature", "0.1", 0.1),
        ("temperature", 1, 1.0),
        ("temperature", "1e-1", 0.1),
        ("top_p", "0.95", 0.95),
        ("min_p", "0", 0.0),
        ("top_k", "40", 40),
        ("top_k", 40.0, 40),
        ("top_k", "-1", -1),
        ("max_tokens", "100", 100),
        ("max_tokens", 100.0, 100),
        ("min_tokens", "3", 3),
        ("seed", str(2**64 - 1), 2**64 - 1),
        ("logprobs", "5", 5),
        ("ignore_eos", "true", True),
        ("ignore_eos", "True", True),
        ("ignore_eos", "1", True),
        ("ignore_eos", "FALSE", False),
        ("skip_special_tokens", "0", False),
        ("skip_special_tokens", False, False),
        ("include_stop_str_in_output", True, True),
        ("stop", "END", ["END"]),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop", [], []),
        ("stop_token_ids", ["5", 6, 7.0], [5, 6, 7]),
        ("stop_token_ids", (1, 2), [1, 2]),
        ("presence_penalty", "-0.5", -0.5),
        ("frequency_penalty", 1, 1.0),
        ("repetition_penalty", "1.1", 1.1),
        ("logit_bias", {"5": "-1.5", 6: 2}, {5: -1.5, 6: 2.0}),
        ("logit_bias", {}, {}),
        ("allowed_token_ids", ["5", 6.0], [5, 6]),
        ("bad_words", ["a", "b c"], ["a", "b c"]),
        ("bad_words", "a", ["a"]),
        ("prompt_logprobs", "3", 3),
        ("truncate_prompt_tokens", "-1", -1),
        ("detokenize", "false", False),
        ("output_kind", "delta", RequestOutputKind.DELTA),
        ("output_kind", 2, RequestOutputKind.FINAL_ONLY),
        ("output_kind", "0", RequestOutputKind.CUMULATIVE),
        ("output_kind", RequestOutputKind.DELTA, RequestOutputKind.DELTA),
    ],
)
def test_client_value_is_converted_to_the_type_of_its_field(name: str, sent: Any, value: Any) -> None:
    params = SamplingParams.from_mapping({name: sent, "max_tokens": 1000} if name != "max_tokens" else {name: sent})
    got = getattr(params, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", [1.0]),
        ("temperature", 10**400),
        ("top_k", 1.5),
        ("top_k", "1.5"),
        ("top_k", float("inf")),
        ("max_tokens", ""),
        ("max_tokens", True),
        ("max_tokens", {}),
        ("seed", "abc"),
        ("ignore_eos", "yes"),
        ("ignore_eos", 1),
        ("ignore_eos", []),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["x"]),
        ("repetition_penalty", "much"),
        ("logit_bias", "5"),
        ("logit_bias", [5, 1.0]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1.5": 1.0}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": 1.0, " 5": 2.0}),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [None]),
        ("bad_words", [5]),
        ("bad_words", {"a": 1}),
        ("prompt_logprobs", True),
        ("truncate_prompt_tokens", 1.5),
        ("detokenize", "no"),
        ("output_kind", "all"),
        ("output_kind", 3),
        ("output_kind", True),
    ],
)
def test_client_value_of_the_wrong_type_is_refused_by_name(name: str, sent: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*; it must be ") as error:
        SamplingParams.from_mapping({name: sent})
    assert error.value.parameter == name


@pytest.mark.parametrize(
    ("values", "parameter"),
    [({"temperature": "-1"}, "temperature"), ({"top_p": "nan"}, "top_p"), ({"seed": "-5"}, "seed")],
)
def test_converted_value_is_checked_like_any_other(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams.from_mapping(values)
    assert error.value.parameter == parameter


CLIENT_FIELDS = set(SamplingParams.__struct_fields__) - {"bad_words_token_ids", "beam_width"}
"""What a client may send; the rest is filled in by the edge."""


def test_what_the_edge_fills_in_is_unknown_to_clients() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'bad_words_token_ids'"):
        SamplingParams.from_mapping({"bad_words_token_ids": [[1]]})
    with pytest.raises(RequestError, match="unknown sampling parameter 'beam_width'"):
        SamplingParams.from_mapping({"beam_width": 2})


def test_only_beam_search_may_ask_for_more_logprobs() -> None:
    assert SamplingParams(logprobs=MAX_BEAM_LOGPROBS, beam_width=2).logprobs == MAX_BEAM_LOGPROBS
    with pytest.raises(RequestError, match="from 0 to 20"):
        SamplingParams(logprobs=MAX_BEAM_LOGPROBS)


def test_unknown_parameter_names_the_nearest_known_one() -> None:
    with pytest.raises(
        RequestError, match=r"^unknown sampling parameter 'temprature'; did you mean 'temperature'\?$"
    ) as error:
        SamplingParams.from_mapping({"temprature": 1})
    assert error.value.parameter == "temprature"


def test_unknown_parameter_with_nothing_near_lists_all_known_ones() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'zzz'; known are ") as error:
        SamplingParams.from_mapping({"zzz": 1})
    assert all(name in str(error.value) for name in CLIENT_FIELDS)


def test_every_field_can_be_sent_by_a_client() -> None:
    params = SamplingParams.from_mapping(
        {
            "temperature": "0.5",
            "top_p": "0.9",
            "top_k": "5",
            "min_p": "0.1",
            "seed": "1",
            "max_tokens": "9",
            "min_tokens": "2",
            "stop": "x",
            "stop_token_ids": ["3"],
            "ignore_eos": "true",
            "include_stop_str_in_output": "true",
            "skip_special_tokens": "false",
            "logprobs": "2",
            "presence_penalty": "1",
            "frequency_penalty": "1",
            "repetition_penalty": "2",
            "logit_bias": {"1": "1"},
            "allowed_token_ids": ["1"],
            "bad_words": ["x"],
            "prompt_logprobs": "1",
            "truncate_prompt_tokens": "5",
            "output_kind": "delta",
            "structured_outputs": '{"regex": "a+"}',
            "n": "2",
            "priority": "-3",
            "cache_salt": "tenant",
            "num_speculative_tokens": "3",
        }
    )
    defaults = SamplingParams()
    assert not SamplingParams.from_mapping({"detokenize": "false"}).detokenize  # excludes stop
    unchanged = [name for name in CLIENT_FIELDS - {"detokenize"} if getattr(params, name) == getattr(defaults, name)]
    assert unchanged == []


def test_null_means_unset() -> None:
    assert SamplingParams.from_mapping({"seed": None, "logprobs": None, "temperature": None}) == SamplingParams()


# -- over the wire ---------------------------------------------------------------------------------------------------


def test_params_survive_the_wire() -> None:
    params = SamplingParams(
        temperature=0.3, seed=2**64 - 1, stop=["ä"], stop_token_ids=[7], max_tokens=None, logprobs=3,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={7: -1.5},
        allowed_token_ids=[1, 2], bad_words=["ö"], bad_words_token_ids=[[1, 2], [3]], prompt_logprobs=2,
        truncate_prompt_tokens=-1, output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


# msgpack has no integer beyond 64 bits.
@pytest.mark.parametrize(
    ("values", "parameter"), [case for case in OUT_OF_RANGE if case[0] != {"seed": 2**64}], ids=short
)
def test_value_out_of_range_is_refused_on_the_wire(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"{parameter} is "):
        msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=SamplingParams)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "0.5"},
        {"max_tokens": 1.5},
        {"stop": "END"},
        {"stop_token_ids": ["1"]},
        {"ignore_eos": 1},
        {"repetition_penalty": "1.5"},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": [1]},
        {"allowed_token_ids": [1.5]},
        {"bad_words": "a"},
        {"bad_words_token_ids": [["1"]]},
        {"output_kind": 3},
        {"bogus": 1},
    ],
    ids=str,
)
def test_wrong_type_or_name_is_refused_on_the_wire(values: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=SamplingParams)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ["END"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "abc"), ("max_tokens", 5.5), ("stop", [1]),
     ("stop_token_ids", ["1"]), ("ignore_eos", 1), ("top_k", True), ("top_k", 10**30)],
)  # fmt: skip
def test_a_value_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.parameter == name


def test_null_means_unset_but_not_for_unknown_names() -> None:
    assert SamplingParams.from_mapping({"max_tokens": None, "seed": None}) == SamplingParams()
    with pytest.raises(RequestError, match="unknown sampling parameter 'bogus'"):
        SamplingParams.from_mapping({"bogus": None})


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="it must be of text"):
        SamplingParams.from_mapping({"stop": ["\udc00"]})


@pytest.mark.parametrize(("name", "value"), [("max_tokens", "1_0"), ("temperature", "1_0.5"), ("temperature", 10**400)])
def test_numbers_that_are_none(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is"):
        SamplingParams.from_mapping({name: value})


@pytest.mark.parametrize(("name", "value"), [("bad_words", ["a\ud800"]), ("cache_salt", "\udfff")])
def test_every_text_must_be_text(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*UTF-8"):
        SamplingParams.from_mapping({name: value})


def test_a_message_is_not_as_long_as_what_was_sent() -> None:
    with pytest.raises(RequestError, match=r"^stop_token_ids is") as caught:
        SamplingParams.from_mapping({"stop_token_ids": "x" * 5_000_000})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "said",
    [
        {"best_of": 1, "use_beam_search": False, "early_stopping": False, "length_penalty": 1.0},
        {"best_of": "1", "use_beam_search": "false", "length_penalty": "1.0", "early_stopping": "0"},
        {"best_of": None, "logits_processors": None, "guided_decoding": None, "spaces_between_special_tokens": True},
    ],
)
def test_parameters_that_are_not_offered_may_ask_for_nothing(said: dict[str, Any]) -> None:
    assert SamplingParams.from_mapping({"max_tokens": 3, **said}) == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 2), ("use_beam_search", True), ("early_stopping", "never"), ("length_penalty", 0.5),
     ("spaces_between_special_tokens", False), ("guided_decoding", {"json": {}}), ("logits_processors", [])],
)  # fmt: skip
def test_parameters_that_are_not_offered_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.parameter == name
