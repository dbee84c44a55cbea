"""An LLM and an embedder in one server: vectors over gRPC, HTTP and the gateway, and streams beside bursts of them."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from quire_client import Client, ClientError, InvalidArgument
from quire_engine.frontend.tokenizer import load_tokenizer
from support.serving import CHECKPOINT, Server, run_cli, serve

LLM, EMBEDDER, RERANKER = "llm", "embedder", "reranker"
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 96, "intermediate_size": 132, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 160, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
TEXTS = ["def fib(n):", "import os", "x = 1"]


def make_encoder(folder: Path, kind: str = "BertModel", **sizes: int) -> Path:
    """Write a random BERT of a class of transformers, with tinypy's tokenizer."""
    import transformers  # not every process that collects this file spends two seconds on it

    torch.manual_seed(0)
    getattr(transformers, kind)(transformers.BertConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    load_tokenizer(CHECKPOINT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    encoder = make_encoder(folder / "bert")
    reranker = make_encoder(folder / "reranker", "BertForSequenceClassification", num_labels=1)
    repository = str(folder / "repository")
    slo = 'slo={"default": {"ttft_ms": 0.001, "e2e_ms": 600000}}'  # no first token could be in time
    for path, name, settings in ((CHECKPOINT, LLM, ()), (encoder, EMBEDDER, (slo,)), (reranker, RERANKER, ())):
        added = run_cli("model", "add", str(path), *settings, "--name", name, "--model-repository", repository)
        assert added.returncode == 0, added.stderr
    with serve("--model-repository", repository, "--openai", "--openai-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc) as made:
        yield made


def post(url: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def metric(server: Server, name: str, *labels: str) -> float:
    """The sum of a metric's series that have these labels, of the embedder."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = (f'model="{EMBEDDER}"', *labels)
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"quire_{name}{{") and all(label in line for label in wanted)
    )


@pytest.mark.parametrize("model", [LLM, EMBEDDER])
def test_a_batch_is_bit_for_bit_what_each_text_is_alone(client: Client, model: str) -> None:
    together = client.embed(model, TEXTS).data
    assert together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    for text, row in zip(TEXTS, together, strict=True):
        assert client.embed(model, text).data[0].tolist() == row.tolist()


def test_every_way_to_ask_gives_the_same_vector(server: Server, client: Client) -> None:
    expected = client.embed(EMBEDDER, TEXTS[0]).data[0].tolist()
    generate = f"http://{server.http}/v2/models/{EMBEDDER}/generate"
    gateway = f"http://{server.openai}"
    status, answer = post(generate, {"text_input": TEXTS[0]})
    assert (status, answer["embeddings"]) == (200, pytest.approx(expected))
    status, answer = post(generate, {"text_input": "", "embedding_request": json.dumps({"input": TEXTS[0]})})
    assert (status, json.loads(answer["text_output"])) == (200, expected)
    status, answer = post(f"{gateway}/v1/embeddings", {"model": EMBEDDER, "input": TEXTS[:1]})
    assert (status, answer["data"][0]["embedding"]) == (200, expected)
    ids = post(f"{gateway}/tokenize", {"model": EMBEDDER, "prompt": TEXTS[0]})[1]["tokens"]
    status, answer = post(f"{gateway}/pooling", {"model": EMBEDDER, "input": ids})
    assert (status, answer["data"][0]["data"]) == (200, expected)
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as made:
        assert made.embeddings.create(model=EMBEDDER, input=TEXTS[0]).data[0].embedding == expected


def test_a_text_is_most_similar_to_itself(server: Server, client: Client) -> None:
    scores = client.score(EMBEDDER, TEXTS[0], TEXTS).data[:, 0]
    assert scores.argmax() == 0
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    body = {"model": EMBEDDER, "query": TEXTS[1], "documents": TEXTS, "top_n": 2}
    status, answer = post(f"http://{server.openai}/v2/rerank", body)
    assert (status, answer["results"][0]["index"], len(answer["results"])) == (200, 1, 2)


def test_a_reranker_reads_both_texts_of_a_pair(server: Server, client: Client) -> None:
    together = client.score(RERANKER, TEXTS[0], TEXTS).data[:, 0].tolist()
    assert together == [client.score(RERANKER, TEXTS[0], text).data.item() for text in TEXTS]
    body = {"model": RERANKER, "text_1": TEXTS[0], "text_2": TEXTS}
    status, answer = post(f"http://{server.openai}/v1/score", body)
    assert (status, [one["score"] for one in answer["data"]]) == (200, together)
    body = {"model": RERANKER, "query": TEXTS[0], "documents": TEXTS}
    status, answer = post(f"http://{server.openai}/rerank", body)
    assert (status, [one["relevance_score"] for one in answer["results"]]) == (200, sorted(together, reverse=True))
    assert post(f"http://{server.openai}/v1/embeddings", {"model": RERANKER, "input": "a"})[0] == 400


def test_tokens_have_a_row_each(client: Client) -> None:
    pooled = client.pool(EMBEDDER, "token_embed", TEXTS)
    assert pooled.num_rows == pooled.num_prompt_tokens
    assert len(pooled.data) == sum(pooled.num_rows)


def test_each_model_says_what_it_can_do(server: Server, client: Client) -> None:
    gateway = f"http://{server.openai}"
    with urllib.request.urlopen(f"{gateway}/v1/models", timeout=60) as answer:
        tasks = {card["id"]: card["tasks"] for card in json.load(answer)["data"]}
    assert tasks[LLM][0] == "generate"
    assert "generate" not in tasks[EMBEDDER]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/classify", {"input": "a"}),
    ):
        status, answer = post(gateway + path, {"model": EMBEDDER, **body})
        assert (status, answer["error"]["param"]) == (400, "model"), path
        assert "this model offers embed" in answer["error"]["message"]
    with pytest.raises(InvalidArgument, match="this model offers embed"):
        client.generate(EMBEDDER, "a", max_tokens=2)


def test_a_prompt_that_is_too_long_is_named_and_can_be_cut(server: Server, client: Client) -> None:
    long = "x = 1 " * 500
    with pytest.raises(InvalidArgument, match=r"text_input\[1\] has"):
        client.embed(EMBEDDER, ["a", long])
    assert client.embed(EMBEDDER, ["a", long], truncate_prompt_tokens=-1).num_prompt_tokens[1] > 100
    status, answer = post(f"http://{server.openai}/v1/embeddings", {"model": EMBEDDER, "input": long})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_metrics_have_an_end_and_no_times_of_tokens(server: Server, client: Client) -> None:
    before = metric(server, "requests_total", 'outcome="stop"')
    tokens = metric(server, "prompt_tokens_total")
    pooled = client.embed(EMBEDDER, TEXTS)
    assert metric(server, "requests_total", 'outcome="stop"') == before + len(TEXTS)
    assert metric(server, "prompt_tokens_total") == tokens + sum(pooled.num_prompt_tokens)
    assert metric(server, "slo_requests_total", 'verdict="good"') >= len(TEXTS)
    assert metric(server, "slo_requests_total", 'verdict="miss"', 'cause="ttft"') == 0
    for name in ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "generation_tokens_total"):
        assert metric(server, name) == 0, name


def test_streams_go_on_beside_bursts(client: Client) -> None:
    done, failures = threading.Event(), list[ClientError]()

    def burst() -> None:
        try:
            while not done.is_set():
                client.embed(EMBEDDER, TEXTS * 30)
        except ClientError as error:
            failures.append(error)

    thread = threading.Thread(target=burst)
    thread.start()
    try:
        alone = [chunk.text for chunk in client.stream(LLM, TEXTS[0], max_tokens=40, temperature=0, ignore_eos=True)]
    finally:
        done.set()
        thread.join()
    assert not failures
    assert len(alone) > 1


def test_the_folder_of_an_embedder_is_all_that_serve_needs(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path / "bert", hidden_size=60)
    with serve("--model", str(encoder), "--name", "one") as running, Client(running.grpc) as one:
        assert one.embed("one", TEXTS).data.shape == (3, 60)
