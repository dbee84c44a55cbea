"""quire_client over the wire: what it sends, what it makes of answers, and how streams are left."""

import asyncio
import inspect
import subprocess
import sys
import threading
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import grpc
import msgspec
import numpy as np
import pytest
from quire_client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    DeadlineExceeded,
    Disconnected,
    EndedAnswer,
    InvalidArgument,
    NotFound,
    Pooled,
    Prompt,
    Scaled,
    Snapshot,
    Unavailable,
)
from quire_client.errors import error_of
from quire_client.pooling import pooled_of
from quire_engine import snapshot as engine_snapshot
from support.fake_triton import MODEL, TOKEN, fake_triton
from support.serving import wait_until
from tritonclient.grpc import service_pb2

WHOLE = "def fib(n):\n    return n"


def test_snapshot_and_cancellation() -> None:
    with fake_triton() as fake, Client(fake.url, TOKEN) as client:
        assert client.models() == [MODEL]
        seen = client.snapshot(MODEL)
        assert client.cancel(MODEL, seen.requests[0].id) is True
        assert client.cancel(MODEL, seen.requests[0].id) is False
        assert fake.state.cancelled == [seen.requests[0].id]


def test_ended_requests_and_scale() -> None:
    with fake_triton() as fake, Client(fake.url, TOKEN) as client:
        fake.state.end(label="a")
        answer = client.ended(MODEL)
        assert [one.label for one in answer.requests] == ["a"]
        assert client.ended(MODEL, answer.cursor).requests == []
        assert client.scale(MODEL, 3) == Scaled(replicas=3, before=1)
        fake.state.num_remote_replicas = 2
        assert client.scale(MODEL, 1) == Scaled(replicas=1, before=3, of_other_hosts=2)


def test_what_an_operator_switches() -> None:
    with fake_triton() as fake, Client(fake.url, TOKEN) as client:
        assert not client.is_sleeping(MODEL)
        client.sleep(MODEL, level=2, mode="abort")
        assert client.is_sleeping(MODEL)
        client.wake_up(MODEL)
        assert not client.is_sleeping(MODEL)
        client.update_weights(MODEL, "/new")
        client.reset_prefix_cache(MODEL)
        assert fake.state.operations == [
            {"introspect": "sleep", "level": 2, "mode": "abort"}, {"introspect": "wake_up"},
            {"introspect": "update_weights", "weights_path": "/new"}, {"introspect": "reset_prefix_cache"},
        ]  # fmt: skip
        stranger = Client(fake.url, "wrong")
        for call in (stranger.sleep, stranger.wake_up, stranger.reset_prefix_cache):
            with pytest.raises(InvalidArgument, match="introspection_token is wrong"):
                call(MODEL)
        stranger.close()


def test_adapters_are_loaded_listed_pinned_and_unloaded() -> None:
    with fake_triton() as fake, Client(fake.url, TOKEN) as client:
        loaded = client.load_lora(MODEL, "sql", "/adapters/sql")
        assert (loaded.name, loaded.folder, loaded.state, loaded.is_pinned) == ("sql", "/adapters/sql", "ready", False)
        with pytest.raises(InvalidArgument, match="lora_name is 'sql'"):
            client.load_lora(MODEL, "sql", "/adapters/new")
        assert client.load_lora(MODEL, "sql", "/adapters/new", load_inplace=True).folder == "/adapters/new"
        pinned = client.pin_lora(MODEL, "sql")
        assert pinned.is_pinned
        assert client.loras(MODEL) == [pinned]
        client.unload_lora(MODEL, "sql")
        assert client.loras(MODEL) == []
        client.generate(MODEL, "x", lora_name="sql", max_tokens=4)
        client.embed(MODEL, "x", lora_name="sql")
        assert [said["lora_name"] for _, said in fake.state.prompts] == ["sql", "sql"]
        with Client(fake.url, "wrong") as other, pytest.raises(InvalidArgument, match="introspection_token is wrong"):
            other.loras(MODEL)


def test_the_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", TOKEN)
    with fake_triton() as fake, Client(fake.url) as client:
        assert client.snapshot(MODEL).model == MODEL
        wrong = Client(fake.url, "wrong")
        with pytest.raises(InvalidArgument, match="introspection_token is wrong"):
            wrong.snapshot(MODEL)
        wrong.close()


