"""Tensors and parameters → GenerateRequest."""

import json
from typing import Any

import numpy as np
import pytest
from quire_backend.model_config import RETURN_FLAGS
from quire_backend.request import (
    LONG_PROMPT,
    MAX_PARAMETERS_LENGTH,
    Embeds,
    LongConversation,
    operation_of,
    parse_request,
    traceparent_parameter,
)
from quire_engine.errors import RequestError, UnknownAdapterError
from quire_engine.frontend.chat_template import Conversation
from quire_engine.sampling_params import SamplingParams, convert_parameter
from quire_engine.slo import RequestSLO


def test_plain_text(request_of: Any) -> None:
    parsed = parse_request(request_of(text_input="Hi"))
    assert parsed.prompt == "Hi"
    assert parsed.request_options.label == "label"
    assert parsed.sampling_params == SamplingParams()
    assert parsed.options.stream is False
    assert parsed.options.prepend_prompt is True
    assert parsed.options.outputs == frozenset()


def test_token_ids(request_of: Any) -> None:
    parsed = parse_request(request_of(input_ids=[5, 6, 7]))
    assert parsed.prompt == [5, 6, 7]
    assert parsed.options.prepend_prompt is False


def test_hidden_states(request_of: Any) -> None:
    request = request_of(prompt_embeds=[[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]])
    parsed = parse_request(request)
    assert isinstance(parsed.prompt, Embeds)
    request._tensors["prompt_embeds"][:] = 9  # the server's memory, which the next request gets
    assert parsed.prompt.rows.tolist() == [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert parsed.options.prepend_prompt is False
    with pytest.raises(RequestError, match="text_input and prompt_embeds are both given"):
        parse_request(request_of(prompt_embeds=[[0.5]], text_input="Hi"))
    with pytest.raises(RequestError, match="exclude_input_in_output is false"):
        parse_request(request_of(prompt_embeds=[[0.5]], exclude_input_in_output=False))


def test_nul_is_text(request_of: Any) -> None:
    assert parse_request(request_of(text_input="a\0b")).prompt == "a\0b"


def test_a_client_of_vllm_backend(request_of: Any) -> None:
    params = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
    parsed = parse_request(request_of(params, text_input="Hi", stream=True, sampling_parameters=json.dumps(params)))
    assert parsed.sampling_params == SamplingParams(temperature=0.1, top_p=0.95, max_tokens=100)
    assert parsed.options.stream


def test_typed_inputs(request_of: Any) -> None:
    parsed = parse_request(
        request_of(
            text_input="Hi", max_tokens=7, min_tokens=2, temperature=0.1, top_p=0.9, top_k=5, min_p=0.05,
            seed=2**64 - 1, stop_words=["a", "é"], stop_token_ids=[3, 4], ignore_eos=True,
            include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2,
        )
    )  # fmt: skip
    assert parsed.sampling_params == SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.1, top_p=0.9, top_k=5, min_p=0.05, seed=2**64 - 1, stop=["a", "é"],
        stop_token_ids=[3, 4], ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2,
    )  # fmt: skip


def test_each_value_is_converted_once(request_of: Any, monkeypatch: Any) -> None:
    names = []

    def convert(name: str, value: Any) -> Any:
        names.append(name)
        return convert_parameter(name, value)

    monkeypatch.setattr("quire_backend.request.convert_parameter", convert)
    monkeypatch.setattr("quire_engine.sampling_params.convert_parameter", convert)
    parsed = parse_request(request_of({"stop": "x"}, text_input="Hi", top_k=3, sampling_parameters={"min_p": "0.5"}))
    assert parsed.sampling_params == SamplingParams(stop=["x"], top_k=3, min_p=0.5)
    assert sorted(names) == ["min_p", "stop", "top_k"]


def test_fp32_agrees_with_json(request_of: Any) -> None:
    parsed = parse_request(request_of(text_input="Hi", temperature=0.1, sampling_parameters={"temperature": 0.1}))
    assert parsed.sampling_params.temperature == 0.1


