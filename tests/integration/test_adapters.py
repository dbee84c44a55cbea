"""LoRA adapters over a real server: Triton's clients, OpenAI's, vllm_backend's; loaded, replaced and unloaded while
requests run. What an adapter says is compared with the checkpoint that it is merged into.
"""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire_client import Client, InvalidArgument, NotFound
from quire_engine import LLM, SamplingParams
from support.adapters import make_adapter, merge_adapter
from support.clients import ask_all, http, metric, run, scrape
from support.processes import eventually
from support.serving import CHECKPOINT, Server, add_model, run_cli, serve

pytestmark = pytest.mark.server

TOKEN = "the token of the tests"
PROMPT = "def fibonacci(n):"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
MODEL, OFF = "vllm_llama_multi_lora", "without"
ONE = "instance_group [ { count: 1 kind: KIND_MODEL } ]\n"
SETTINGS = {"dtype": "float32", "max_model_len": 512, "max_lora_rank": 16}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder / name, CHECKPOINT, rank=rank, seed=rank)
        for name, rank in (("doll", 4), ("sheep", 8), ("cow", 16), ("horse", 2))
    }


@pytest.fixture(scope="module")
def texts(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each adapter's model says, and the base's under the empty name."""
    folder, found = tmp_path_factory.mktemp("merged"), {}
    for name in ("", *adapters):
        path = merge_adapter(folder / name, CHECKPOINT, adapters[name]) if name else CHECKPOINT
        llm = LLM(str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 24)
        found[name] = llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].text
        llm.shutdown()
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model as vllm_backend's tutorial has it, and one without adapters; slow enough to do something in between."""
    repository = tmp_path_factory.mktemp("repository")
    for name, enabled in ((MODEL, "true"), (OFF, "false")):
        add_model(repository, name, {**SETTINGS, "enable_lora": enabled, "kv_cache_memory_bytes": 1 << 24}, ONE)
    shutil.copytree(adapters["doll"], repository / MODEL / "1" / "loras" / "doll")
    file = {"doll": "./loras/doll", "sheep": str(adapters["sheep"])}
    (repository / MODEL / "1" / "multi_lora.json").write_text(json.dumps(file))
    gateway = ("--openai", "--openai-port", "0")
    env = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with serve("--model-repository", str(repository), *gateway, env=env, step_seconds=0.01) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc, TOKEN) as made:
        yield made


@pytest.fixture
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.openai}/v1", api_key=TOKEN, max_retries=0, timeout=60) as made:
        yield made


def test_each_request_of_a_batch_says_what_its_own_adapter_says(server: Server, texts: dict[str, str]) -> None:
    names = ["doll", "", "sheep", "doll", "sheep", ""]
    answers = ask_all(server, [
        {"model": MODEL, "text_input": PROMPT, "exclude_input_in_output": True, "stream": number % 2 == 0,
         "sampling_parameters": {**GREEDY, **({"lora_name": name} if name else {})}}
        for number, name in enumerate(names)
    ])  # fmt: skip
    assert [answer.text for answer in answers] == [texts[name] for name in names]


def test_client_of_vllm_backend_runs_unchanged(server: Server, texts: dict[str, str]) -> None:
    """What its own test of several adapters asks for, in its form: strings as values, the name in the JSON alone."""
    parameters = {"temperature": "0", "top_p": "1", "max_tokens": "12"}

    def ask(name: str, model: str = MODEL) -> Any:
        return run(server, model=model, text_input=PROMPT, stream=False, exclude_input_in_output=True,
                   sampling_parameters={**parameters, "lora_name": name}, parameters=parameters)  # fmt: skip

    for name in ("doll", "sheep"):
        assert ask(name).text == texts[name]
    words = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    assert ask("bactrian").message == words
    assert ask("doll", OFF).message == "LoRA feature is not enabled."
    body = {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "top_p": 1, "max_tokens": 12,
            "lora_name": "sheep", "exclude_input_in_output": True}}  # fmt: skip
    assert http(server, f"/v2/models/{MODEL}/generate", body)[1]["text_output"] == texts["sheep"]
    body["parameters"]["lora_name"] = "unavailable"  # type: ignore[index]
    answer = http(server, f"/v2/models/{MODEL}/generate", body)[1]
    assert answer["error"] == words.replace("bactrian", "unavailable")
    assert http(server, f"/v2/models/{OFF}/generate", body)[1]["error"] == "LoRA feature is not enabled."


