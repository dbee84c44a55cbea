"""LoRA adapters in the backend: requests that name one, operators who change them, and the file that lists them."""

import json
from pathlib import Path
from typing import Any

import pytest
from quire_backend.introspection import TokenGuard, parse_introspection
from quire_backend.settings import load_engine_config
from quire_engine.errors import RequestError

TOKEN = "open sesame, now"


def ask(serving: Any, request_of: Any, **values: Any) -> Any:
    request = request_of(values)
    serving.submit(request)
    (response,) = request.sender.wait()
    return response


@pytest.fixture
def adapters(engine: Any) -> Any:
    for name in ("doll", "sheep"):
        engine.adapters.add(name, f"/adapters/{name}")
    return engine.adapters


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        ({}, {"sampling_parameters": {"lora_name": "doll"}}),
        ({"lora_name": "doll"}, {}),
        ({"lora_name": "doll"}, {"sampling_parameters": {"lora_name": "doll"}}),
    ],
)
def test_a_request_is_computed_with_the_adapter_that_it_names(
    engine: Any, adapters: Any, serve: Any, request_of: Any, said: Any
) -> None:
    parameters, inputs = said
    serve().submit(request_of(parameters, text_input="Hi", **inputs))
    engine.wait_for("add")
    assert engine.added[0].options.adapter.digest == "digest of /adapters/doll"


def test_a_request_for_vectors_may_name_one_too(engine: Any, adapters: Any, serve: Any, request_of: Any) -> None:
    serve().submit(request_of({"task": "embed", "lora_name": "sheep"}, text_input="Hi"))
    engine.wait_for("add")
    assert engine.added[0].options.adapter.name == "sheep"


@pytest.mark.parametrize("kind", [{}, {"task": "embed"}])
def test_an_unknown_adapter_is_told_in_vllm_backends_words_with_the_nearest_name(
    adapters: Any, serve: Any, request_of: Any, kind: dict[str, str]
) -> None:
    serving = serve()

    def refusal(name: str) -> tuple[str, str]:
        request = request_of({**kind, "lora_name": name}, text_input="Hi")
        serving.submit(request)
        error = request.sender.wait()[-1].error
        return error.code, error.message

    words = "is not supported, we currently support ['doll', 'sheep']"
    assert refusal("bactrian") == ("NOT_FOUND", f"LoRA bactrian {words}")
    assert refusal("sheeep") == ("NOT_FOUND", f"LoRA sheeep {words}; did you mean 'sheep'?")
    assert len(refusal("x" * 100_000)[1]) < 400
    for number in range(40):
        adapters.add(f"a{number}", "/a")
    assert "'a29'] and 10 others" in refusal("bactrian")[1]


@pytest.mark.parametrize("value", [1, ["doll"], {"lora_name": "doll"}, True, "do\0ll", "\ud800"])
def test_what_is_no_name_is_rejected(adapters: Any, serve: Any, request_of: Any, value: Any) -> None:
    request = request_of(text_input="Hi", sampling_parameters={"lora_name": value})
    serve().submit(request)
    error = request.sender.wait()[-1].error
    assert (error.code, error.message.startswith("lora_name is ")) == ("INVALID_ARG", True)


def test_two_places_must_name_the_same(adapters: Any, serve: Any, request_of: Any) -> None:
    request = request_of({"lora_name": "doll"}, text_input="Hi", sampling_parameters={"lora_name": "sheep"})
    serve().submit(request)
    assert "they must agree" in request.sender.wait()[-1].error.message


# -- operators ------------------------------------------------------------------------------------------------------


def test_adapters_are_loaded_replaced_pinned_listed_and_unloaded(
    engine: Any, serve: Any, request_of: Any, adapters: Any
) -> None:
    serving = serve(introspection_token=TOKEN)

    def operate(action: str, name: str | None = None, **values: Any) -> Any:
        named = {} if name is None else {"lora_name": name}
        answer = ask(serving, request_of, introspect=action, introspection_token=TOKEN, **named, **values)
        return json.loads(answer.text) if answer.error is None else (answer.error.code, answer.error.message)

    assert [one["name"] for one in operate("loras")] == ["doll", "sheep"]
    loaded = operate("load_lora", "cow", lora_path="/adapters/cow")
    assert (loaded["name"], loaded["folder"], loaded["is_pinned"]) == ("cow", "/adapters/cow", False)
    assert operate("load_lora", "cow", lora_path="/new") == (
        "INVALID_ARG",
        "The lora adapter 'cow' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True.",
    )
    assert operate("load_lora", "cow", lora_path="/new", load_inplace=True)["digest"] == "digest of /new"
    assert operate("pin_lora", "cow")["is_pinned"] is True
    assert operate("unload_lora", "cow") == {}
    for action in ("unload_lora", "pin_lora"):
        assert operate(action, "cow") == ("NOT_FOUND", "lora_name is 'cow'; there is no such adapter")
    assert operate("load_lora", "cow", lora_path="/none") == (
        "INVALID_ARG", "/none: there is no such folder; lora_path must name the folder of an adapter"
    )  # fmt: skip
    assert operate("load_lora", "cow", lora_path="cow") == (
        "INVALID_ARG", "lora_path is 'cow'; it must be an absolute path"
    )  # fmt: skip
    assert adapters.names == ["doll", "sheep"]