@pytest.mark.parametrize(
    ("parameters", "inputs", "name"),
    [
        ({"max_tokens": 3}, {"max_tokens": 4}, "max_tokens"),
        ({"max_tokens": 3}, {"sampling_parameters": {"max_tokens": "4"}}, "max_tokens"),
        ({}, {"temperature": 0.1, "sampling_parameters": {"temperature": 0.2}}, "temperature"),
        ({"stop": "a"}, {"stop_words": ["b"]}, "stop"),
        ({"ignore_eos": "true"}, {"ignore_eos": False}, "ignore_eos"),
    ],
)
def test_what_is_said_twice_must_agree(request_of: Any, parameters: Any, inputs: Any, name: Any) -> None:
    with pytest.raises(RequestError, match="must agree") as caught:
        parse_request(request_of(parameters, text_input="Hi", **inputs))
    assert caught.value.parameter == name
    assert str(caught.value).startswith(name)


def test_a_conversation_may_go_on_to_the_end_of_the_context(request_of: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    parsed = parse_request(request_of(messages=json.dumps(messages)))
    assert (parsed.prompt, parsed.sampling_params.max_tokens) == (Conversation(messages), None)
    assert not parsed.options.prepend_prompt
    parsed = parse_request(request_of({"max_tokens": 3}, messages=json.dumps(messages)))
    assert parsed.sampling_params.max_tokens == 3


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}] * 20_000,
        [{"role": "user", "content": 'x\n\u00e9"' * 40_000}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000, "more": {"a": [None, 1.5, True]}}],
    ],
    ids=["many messages", "a long one", "many parts"],
)
@pytest.mark.parametrize("with_tools", [True, False])
def test_a_long_conversation_is_read_later_and_the_same(request_of: Any, messages: Any, with_tools: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] if with_tools else []
    parsed = parse_request(request_of(messages=json.dumps({"messages": messages, "tools": tools})))
    assert isinstance(parsed.prompt, LongConversation)
    assert parsed.prompt.parse(20_000) == Conversation(messages, tools)
    if len(messages) > 1:
        with pytest.raises(RequestError, match="messages holds 20000 items in one place; they cannot fit"):
            parsed.prompt.parse(19_999)
    assert parsed.sampling_params.max_tokens is None


@pytest.mark.parametrize(
    "text",
    ["[" * 1_000_000, "[" + "0," * 2_000_000 + "0]",
     "[" * LONG_PROMPT + "]" * LONG_PROMPT, "[{" + " " * 100_000, '"' + "x" * 100_000 + '"',
     "0" * 100_000, '{"messages":' * 20_000],
    ids=["open", "numbers", "deep", "cut off", "a string", "a number", "deep objects"],
)  # fmt: skip
def test_a_long_text_that_is_no_conversation(request_of: Any, text: str) -> None:
    prompt = parse_request(request_of(messages=text)).prompt
    with pytest.raises(RequestError, match=r"messages (is not JSON|must be a JSON list|holds \d+ commas and brackets)"):
        prompt.parse(1024)


def test_parameters_longer_than_any_that_are_valid_are_not_read(request_of: Any) -> None:
    blanks = " " * MAX_PARAMETERS_LENGTH
    with pytest.raises(RequestError, match=r"sampling_parameters has .* characters; at most"):
        parse_request(request_of(text_input="Hi", sampling_parameters="{}" + blanks))
    with pytest.raises(RequestError, match=r"parameters has .* characters; at most"):
        parse_request(request_of({"stop": blanks}, text_input="Hi"))


def test_null_says_nothing(request_of: Any) -> None:
    parsed = parse_request(request_of({"max_tokens": 3}, text_input="Hi", sampling_parameters={"max_tokens": None}))
    assert parsed.sampling_params.max_tokens == 3