def test_openais_client_sees_adapters_as_models(
    server: Server, openai_client: openai.OpenAI, texts: dict[str, str]
) -> None:
    parents = {model.id: model.parent for model in openai_client.models.list()}  # type: ignore[attr-defined]
    assert parents == {MODEL: None, "doll": MODEL, "sheep": MODEL, OFF: None}
    for name in ("doll", "sheep"):
        answer = openai_client.completions.create(model=name, prompt=PROMPT, **GREEDY)
        assert (answer.model, answer.choices[0].text) == (name, texts[name])
        stream = openai_client.completions.create(model=name, prompt=PROMPT, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in stream) == texts[name]
    chats = {
        name: openai_client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "add"}], **GREEDY
        ).choices[0].message.content
        for name in (MODEL, "doll", "sheep")
    }  # fmt: skip
    assert len(set(chats.values())) == 3
    vectors = {name: tuple(openai_client.embeddings.create(model=name, input="x").data[0].embedding)
               for name in (MODEL, "doll")}  # fmt: skip
    assert vectors[MODEL] != vectors["doll"]
    with pytest.raises(openai.NotFoundError, match="'eve' does not exist"):
        openai_client.completions.create(model="eve", prompt=PROMPT)


def test_adapters_come_and_go_while_a_stream_runs(
    server: Server, client: Client, openai_client: openai.OpenAI, adapters: dict[str, Path], texts: dict[str, str]
) -> None:
    whole = client.generate(MODEL, PROMPT, lora_name="sheep", temperature=0, max_tokens=200, ignore_eos=True).text
    begun, streamed = threading.Event(), list[str]()

    def stream() -> None:
        for chunk in client.stream(MODEL, PROMPT, lora_name="sheep", temperature=0, max_tokens=200, ignore_eos=True):
            streamed.append(chunk.text)
            begun.set()

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert begun.wait(60)
    loaded = client.load_lora(MODEL, "cow", str(adapters["cow"]))
    assert (loaded.rank, loaded.folder) == (16, str(adapters["cow"]))
    assert client.generate(MODEL, PROMPT, lora_name="cow", **GREEDY).text == texts["cow"]
    assert openai_client.completions.create(model="cow", prompt=PROMPT, **GREEDY).choices[0].text == texts["cow"]
    with pytest.raises(InvalidArgument, match="The lora adapter 'cow' has already been loaded"):
        client.load_lora(MODEL, "cow", str(adapters["horse"]))
    client.load_lora(MODEL, "cow", str(adapters["horse"]), load_inplace=True)
    assert client.generate(MODEL, PROMPT, lora_name="cow", **GREEDY).text == texts["horse"]
    assert client.pin_lora(MODEL, "cow").is_pinned
    assert {one.name: one.is_pinned for one in client.loras(MODEL)} == {"doll": False, "sheep": False, "cow": True}
    client.unload_lora(MODEL, "cow")
    with pytest.raises(NotFound, match="LoRA cow is not supported"):
        client.generate(MODEL, PROMPT, lora_name="cow", **GREEDY)
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="cow", prompt=PROMPT)
    streaming.join(60)
    assert "".join(streamed) == whole


def test_vllms_routes_load_and_unload(
    server: Server, openai_client: openai.OpenAI, adapters: dict[str, Path], texts: dict[str, str]
) -> None:
    """Operators show the model's token, which this client has as its key."""

    def post(path: str, **body: Any) -> str:
        return openai_client.post(f"/{path}", body=body, cast_to=str)

    done = post("load_lora_adapter", lora_name="horse", lora_path=str(adapters["horse"]))
    assert done == "Success: LoRA adapter 'horse' added successfully."
    assert openai_client.completions.create(model="horse", prompt=PROMPT, **GREEDY).choices[0].text == texts["horse"]
    assert post("unload_lora_adapter", lora_name="horse") == "Success: LoRA adapter 'horse' removed successfully."
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="horse", prompt=PROMPT)