def test_names_need_no_token_and_folders_do(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve(introspection_token=TOKEN)
    assert "loras" not in json.loads(ask(serving, request_of, introspect="chat_format").text)
    engine.adapters.add("doll", "/adapters/doll")
    shown = ask(serving, request_of, introspect="chat_format").text
    assert json.loads(shown)["loras"] == ["doll"]
    assert "/adapters" not in shown
    assert "unauthorized" in ask(serving, request_of, introspect="loras").error.message


def test_the_models_own_name_and_a_model_of_several_instances_are_rejected(engine: Any, request_of: Any) -> None:
    from quire_backend.serving import Serving
    from quire_engine.config import FrontendConfig

    for options, words in (({"model": "m"}, "lora_name is 'm', the model's own name"),
                           ({"num_instances": 2}, "the model has 2 instances")):  # fmt: skip
        serving = Serving(engine, FrontendConfig(introspection_token=TOKEN), **options)
        serving.start()
        said = {"introspection_token": TOKEN, "lora_name": "m", "lora_path": "/m"}
        assert words in ask(serving, request_of, introspect="load_lora", **said).error.message
        serving.shutdown()
    assert engine.adapters.names == []


@pytest.mark.parametrize(
    ("said", "parameter"),
    [
        ({"introspect": "load_lora", "lora_name": "a"}, "lora_path"),
        ({"introspect": "load_lora", "lora_path": "/a"}, "lora_name"),
        ({"introspect": "load_lora", "lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"introspect": "load_lora", "lora_name": 1, "lora_path": "/a"}, "lora_name"),
        ({"introspect": "load_lora", "lora_name": "a", "lora_path": ["/a"]}, "lora_path"),
        ({"introspect": "load_lora", "lora_name": "a", "lora_path": "/a\0b"}, "lora_path"),
        ({"introspect": "load_lora", "lora_name": "a", "lora_path": "/a", "load_inplace": 1}, "load_inplace"),
        ({"introspect": "load_lora", "lora_name": "a", "lora_path": "/a", "rank": 8}, "rank"),
        ({"introspect": "load_lora", "lora_name": "a", "lora_path": "/a", "cancel_request_id": "r"},
         "cancel_request_id"),
        ({"introspect": "unload_lora"}, "lora_name"),
        ({"introspect": "unload_lora", "lora_name": "a", "lora_path": "/a"}, "lora_path"),
        ({"introspect": "pin_lora", "lora_name": None}, "lora_name"),
        ({"introspect": "loras", "lora_name": "a"}, "lora_name"),
        ({"introspect": "snapshot", "lora_name": "a"}, "lora_name"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_rejected_by_its_parameter(said: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_introspection(json.dumps({**said, "introspection_token": TOKEN}), TokenGuard(TOKEN))
    assert error.value.parameter == parameter
    with pytest.raises(RequestError, match="introspection_token is missing"):
        parse_introspection(json.dumps(said), TokenGuard(TOKEN))


# -- multi_lora.json ------------------------------------------------------------------------------------------------


def write(folder: Path, adapters: Any, **settings: Any) -> Path:
    (folder / "model.json").write_text(json.dumps({"model": "m", **settings}))
    (folder / "multi_lora.json").write_text(adapters if isinstance(adapters, str) else json.dumps(adapters))
    return folder


@pytest.mark.parametrize("enabled", [True, "true", "True"])
def test_the_file_of_vllm_backend_names_adapters(tmp_path: Path, enabled: Any) -> None:
    file = {"doll": "/adapters/doll", "sheep": "loras/sheep"}
    config = load_engine_config(
        write(tmp_path, file, enable_lora=enabled, lora_modules={"cow": "/cow", "doll": "/adapters/doll"})
    )
    assert config.lora.lora_modules == {
        "doll": "/adapters/doll", "sheep": str(tmp_path / "loras/sheep"), "cow": "/cow",
    }  # fmt: skip


def test_the_settings_of_vllm_backends_tutorial_are_taken(tmp_path: Path) -> None:
    text = {"enforce_eager": "true", "enable_lora": "true", "max_lora_rank": 16, "gpu_memory_utilization": 0.8}
    config = load_engine_config(write(tmp_path, {"alpaca": "/a"}, **text))
    assert (config.model.enforce_eager, config.lora.max_lora_rank) == (True, 16)
    with pytest.raises(ValueError, match="enforce_eager is 'yes'"):
        load_engine_config(write(tmp_path, {}, enforce_eager="yes"))


@pytest.mark.parametrize("settings", [{}, {"enable_lora": False}, {"enable_lora": "false"}])
def test_the_file_is_not_read_unless_adapters_are_enabled(tmp_path: Path, settings: Any) -> None:
    assert load_engine_config(write(tmp_path, "not JSON", **settings)).lora.lora_modules == {}


def test_adapters_may_be_enabled_without_the_file(tmp_path: Path) -> None:
    (write(tmp_path, {}, enable_lora=True) / "multi_lora.json").unlink()
    assert load_engine_config(tmp_path).lora.enable_lora is True


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("{", r"multi_lora\.json is not JSON"),
        ([1], r"multi_lora\.json must hold a JSON object of adapters' names and their folders, not a list"),
        ({"a": 1}, r"multi_lora\.json has 1 for 'a'; it must be the adapter's folder"),
        ({"a": ""}, r"multi_lora\.json has '' for 'a'"),
        ({"a": "/b"}, r"multi_lora\.json has '/b' for 'a', and lora_modules '/a'; they must agree"),
    ],
)
def test_a_malformed_file_is_said_in_one_line(tmp_path: Path, file: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        load_engine_config(write(tmp_path, file, enable_lora=True, lora_modules={"a": "/a"}))
    assert "\n" not in str(error.value)