def test_parameters_of_the_server_are_passed_over(request_of: Any) -> None:
    parse_request(request_of({"triton_enable_empty_final_response": True}, text_input="Hi"))


@pytest.mark.parametrize(
    ("parameters", "inputs", "message"),
    [
        ({}, {}, "text_input is missing"),
        ({}, {"text_input": "Hi", "input_ids": [1]}, "text_input and input_ids"),
        ({}, {"messages": "[]", "input_ids": [1]}, "input_ids and messages are both given"),
        ({}, {"messages": "[{"}, "messages is not JSON"),
        ({}, {"messages": "{}"}, "messages must be a JSON list of messages, or an object"),
        ({}, {"messages": '{"messages": [], "tool": []}'}, "of them with add_generation_prompt, chat_template_kwargs"),
        ({}, {"messages": '{"messages": [], "tools": [1]}'}, "messages: Expected `object`, got `int`"),
        ({}, {"messages": "[" * 60_000}, "messages is not JSON"),
        ({}, {"messages": "[]", "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({}, {"text_input": b"\xff"}, "text_input is not valid UTF-8 at byte 0"),
        ({}, {"text_input": ["a", "b"]}, "text_input holds 2 values"),
        ({}, {"text_input": "Hi", "stop_words": [b"\xff"]}, "stop_words is not valid UTF-8"),
        ({}, {"text_input": "Hi", "sampling_parameters": "{"}, "sampling_parameters is not JSON"),
        ({}, {"text_input": "Hi", "sampling_parameters": "[1]"}, "sampling_parameters must be a JSON object"),
        ({}, {"text_input": "Hi", "sampling_parameters": "[" * 100_000}, "sampling_parameters is not JSON"),
        ({}, {"text_input": "Hi", "sampling_parameters": {"temprature": 1}}, "did you mean 'temperature'"),
        ({}, {"text_input": "Hi", "sampling_parameters": '{"temperature": NaN}'}, "temperature is nan"),
        ({"urgency": 1}, {"text_input": "Hi"}, "unknown sampling parameter 'urgency'"),
        ({}, {"text_input": "Hi", "temperature": float("inf")}, "temperature is inf"),
        ({}, {"text_input": "Hi", "max_tokens": 0}, "max_tokens is 0"),
        ({}, {"text_input": "Hi", "stop_words": ["x"] * 10_000}, "stop is 10000 strings"),
        ({}, {"text_input": "Hi", "stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({}, {"input_ids": [1], "exclude_input_in_output": False}, "exclude_input_in_output"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(request_of: Any, parameters: Any, inputs: Any, message: Any) -> None:
    with pytest.raises(RequestError, match=message):
        parse_request(request_of(parameters, **inputs))


@pytest.mark.parametrize("nothing", ["", [""], []])
def test_empty_lists_of_words_are_none(request_of: Any, nothing: Any) -> None:
    """Over HTTP an input cannot be left empty; clients that send every parameter send an empty string."""
    said = {"stop_words": nothing, "bad_words": nothing} if nothing else {}
    parsed = parse_request(
        request_of(text_input="Hi", **said, sampling_parameters={"stop": nothing, "bad_words": nothing})
    )
    assert parsed.sampling_params == SamplingParams()
    with pytest.raises(RequestError, match="stop is a string of 0 characters"):
        parse_request(request_of(text_input="Hi", stop_words=["a", ""]))


def test_the_id_of_an_http_body_is_no_parameter(request_of: Any) -> None:
    assert parse_request(request_of({"id": "mine"}, text_input="Hi")).sampling_params == SamplingParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_tokens": 3, "max_tokens": 4}', "max_tokens is said twice in sampling_parameters, as 3 and as 4"),
        ('{"logit_bias": {"5": 1, "5": 2}}', "5 is said twice in sampling_parameters, as 1 and as 2"),
        ('{"logit_bias": {"5": 1, "5": 2}, "max_tokens": 3}', "5 is said twice in sampling_parameters"),
    ],
)
def test_keys_of_json_that_are_there_twice_must_agree(request_of: Any, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}.*; they must agree"):
        parse_request(request_of(text_input="Hi", sampling_parameters=text))
    parse_request(request_of(text_input="Hi", sampling_parameters=text.replace("4", "3").replace("2", "1")))


def test_request_parameters_that_are_there_twice_must_agree(request_of: Any, monkeypatch: Any) -> None:
    """As tritonserver passes on what an HTTP body says at its top and among its `parameters`."""
    request = request_of(text_input="Hi")
    monkeypatch.setattr(request, "parameters", lambda: '{"max_tokens": 8, "max_tokens": 9}')
    with pytest.raises(RequestError, match="max_tokens is said twice in the request parameters, as 8 and as 9"):
        parse_request(request)


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        ({"x" * 100_000: 1}, {}),
        ({"temperature": "x" * 100_000}, {}),
        ({"slo_ttft_ms": "x" * 100_000}, {}),
        ({"lora_name": "x" * 100_000}, {}),
        ({"structured_outputs": "x" * 100_000}, {}),
        ({"stop": "x" * 1000}, {"stop_words": ["y" * 1000]}),
        ({}, {"sampling_parameters": {"slo_class": ["x" * 100_000]}}),
        ({}, {"sampling_parameters": {"traceparent": {"x": "x" * 100_000}}}),
        ({}, {"sampling_parameters": {"seed": 10**4000}}),
        ({}, {"sampling_parameters": '{"max_tokens": ' + "9" * 100_000 + "}"}),
        ({}, {"sampling_parameters": '{"%s": 1, "%s": 2}' % (2 * ("x" * 100_000,))}),
        ({}, {"sampling_parameters": "[" * 100_000}),
        ({}, {"sampling_parameters": "null"}),
        ({}, {"sampling_parameters": {"structured_outputs": [None, True]}}),
        ({"structured_outputs": '{"regex": "a"}'}, {"sampling_parameters": {"structured_outputs": {"regex": "b"}}}),
        ({"max_tokens": True}, {}),
    ],
    ids=range(16),
)  # fmt: skip
def test_messages_are_short_and_speak_of_json(request_of: Any, parameters: Any, inputs: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(request_of(parameters, text_input="Hi", **inputs))
    message = str(caught.value)
    assert len(message) < 1000
    for internal in ("NoneType", "None", "True", "dict", "sys.", "recursion", "Params(", "<class"):
        assert internal not in message


@pytest.mark.parametrize("value", [float(2**63 + 12345), 1e23])
def test_an_integer_that_has_lost_digits_is_not_taken_for_another(request_of: Any, value: float) -> None:
    """tritonserver passes on what is longer than 63 bits in an HTTP body as a double."""
    with pytest.raises(RequestError, match=r"^seed is .*; it must be an integer, and one of so many digits has to"):
        parse_request(request_of({"seed": value}, text_input="Hi"))
    assert parse_request(request_of({"seed": str(2**63 + 1)}, text_input="Hi")).sampling_params.seed == 2**63 + 1


@pytest.mark.parametrize("where", ["json", "parameter"])
def test_unknown_lora(request_of: Any, where: Any) -> None:
    said = {"lora_name": "x"}
    request = request_of(said, text_input="Hi") if where == "parameter" else request_of(
        text_input="Hi", sampling_parameters=said
    )  # fmt: skip
    with pytest.raises(UnknownAdapterError, match=r"^LoRA feature is not enabled\.$"):  # as vllm_backend says it
        parse_request(request)


@pytest.mark.parametrize("name", ["image", "embedding_request"])
def test_an_input_that_is_given_as_a_parameter_is_rejected_by_name(request_of: Any, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name} is not supported as a parameter"):
        parse_request(request_of({name: "aGk="}, text_input="Hi"))


def test_a_stream_never_begins_with_the_prompt(request_of: Any) -> None:
    message = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    with pytest.raises(RequestError) as error:  # as vllm_backend says it
        parse_request(request_of(text_input="Hi", stream=True, exclude_input_in_output=False))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("stream", "exclude", "prepend"),
    [(None, None, True), (None, True, False), (None, False, True), (True, None, False), (True, True, False)],
)
def test_exclude_input_in_output(request_of: Any, stream: Any, exclude: Any, prepend: Any) -> None:
    said = {"stream": stream, "exclude_input_in_output": exclude}
    parsed = parse_request(request_of(text_input="Hi", **{k: v for k, v in said.items() if v is not None}))
    assert parsed.options.prepend_prompt is prepend


def test_additional_outputs(request_of: Any) -> None:
    parsed = parse_request(request_of(text_input="Hi", **dict.fromkeys(RETURN_FLAGS, True)))
    assert parsed.options.outputs == frozenset(RETURN_FLAGS.values())
    assert parse_request(request_of(text_input="Hi", return_logprobs=False)).options.outputs == frozenset()


def test_cumulative_logprob_alone_has_logprobs_computed_but_not_shown(request_of: Any) -> None:
    parsed = parse_request(request_of(text_input="Hi", return_cumulative_logprob=True, return_logprobs=True))
    assert parsed.sampling_params.logprobs == 0
    assert parsed.options.logprobs is False
    parsed = parse_request(request_of(text_input="Hi", return_cumulative_logprob=True, logprobs=1))
    assert parsed.sampling_params.logprobs == 1
    assert parsed.options.logprobs is True


def test_nothing_of_the_request_is_kept(request_of: Any) -> None:
    request = request_of(input_ids=[1, 2], stop_token_ids=[3])
    parsed = parse_request(request)
    for tensor in request.inputs():
        np.copyto(tensor.as_numpy(), 0)
    assert parsed.prompt == [1, 2]
    assert parsed.sampling_params.stop_token_ids == [3]


def test_a_timeout_of_triton_is_a_deadline(request_of: Any) -> None:
    request = request_of(text_input="Hi")
    assert parse_request(request).request_options.deadline_ms is None
    request.timeout_us = 1_500_000
    assert parse_request(request).request_options.deadline_ms == 1500.0


def test_structured_outputs_and_n_in_every_place(request_of: Any) -> None:
    asked = {"regex": "[0-9]+"}
    parsed = [
        parse_request(
            request_of(text_input="Hi", sampling_parameters=json.dumps({"structured_outputs": asked, "n": 2}))
        ),
        parse_request(request_of({"structured_outputs": json.dumps(asked), "n": "2"}, text_input="Hi")),
        parse_request(request_of(text_input="Hi", structured_outputs=json.dumps(asked), n=2)),
    ]
    assert len({str(one.sampling_params) for one in parsed}) == 1
    assert parsed[0].sampling_params.n == 2
    assert parsed[0].options.num_sequences == 2
    assert parsed[0].sampling_params.structured_outputs is not None
    assert parsed[0].sampling_params.structured_outputs.regex == "[0-9]+"


def test_output_kind_is_not_the_clients_to_choose(request_of: Any) -> None:
    with pytest.raises(RequestError, match="output_kind cannot be chosen here"):
        parse_request(request_of({"output_kind": "delta"}, text_input="Hi"))


def test_objectives_are_said_where_sampling_parameters_are(request_of: Any) -> None:
    assert parse_request(request_of(text_input="Hi")).request_options.slo == RequestSLO()
    parsed = parse_request(request_of({"slo_class": "batch", "slo_ttft_ms": "12.5"}, text_input="Hi"))
    assert parsed.request_options.slo == RequestSLO(slo_class="batch", ttft_ms=12.5)
    said = {"slo_tpot_ms": 20, "slo_e2e_ms": 1.5, "temperature": 0.5}
    parsed = parse_request(request_of({"slo_e2e_ms": 1.5}, text_input="Hi", sampling_parameters=said))
    assert parsed.request_options.slo == RequestSLO(tpot_ms=20.0, e2e_ms=1.5)
    assert parsed.sampling_params == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    "parameters",
    [
        {"slo_class": 5},
        {"slo_class": "a\0b"},
        {"slo_class": "\ud800"},
        {"slo_ttft_ms": "soon"},
        {"slo_tpot_ms": [1]},
        {"slo_e2e_ms": {}},
    ],
)
def test_objectives_of_a_wrong_type_are_refused_by_name(request_of: Any, parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(RequestError, match=f"^{name} is "):
        parse_request(request_of(text_input="Hi", sampling_parameters=parameters))


def test_objectives_that_are_said_twice_must_agree(request_of: Any) -> None:
    with pytest.raises(RequestError, match="slo_class is 'a' in sampling_parameters but 'b'"):
        parse_request(request_of({"slo_class": "b"}, text_input="Hi", sampling_parameters={"slo_class": "a"}))


def test_trace_context_is_text(request_of: Any) -> None:
    def traceparent_of(request: Any) -> str | None:
        return parse_request(request).request_options.traceparent

    assert traceparent_of(request_of({"traceparent": "00-a-b-01"}, text_input="Hi")) == "00-a-b-01"
    assert traceparent_of(request_of(text_input="Hi")) is None
    header = request_of(text_input="Hi")  # as HTTP's come, and beside the client's own parameter
    header.parameters = lambda: '{"Traceparent": "00-a-b-01"}'
    assert traceparent_of(header) == traceparent_parameter(header) == "00-a-b-01"
    header.parameters = lambda: '{"traceparent": "00-c-d-01", "max_tokens": 3, "traceparent": "00-a-b-01"}'
    assert traceparent_of(header) == traceparent_parameter(header) == "00-c-d-01"
    header.parameters = lambda: '{"max_tokens": 3, "max_tokens": 4}'
    with pytest.raises(RequestError, match=r"^max_tokens is said twice"):
        parse_request(header)
    request = request_of(text_input="Hi", sampling_parameters={"response_id": "cmpl-1" + "x" * 999})
    named = parse_request(request).request_options
    assert (named.response_id[:7], len(named.response_id), named.operation) == ("cmpl-1x", 256, "text_completion")
    messages = '[{"role": "user", "content": "Hi"}]'
    assert parse_request(request_of(messages=messages)).request_options.operation == "chat"
    with pytest.raises(RequestError, match=r"^traceparent is 5"):
        parse_request(request_of(text_input="Hi", sampling_parameters={"traceparent": 5}))


def test_a_long_id_is_cut(request_of: Any, monkeypatch: Any) -> None:
    """It is in every snapshot for as long as the request lives."""
    for id_, label in (("x" * 256, "x" * 256), ("é" * 3_500_000, "é" * 255 + "…")):
        request = request_of(text_input="Hi")
        monkeypatch.setattr(request, "request_id", lambda id_=id_: id_)
        assert parse_request(request).request_options.label == label


def test_how_a_conversation_ends(request_of: Any) -> None:
    def ending(**more: Any) -> Any:
        messages = json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | more)
        prompt = parse_request(request_of(messages=messages)).prompt
        assert isinstance(prompt, Conversation)
        return prompt.add_generation_prompt, prompt.continue_final_message

    assert ending() == ending(add_generation_prompt=True) == ending(continue_final_message=False) == (True, False)
    assert ending(add_generation_prompt=False) == (False, False)
    assert ending(continue_final_message=True) == (True, True)
    for more in ({"add_generation_prompt": True, "continue_final_message": True}, {"add_generation_prompt": 1}):
        with pytest.raises(RequestError, match=r"^messages"):
            ending(**more)


def test_a_request_with_messages_is_a_chat() -> None:
    assert operation_of(["messages", "stream"]) == "chat"
    assert operation_of(["text_input"]) == operation_of([]) == "text_completion"