def test_the_command_line_loads_lists_and_unloads(server: Server, adapters: dict[str, Path]) -> None:
    def quire(*arguments: str) -> str:
        done = run_cli("lora", *arguments, "--url", server.grpc, env={"QUIRE_INTROSPECTION_TOKEN": TOKEN})
        return done.stdout + done.stderr

    assert "has the adapter horse" in quire("load", MODEL, "horse", str(adapters["horse"]))
    listed = quire("list", MODEL).splitlines()
    assert [line.split()[0] for line in listed] == ["doll", "sheep", "horse"]
    assert "has unloaded the adapter horse" in quire("unload", MODEL, "horse")
    assert "there is no such adapter" in quire("unload", MODEL, "horse")
    examined = run_cli("doctor", "--model", str(adapters["cow"]))
    assert re.search(r"OK +adapter +cow: LoRA of rank 16 for LlamaForCausalLM, 42 layers", examined.stdout)


def test_requests_are_counted_by_adapter(server: Server) -> None:
    def count(name: str) -> float:
        labels = {"model": MODEL, "adapter": "doll"}
        return sum(one.value for one in scrape(server) if one.name == name and labels.items() <= one.labels.items())

    before = count("quire_lora_requests_total"), count("quire_lora_generation_tokens_total")
    answer = run(server, model=MODEL, text_input=PROMPT, sampling_parameters={**GREEDY, "lora_name": "doll"})
    assert answer.text
    after = count("quire_lora_requests_total"), count("quire_lora_generation_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 12)

    def gauges() -> tuple[bool, list[tuple[str, str]]]:
        infos = [one.labels for one in scrape(server) if one.name == "vllm:lora_requests_info"]
        return metric(server, "quire_lora_adapters", MODEL, state="ready") >= 1, [
            (labels["max_lora"], labels["running_lora_adapters"]) for labels in infos if labels["model"] == MODEL
        ]

    # Gauges follow the engine's statistics, which come after the request's last output.
    assert eventually(lambda: gauges() == (True, [("4", "")])), gauges()
    assert not any(one.name.startswith("quire_lora") and one.labels["model"] == OFF for one in scrape(server))


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"lora_name": ""}, "LoRA  is not supported"),
    ({"lora_name": "Doll"}, "did you mean 'doll'?"),
    ({"lora_name": "x" * 5000}, "(5000 characters) is not supported"),
    ({"lora_name": 7}, "lora_name is 7"),
    ({"lora_name": True}, "lora_name is"),
    ({"introspect": "load_lora", "lora_name": "a", "lora_path": "/a"}, "introspection_token is missing"),
    ({"introspect": "load_lora", "introspection_token": "guess", "lora_name": "a"}, "introspection_token is wrong"),
    ({"introspect": "loras"}, "introspection_token is missing"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a"}, "lora_path is ''"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_path": "/a"}, "lora_name is ''"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a", "lora_path": "/nowhere"},
     "/nowhere: there is no such folder"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a", "lora_path": "a"}, "absolute path"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a", "lora_path": "/etc"},
     "adapter_config.json"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a\nb", "lora_path": "/a"}, "printable"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": MODEL, "lora_path": "/a"},
     "the model's own name"),
    ({"introspect": "load_lora", "introspection_token": TOKEN, "lora_name": "a", "lora_path": "/a", "load_inplace": 2},
     "load_inplace is 2"),
    ({"introspect": "unload_lora", "introspection_token": TOKEN, "lora_name": "eve"}, "there is no such adapter"),
    ({"introspect": "pin_lora", "introspection_token": TOKEN, "lora_name": "eve"}, "there is no such adapter"),
]  # fmt: skip


def test_malformed_calls_are_rejected_and_change_nothing(server: Server, client: Client, texts: dict[str, str]) -> None:
    for parameters, words in MALFORMED:
        status, answer = http(server, f"/v2/models/{MODEL}/generate", {"text_input": PROMPT, "parameters": parameters})
        assert status != 200, parameters
        assert words in answer["error"], (parameters, answer)
        assert "\n" not in answer["error"].strip()
    assert [one.name for one in client.loras(MODEL)] == ["doll", "sheep"]
    assert client.generate(MODEL, PROMPT, lora_name="doll", **GREEDY).text == texts["doll"]