def test_a_server_that_is_away_is_named() -> None:
    with fake_triton() as fake:
        url = fake.url
    with Client(url, TOKEN) as client:
        for call in (client.check_live, client.models, lambda: client.snapshot(MODEL)):
            with pytest.raises(Disconnected, match=rf"{url} does not answer"):
                call()
        with pytest.raises(Unavailable):
            client.generate(MODEL, "x")
    with fake_triton() as fake, Client(fake.url) as client:
        client.check_live()  # it does not know that call, and answers


def test_a_stream_brings_text_and_timings() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        options = {"max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
        chunks = list(client.stream(MODEL, "été", parameters={"slo_class": "batch"}, **options))
        assert "".join(chunk.text for chunk in chunks) == WHOLE
        assert [chunk.finish_reason for chunk in chunks] == ["", "", "", "length"]
        assert chunks[-1].metrics["num_output_tokens"] == 4
        assert [chunk.is_final for chunk in chunks] == [False, False, False, True]
        assert [chunk.seconds for chunk in chunks] == sorted(chunk.seconds for chunk in chunks)
        assert fake.state.prompts == [("été", {**options, "slo_class": "batch"})]


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("INVALID_ARGUMENT", "Request for unknown model: 'm' is not found", NotFound),
        ("INVALID_ARGUMENT", "top_p is 2", InvalidArgument),
        ("UNAVAILABLE", "the queue is full", Unavailable),
        ("UNAVAILABLE", "failed to connect to all addresses; ipv4:127.0.0.1:1", Disconnected),
        ("INTERNAL", "it failed", ClientError),
    ],
)
def test_errors_are_of_the_kind_that_the_status_says(code: str, text: str, kind: type[ClientError]) -> None:
    error = grpc.aio.AioRpcError(getattr(grpc.StatusCode, code), grpc.aio.Metadata(), grpc.aio.Metadata(), text)
    assert (type(error_of(error)), str(error_of(error))) == (kind, text)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("x", "text_input"), ("", "text_input"), ([1, 2], "input_ids"), ([], "input_ids"),
        ([{"role": "user", "content": "x"}], "messages"), (np.zeros((2, 4), np.float32), "prompt_embeds"),
    ],
)  # fmt: skip
def test_each_kind_of_prompt_has_its_input(prompt: Prompt, name: str) -> None:
    from quire_client.messages import infer_request, prompt_input

    request = infer_request("m", dict([prompt_input(prompt)]))
    assert [one.name for one in request.inputs] == [name]
    if name == "input_ids":
        assert list(request.inputs[0].shape) == [len(prompt)]
        assert np.frombuffer(request.raw_input_contents[0], "<i4").tolist() == prompt


def test_who_leaves_with_the_last_chunk_cancels_nothing() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        fake.state.lingers_s = 0.3
        for chunk in client.stream(MODEL, "x", max_tokens=4):
            if chunk.is_final:
                break
        wait_until(lambda: fake.state.were_cancelled, "the end of the stream")
        assert fake.state.were_cancelled == [False]


def test_a_silent_stream_beats_and_is_cancelled_when_it_is_closed() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        fake.state.stalls = True
        chunks = client.stream(MODEL, "x", beat=0.1)
        assert [next(chunks).text for _ in range(3)] == ["def ", "", ""]
        chunks.close()
        wait_until(lambda: fake.state.were_cancelled, "the end of the stream")
        assert fake.state.were_cancelled == [True]


def test_a_stream_that_takes_too_long_says_so() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        fake.state.stalls = True
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            list(client.stream(MODEL, "x", timeout=0.3))


def test_a_client_that_is_closed_ends_its_streams_and_its_thread() -> None:
    with fake_triton() as fake:
        fake.state.stalls = True
        client = Client(fake.url)
        chunks = client.stream(MODEL, "x")
        next(chunks)
        client.close()
        client.close()
        with pytest.raises(Cancelled):
            next(chunks)
        with pytest.raises(Cancelled):
            client.models()
        wait_until(lambda: fake.state.were_cancelled, "the end of the stream")
    assert "quire-client" not in {thread.name for thread in threading.enumerate()}


