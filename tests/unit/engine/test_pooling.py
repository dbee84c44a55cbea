"""Embeddings, scores and classes: those of transformers and sentence-transformers, however they are computed."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from quire_engine import LLM, PoolingParams
from quire_engine.errors import CheckpointError, RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.tasks.reading import read_pooling_info
from safetensors.torch import save_file
from support.checkpoints import edit_json
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
VOCAB_SIZE = 4096
PROMPTS = [*make_prompts(6, VOCAB_SIZE, max_length=100), [7], [7, 8]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22}
TEXTS = ["def area(w, h):\n    return w * h", "class Stack:\n    pass", "for i in range(10): print(i)", "import os"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3]), (TEXTS[3], TEXTS[0])]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""The C++ kernels take heads of multiples of 16, and promise the same bits in any batch."""


def make(folder: Path, auto: Any, model_type: str, **changes: Any) -> Path:
    """Write a random checkpoint."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = auto.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which begin as zeros
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("norm.weight"):  # and ones
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    load_tokenizer(TINYPY).save_pretrained(folder)
    return folder


def add_modules(folder: Path, *kinds: str, mode: str = "mean", **files: dict[str, Any]) -> list[torch.Tensor]:
    """Add what sentence-transformers stores; returns the weights of the `Dense` modules."""
    torch.manual_seed(1)
    weights, size, modules = [], SIZES["hidden_size"], []
    for number, kind in enumerate(("Transformer", *kinds)):
        place = f"{number}_{kind}" if number else ""
        modules.append(
            {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / place).mkdir(exist_ok=True)
        if kind == "Pooling":
            fields: dict[str, Any] = {"word_embedding_dimension": size, f"pooling_mode_{mode}_tokens": True}
            (folder / place / "config.json").write_text(json.dumps(fields))
        elif kind == "Dense":
            weight = torch.randn(33, size)
            weights.append(weight)
            fields = {"in_features": size, "out_features": 33, "bias": False}
            fields["activation_function"] = "torch.nn.modules.activation.Tanh"
            (folder / place / "config.json").write_text(json.dumps(fields))
            save_file({"linear.weight": weight}, folder / place / "model.safetensors")
            size = 33
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return weights


def hidden_states(folder: Path, prompts: Sequence[list[int]], auto: Any = transformers.AutoModel) -> list[torch.Tensor]:
    """Of each prompt, [T, E] after the last norm."""
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def logits_of(folder: Path, auto: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.fixture(scope="module")
def embedder(made: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return made("pooling-embedder", partial(make, auto=transformers.AutoModel, model_type="qwen3"))


POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LAST": lambda hidden: hidden[-1],
    "CLS": lambda hidden: hidden[0],
    "MEAN": lambda hidden: hidden.mean(0),
    "MAX": lambda hidden: hidden.amax(0),
    "MEAN_SQRT_LEN": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "WEIGHTED_MEAN": lambda hidden: (
        (hidden * torch.arange(1, len(hidden) + 1)[:, None]).sum(0) / (len(hidden) * (len(hidden) + 1) / 2)
    ),
}


def test_each_pool_is_the_same_in_chunks_and_from_the_cache(embedder: Path) -> None:
    """Bit for bit, in one step, in chunks, preempted, and beside other prompts."""
    hidden = hidden_states(embedder, PROMPTS)
    whole = LLM(embedder, **SETTINGS, max_num_batched_tokens=512)
    chunked = LLM(embedder, **SETTINGS, max_num_batched_tokens=8)
    few = LLM(embedder, **{**SETTINGS, "kv_cache_memory_bytes": 2 * 2 * 16 * 4 * 16 * 10}, max_num_batched_tokens=24)
    assert not whole.pooling_info.can_generate
    for kind, pool in POOLS.items():
        params = PoolingParams(pooling_type=kind)
        outputs = whole.embed(PROMPTS, params, use_tqdm=False)
        got = [torch.tensor(output.outputs.embedding) for output in outputs]
        for one, states in zip(got, hidden, strict=True):
            assert torch.cosine_similarity(one, pool(states), dim=0) > 0.99999
            assert one.norm() == pytest.approx(1, abs=1e-6)
        for llm in (chunked, few, chunked):
            again = llm.embed(PROMPTS, params, use_tqdm=False)
            assert [output.outputs.embedding for output in again] == [one.tolist() for one in got]
            if kind != "LAST":
                assert not any(output.num_cached_tokens for output in again)
        alone = whole.embed(PROMPTS[0], params, use_tqdm=False)
        assert alone[0].outputs.embedding == got[0].tolist()
    assert any(output.num_cached_tokens for output in chunked.embed(PROMPTS, use_tqdm=False))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_of_several_ranks(tensor: int, pipeline: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "head", transformers.AutoModelForSequenceClassification, "qwen2", num_labels=3,
                  num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96)  # fmt: skip
    expected = logits_of(folder, transformers.AutoModelForSequenceClassification, PROMPTS)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with llm_of_thread_ranks(folder, **SETTINGS, **sizes) as llm:
        for output, logits in zip(llm.classify(PROMPTS, use_tqdm=False), expected, strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("settings", "least"), [({"dtype": "bfloat16"}, 0.9995), ({"quantization": "int8"}, 0.995)])
def test_in_lower_precision(settings: dict[str, Any], least: float, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", transformers.AutoModel, "llama", hidden_size=128, num_attention_heads=8,
                  num_key_value_heads=2, head_dim=16, initializer_range=0.05)  # fmt: skip
    expected = hidden_states(folder, PROMPTS)
    llm = LLM(folder, **{**SETTINGS, **settings})
    for kind in ("LAST", "MEAN"):
        outputs = llm.embed(PROMPTS, PoolingParams(pooling_type=kind), use_tqdm=False)
        for output, states in zip(outputs, expected, strict=True):
            cosine = torch.cosine_similarity(torch.tensor(output.outputs.embedding), POOLS[kind](states), dim=0)
            assert cosine >= least, kind


# -- sentence-transformers ---------------------------------------------------------------------------------------------


def test_modules_prompts_and_dimensions(embedder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    for path in embedder.iterdir():
        (folder / path.name).symlink_to(path)
    first, second = add_modules(
        folder, "Pooling", "Dense", "Dense", "Normalize",
        sentence_bert_config={"max_seq_length": 40, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "dot",
        },
    )  # fmt: skip
    llm = LLM(folder, **SETTINGS)
    info = llm.pooling_info
    assert (info.embedding_size, info.max_length, info.pooling_type, info.normalize) == (33, 40, "MEAN", True)
    assert (info.similarity, info.tasks) == ("dot", ("embed", "token_embed"))
    tokenizer = llm._inputs.tokenizer
    prompts = [tokenizer.encode(("Query: " + text).lower()) for text in TEXTS]
    outputs = llm.embed(TEXTS, PoolingParams(prompt_name="query"), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    cut = llm.embed(TEXTS, PoolingParams(prompt_name="query", dimensions=7), use_tqdm=False)
    for output, small, hidden in zip(outputs, cut, hidden_states(folder, prompts), strict=True):
        expected = torch.tanh(second @ torch.tanh(first @ hidden.mean(0)))
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), F.normalize(expected, dim=0), atol=2e-5, rtol=0
        )
        short = F.normalize(expected[:7], dim=0)
        torch.testing.assert_close(torch.tensor(small.outputs.embedding), short, atol=2e-5, rtol=0)
    with pytest.raises(RequestError, match="at most 40: shorten it, or set truncate_prompt_tokens to -1"):
        llm.embed(TEXTS[0] * 9, use_tqdm=False)
    (output,) = llm.embed(TEXTS[0] * 9, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode((TEXTS[0] * 9).lower())[:40]
    one, other = (llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS[:2])
    (scored,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert scored.outputs.score == pytest.approx(sum(a * b for a, b in zip(one, other, strict=True)), abs=1e-6)


def test_no_modules_and_tokens(embedder: Path) -> None:
    llm = LLM(embedder, **SETTINGS, max_num_batched_tokens=16)
    hidden = hidden_states(embedder, PROMPTS)
    outputs = llm.encode(PROMPTS, PoolingParams(normalize=False), use_tqdm=False, pooling_task="token_embed")
    for output, states in zip(outputs, hidden, strict=True):
        torch.testing.assert_close(output.outputs.data, states, atol=2e-5, rtol=1e-4)
    with pytest.raises(RequestError, match="does not generate; it offers embed, token_embed"):
        llm.generate(PROMPTS[0], use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("modules", {}, "must be a list"),
        ("modules", [{"type": "a.Transformer", "path": "../x"}], "must be a list"),
        ("modules", [{"type": "a.Pooling", "path": ""}], "the first must be the only Transformer"),
        ("modules", [{"type": "a.Transformer", "path": ""}, {"type": "a.CNN", "path": "1"}], "module 1 is a 'CNN'"),
        ("modules", [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1"}], "no config.json"),
        ("config_sentence_transformers", {"prompts": {"query": 1}}, "prompts is"),
        ("config_sentence_transformers", {"default_prompt_name": "x"}, "default_prompt_name is 'x'"),
        ("config_sentence_transformers", {"similarity_fn_name": "x"}, "similarity_fn_name is 'x'"),
        ("sentence_bert_config", {"max_seq_length": 0}, "max_seq_length is 0"),
    ],
)
def test_malformed_files_are_named(name: str, values: Any, match: str, embedder: Path, tmp_path: Path) -> None:
    for path in embedder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / f"{name}.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=match):
        read_pooling_info(tmp_path, CheckpointConfig.from_folder(tmp_path))


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "phi3"])
def test_classes_of_decoders(model_type: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    folder = make(tmp_path / "head", auto, model_type, num_labels=5, id2label={i: f"l{i}" for i in range(5)})
    llm = LLM(folder, **SETTINGS, max_num_batched_tokens=32)
    assert llm.pooling_info.labels == ("l0", "l1", "l2", "l3", "l4")
    for _ in range(2):
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        for output, logits in zip(outputs, logits_of(folder, auto, PROMPTS), strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(-1), atol=1e-4, rtol=0)
    assert any(output.num_cached_tokens for output in outputs)
    raw = llm.encode(PROMPTS[0], PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.data
    torch.testing.assert_close(raw, logits_of(folder, auto, PROMPTS[:1])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "function"),
    [({"problem_type": "multi_label_classification"}, torch.sigmoid), ({"problem_type": "regression"}, lambda x: x)],
)
def test_probabilities_by_problem_type(
    changes: dict[str, Any], function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    auto = transformers.AutoModelForSequenceClassification
    folder = make(tmp_path / "head", auto, "llama", num_labels=2, **changes)
    (logits,) = logits_of(folder, auto, PROMPTS[:1])
    (output,) = LLM(folder, **SETTINGS).classify(PROMPTS[0], use_tqdm=False)
    torch.testing.assert_close(torch.tensor(output.outputs.probs), function(logits), atol=1e-4, rtol=1e-4)


def test_scores_of_pairs(tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    folder = make(tmp_path / "head", auto, "qwen2", num_labels=1)
    llm = LLM(folder, **SETTINGS)
    pairs = [llm._inputs.tokenizer.encode(first) + llm._inputs.tokenizer.encode(second) for first, second in PAIRS]
    outputs = llm.score([first for first, _ in PAIRS], [second for _, second in PAIRS], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == pairs
    for output, logits in zip(outputs, logits_of(folder, auto, pairs), strict=True):
        assert output.outputs.score == pytest.approx(logits.sigmoid().item(), abs=1e-4)
    assert len(llm.score(TEXTS[0], TEXTS, use_tqdm=False)) == len(TEXTS)


def test_classes_of_tokens(tmp_path: Path) -> None:
    auto = transformers.AutoModelForTokenClassification
    folder = make(tmp_path / "head", auto, "qwen3", num_labels=4)
    llm = LLM(folder, **SETTINGS, max_num_batched_tokens=16)
    for _ in range(2):
        outputs = llm.encode(PROMPTS, use_tqdm=False)
        for output, logits in zip(outputs, logits_of(folder, auto, PROMPTS), strict=True):
            torch.testing.assert_close(output.outputs.data, logits.softmax(-1), atol=1e-4, rtol=0)


def test_rewards_of_tokens_and_steps(embedder: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    sizes = {"0.weight": (80, 80), "0.bias": (80,), "2.weight": (2, 80), "2.bias": (2,)}
    tensors = {f"score.{name}": torch.randn(size) for name, size in sizes.items()}
    model = transformers.AutoModel.from_pretrained(embedder)
    hidden = hidden_states(embedder, PROMPTS)

    def score(states: torch.Tensor) -> torch.Tensor:
        inner = F.relu(F.linear(states, tensors["score.0.weight"], tensors["score.0.bias"]))
        return F.linear(inner, tensors["score.2.weight"], tensors["score.2.bias"])

    for path in embedder.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    save_file({**{f"model.{n}": t for n, t in model.state_dict().items()}, **tensors}, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", architectures=["Qwen3ForProcessRewardModel"], num_labels=2)
    llm = LLM(tmp_path, **SETTINGS, max_num_batched_tokens=16)
    tag = PROMPTS[0][3]
    for prompt, states in zip(PROMPTS, hidden, strict=True):
        (all_tokens,) = llm.reward(prompt, use_tqdm=False)
        torch.testing.assert_close(all_tokens.outputs.data, score(states).softmax(-1), atol=1e-4, rtol=0)
        (steps,) = llm.reward(prompt, PoolingParams(step_tag_id=tag), use_tqdm=False)
        is_step = [token_id == tag for token_id in prompt]
        torch.testing.assert_close(steps.outputs.data, all_tokens.outputs.data[is_step], atol=0, rtol=0)
        (column,) = llm.reward(prompt, PoolingParams(returned_token_ids=(1,), use_activation=False), use_tqdm=False)
        torch.testing.assert_close(column.outputs.data, score(states)[:, 1:], atol=1e-3, rtol=1e-4)