def test_what_is_no_answer_of_quire_is_said() -> None:
    with fake_triton() as fake, Client(fake.url, "any") as client:
        assert not client.has_chat_template(MODEL)
        fake.state.chat_format = {"has_chat_template": True}
        assert client.has_chat_template(MODEL)
        assert not client.takes_images(MODEL)
        fake.state.chat_format["takes_images"] = True
        assert client.takes_images(MODEL)
        for answer in ({}, [], "no", 1):  # such as that of an older server
            fake.state.chat_format = answer  # type: ignore[assignment]
            with pytest.raises(ClientError, match=f"{MODEL} answers chat_format with .*; is it a model of Quire"):
                client.has_chat_template(MODEL)


def test_a_rejected_request_raises_what_the_model_says() -> None:
    with (
        fake_triton() as fake,
        Client(fake.url) as client,
        pytest.raises(InvalidArgument, match="slo_class is 'unknown'"),
    ):
        client.generate(MODEL, "x", slo_class="unknown")


@pytest.mark.parametrize(
    "snapshot",
    [{}, {"engine": None}, {"engine": {"up": "yes"}}, {"engine": {}, "requests": [{"phases": [["queue"]]}]},
     {"engine": {}, "blocks": {"owner": ["x"]}}],
)  # fmt: skip
def test_a_malformed_snapshot_is_a_client_error(snapshot: dict[str, Any]) -> None:
    with fake_triton() as fake, Client(fake.url, TOKEN) as client:
        fake.state.snapshot = snapshot
        with pytest.raises(ClientError, match=f"{MODEL} answers snapshot with .*; is it a model of Quire"):
            client.snapshot(MODEL)


def test_an_unknown_model_is_told_from_an_adapter() -> None:
    unknown = ("'m' is not found", "'m' version 3 is not found", "'m' has no available versions")
    assert all(NotFound(f"Request for unknown model: {text}").is_unknown_model for text in unknown)
    assert not NotFound("lora_name is 'x'; there is none").is_unknown_model


def test_the_sync_face_has_each_method_of_the_asynchronous_one() -> None:
    methods = {name: method for name, method in vars(AsyncClient).items() if not name.startswith("_")}
    assert {"generate", "snapshot", "stream"} <= methods.keys()
    for name, method in methods.items():
        same = getattr(Client, name)
        assert same.__doc__
        assert not inspect.iscoroutinefunction(same)
        if name not in ("close", "stream"):  # which wait for more, and look up meanwhile
            assert (same.__doc__, inspect.signature(same)) == (method.__doc__, inspect.signature(method))


def differences(mine: Any, theirs: Any, path: str, seen: tuple[Any, ...] = ()) -> list[str]:
    """What one type has and the other does not, or what `mine` does not accept of `theirs`."""
    if get_origin(theirs) is Literal:
        theirs = str
    if mine in seen:
        return []
    if isinstance(mine, type) and isinstance(theirs, type) and issubclass(mine, msgspec.Struct):
        if not issubclass(theirs, msgspec.Struct):
            return [f"{path} is {theirs}"]
        ours, others = ({item.encode_name: item.type for item in msgspec.structs.fields(it)} for it in (mine, theirs))
        found = [f"{path}.{name} is in one only" for name in ours.keys() ^ others.keys()]
        for name in ours.keys() & others.keys():
            found += differences(ours[name], others[name], f"{path}.{name}", (*seen, mine))
        return found
    if isinstance(mine, UnionType):
        alternatives = get_args(theirs) if isinstance(theirs, UnionType) else (theirs,)
        return [] if set(alternatives) <= set(get_args(mine)) else [f"{path} is {theirs}, not {mine}"]
    ours, others = get_args(mine), get_args(theirs)
    if (get_origin(mine) or mine, len(ours)) != (get_origin(theirs) or theirs, len(others)):
        return [f"{path} is {theirs}, not {mine}"]
    return [text for pair in zip(ours, others, strict=True) for text in differences(*pair, f"{path}[]", seen)]


def test_answers_are_read_field_by_field_as_the_engine_writes_them() -> None:
    assert differences(Snapshot, engine_snapshot.Snapshot, "snapshot") == []
    assert differences(EndedAnswer, engine_snapshot.EndedRequests, "ended") == []


def test_a_difference_is_found_wherever_it_is() -> None:
    def struct(**kinds: Any) -> Any:
        return msgspec.defstruct("Any", list(kinds.items()))

    for mine, theirs, path in (
        (struct(a=int), struct(a=int, b=int), "x.b is in one only"),
        (struct(a=int), struct(a=float), "x.a is"),
        (struct(a=int), struct(a=int | None), "x.a is"),
        (struct(a=int | None), struct(a=str), "x.a is"),
        (struct(a=str), struct(a=Literal["b"] | None), "x.a is"),
        (struct(a=list[struct(b=int)]), struct(a=list[struct(c=int)]), "x.a[].b is in one only"),
        (struct(a=dict[str, float]), struct(a=dict[str, str]), "x.a[] is"),
        (struct(a=struct(b=int)), struct(a=dict[str, int]), "x.a is"),
    ):
        assert any(text.startswith(path) for text in differences(mine, theirs, "x")), path
    assert differences(struct(a=str | None, b=str), struct(a=str, b=Literal["c"]), "x") == []


def test_many_streams_of_one_asynchronous_client() -> None:
    async def text(client: AsyncClient, prompt: str) -> str:
        return "".join([chunk.text async for chunk in client.stream(MODEL, prompt)])

    async def texts(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            return await asyncio.gather(*(text(client, str(number)) for number in range(20)))

    with fake_triton() as fake:
        assert asyncio.run(texts(fake.url)) == [WHOLE] * 20


def test_schemas_and_symptoms_need_no_grpc() -> None:
    program = (
        "import quire_client, sys; from quire_client import Snapshot, health_details, symptoms\n"
        "print(sorted({'grpc', 'tritonclient', 'numpy'} & set(sys.modules)), hasattr(quire_client, 'Clients'))\n"
        "print(quire_client.Client.__module__, quire_client.NotFound.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] False", "quire_client.client quire_client.errors"]


def test_it_needs_nothing_of_the_engine() -> None:
    program = "import quire_client, sys; print(sorted({'torch', 'transformers', 'quire_engine'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_texts_become_rows_in_one_request() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        embedded = client.embed(MODEL, ["a", "b"], dimensions=2, normalize=None, priority=1)
        assert embedded.data.tolist() == [[0.0, ord("e")], [1.0, ord("e")]]
        assert (embedded.num_prompt_tokens, embedded.labels) == ([3, 3], [])
        assert client.embed(MODEL, [1, 2, 3]).data.shape == (1, 2)
        assert client.embed(MODEL, [[1], [2, 3]]).data.shape == (2, 2)
        assert client.score(MODEL, "query", ["a", "b", "c"]).data.shape == (3, 2)
        assert client.classify(MODEL, "a").data.tolist() == [[0.0, ord("c")]]
        assert fake.state.prompts[0][1] == {"task": "embed", "dimensions": 2, "priority": 1}
    rows = Pooled(data=np.zeros((3, 2), np.float32), num_rows=[2, 1])
    assert [len(part) for part in rows.by_prompt()] == [2, 1]


def test_no_text_and_no_pair_are_rejected_before_they_are_sent() -> None:
    with fake_triton() as fake, Client(fake.url) as client:
        with pytest.raises(InvalidArgument, match="there is no text"):
            client.embed(MODEL, [])
        with pytest.raises(InvalidArgument, match="there is no text"):
            client.score(MODEL, "query", [])
        assert fake.state.prompts == []
        assert client.score(MODEL, "", [""]).data.shape == (1, 2)
        assert client.score(MODEL, "", "").data.shape == (1, 2)


@pytest.mark.parametrize("content", [b"\0" * 6, b"\0" * 12, None], ids=["bytes", "numbers", "nothing"])
def test_malformed_vectors_are_an_error_of_the_model(content: bytes | None) -> None:
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="embeddings", datatype="FP16", shape=[1, 2])
    response.raw_output_contents.extend([] if content is None else [content])
    with pytest.raises(ClientError, match="vectors are malformed"):
        pooled_of(response)
