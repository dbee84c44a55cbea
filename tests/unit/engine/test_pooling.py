"""Embeddings, scores and classes: those of transformers and sentence-transformers, however they are computed."""

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import torch
import torch.nn.functional as F
import transformers
from quire_engine import LLM, AsyncLLM, PoolingParams
from quire_engine.errors import CheckpointError, RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families.heads import read_labels
from quire_engine.tasks.reading import read_pooling_info
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.engines import engine
from support.oracle import make_prompts
from support.quantized import FORMS, write_quantized
from support.ranks import llm_of_thread_ranks
from support.real_models import minilm

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
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    found = []
    for budget in (32, 512):
        with llm_of_thread_ranks(folder, **SETTINGS, **sizes, max_num_batched_tokens=budget) as llm:
            found.append([output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)])
    for probs, logits in zip(found[0], expected, strict=True):
        torch.testing.assert_close(torch.tensor(probs), logits.softmax(-1), atol=1e-4, rtol=0)
    assert found[0] == found[1], "bit for bit, in chunks and whole"
    if tensor == 1:
        assert found[0] == [
            output.outputs.probs for output in LLM(folder, **SETTINGS).classify(PROMPTS, use_tqdm=False)
        ]


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


def test_files_of_sentence_transformers_6(embedder: Path, tmp_path: Path) -> None:
    """Its classes have other modules; the length of the longest text is the tokenizer's."""
    for path in embedder.iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    tokenizer = json.loads((embedder / "tokenizer_config.json").read_text())
    kinds = {
        "": "sentence_transformers.base.modules.transformer.Transformer",
        "1_Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "2_Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    }
    modules = [{"idx": i, "name": str(i), "path": path, "type": kinds[path]} for i, path in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": 80, "pooling_mode": "cls", "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"module_output_name": "token_embeddings"}))
    for limit, expected in ((40, 40), (10**30, None), (None, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": limit}))
        info = read_pooling_info(tmp_path, CheckpointConfig.from_folder(tmp_path))
        assert (info.max_length, info.pooling_type, info.normalize) == (expected, "CLS", True)


@pytest.mark.parametrize("place", ["config.json", "inside config.json", "config_sentence_transformers.json"])
@pytest.mark.parametrize("function", ["linear.Identity", "activation.Sigmoid"])
def test_the_activation_of_a_cross_encoder(place: str, function: str, tmp_path: Path) -> None:
    """By where a version of sentence-transformers stores it: 3, 4 and 6. It is that of `CrossEncoder.predict`."""
    auto, name = transformers.AutoModelForSequenceClassification, f"torch.nn.modules.{function}"
    folder = make(tmp_path / "head", auto, "llama", num_labels=2)
    if place == "config.json":
        edit_json(folder / place, sbert_ce_default_activation_function=name)
    elif place == "inside config.json":
        edit_json(folder / "config.json", sentence_transformers={"activation_fn": name, "version": "4.0.1"})
    else:
        (folder / place).write_text(json.dumps({"activation_fn": name, "model_type": "CrossEncoder", "prompts": {}}))
    (logits,) = logits_of(folder, auto, PROMPTS[:1])
    (output,) = LLM(folder, **SETTINGS).classify(PROMPTS[0], use_tqdm=False)
    expected = logits if "Identity" in function else logits.sigmoid()
    torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, atol=1e-4, rtol=1e-4)


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
        ("modules", [{"type": "a.Transformer", "path": "\0"}], "must be a list"),
        ("config_sentence_transformers", {"prompts": {"query": 1}}, "prompts is"),
        ("config_sentence_transformers", {"default_prompt_name": ["x"]}, "default_prompt_name is"),
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


def test_malformed_modes_and_labels_are_named(embedder: Path, tmp_path: Path) -> None:
    for path in embedder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    add_modules(tmp_path, "Pooling")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": [{}]}))
    with pytest.raises(CheckpointError, match="its pooling modes are"):
        read_pooling_info(tmp_path, CheckpointConfig.from_folder(tmp_path))
    with pytest.raises(CheckpointError, match=f"num_labels is {1 << 24}; it must be an integer from 1 to 65536"):
        read_labels(Fields(tmp_path / "config.json", {"num_labels": 1 << 24}))


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


def test_a_head_is_loaded_again_with_the_weights(tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    folder = make(tmp_path / "head", auto, "qwen2", num_labels=3)
    llm, raw = LLM(folder, **SETTINGS), PoolingParams(use_activation=False)
    before = llm.encode(PROMPTS[0], raw, use_tqdm=False)[0].outputs.data
    llm.sleep(level=2)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": 2 * tensors["score.weight"]}, tmp_path / "new", {"format": "pt"})
    (tmp_path / "new").replace(folder / "model.safetensors")
    llm.wake_up()
    torch.testing.assert_close(llm.encode(PROMPTS[0], raw, use_tqdm=False)[0].outputs.data, 2 * before)


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


@pytest.mark.parametrize("form", ["awq", "gptq-8", "packed", "int8-tensor", "nf4"])
def test_quantised_checkpoints_have_heads(form: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    model = make(tmp_path / "model", auto, "qwen2", num_labels=4, hidden_size=128, intermediate_size=256,
                 num_attention_heads=8, num_key_value_heads=4, initializer_range=0.05)  # fmt: skip
    write_quantized(model, FORMS[form], tmp_path)
    load_tokenizer(TINYPY).save_pretrained(tmp_path / "quantized")
    raw = PoolingParams(use_activation=False)
    outputs = LLM(tmp_path / "quantized", **SETTINGS).encode(PROMPTS, raw, use_tqdm=False)
    for output, logits in zip(outputs, logits_of(tmp_path / "plain", auto, PROMPTS), strict=True):
        assert torch.cosine_similarity(output.outputs.data, logits, dim=0) > 0.99


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_of_tokens_as_a_score(tied: bool, tmp_path: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    folder = make(tmp_path / "reranker", auto, "qwen3", tie_word_embeddings=tied)
    vocabulary = load_tokenizer(TINYPY).get_vocab()
    no, yes = "def", "class"
    edit_json(folder / "config.json", classifier_from_token=[no, yes])
    llm = LLM(folder, **SETTINGS)
    assert (llm.pooling_info.tasks, llm.pooling_info.can_generate) == (("score", "classify"), True)
    expected = [logits[-1, [vocabulary[no], vocabulary[yes]]] for logits in logits_of(folder, auto, PROMPTS)]
    for output, logits in zip(llm.classify(PROMPTS, use_tqdm=False), expected, strict=True):
        assert output.outputs.probs == [pytest.approx(logits.softmax(-1)[1].item(), abs=1e-4)]
    edit_json(folder / "config.json", classifier_from_token=["no such token"])
    with pytest.raises(CheckpointError, match="classifier_from_token is"):
        CheckpointConfig.from_folder(folder)


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


# -- encoders ----------------------------------------------------------------------------------------------------------

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0, "type_vocab_size": 2},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130},
    "distilbert": {"pad_token_id": 0, "dim": 80, "n_heads": 5, "hidden_dim": 112, "n_layers": 2},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 1, "classifier_pooling": "mean",
                   "classifier_bias": True, "norm_bias": True},
    "mpnet": {"pad_token_id": 1, "max_position_embeddings": 130},
    "jina_embeddings_v3": {"pad_token_id": 1, "type_vocab_size": 1},
    "nomic_bert": {"pad_token_id": 0, "type_vocab_size": 2},
    "gte": {"pad_token_id": 0, "type_vocab_size": 2},
}  # fmt: skip


def make_classifier(folder: Path, auto: Any, model_type: str, **changes: Any) -> Path:
    """A random encoder with a head, and a tokenizer of words that adds what BERT's does."""
    has_segments = ENCODERS[model_type].get("type_vocab_size") == 2
    make(folder, auto, model_type, num_key_value_heads=5, **ENCODERS[model_type], **changes)
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if has_segments else [])],
    )
    fast.save_pretrained(folder)
    file = folder / "tokenizer.json"  # MiniLM's says so, too
    padded = tokenizers.Tokenizer.from_file(str(file))
    padded.enable_padding(length=64)
    padded.enable_truncation(48)
    padded.save(str(file))
    return folder


@pytest.mark.parametrize("model_type", ENCODERS)
def test_heads_of_encoders(model_type: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    folder = make_classifier(tmp_path / "pairs", auto, model_type, num_labels=1)
    llm, model = LLM(folder, **SETTINGS), auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    firsts, seconds = ["a b c", "d", "e f g h " * 9], ["x y", "z w v u", "a"]
    outputs = llm.score(firsts, seconds, use_tqdm=False)
    for output, first, second in zip(outputs, firsts, seconds, strict=True):
        encoded = tokenizer(first, second, return_tensors="pt")
        assert output.prompt_token_ids == encoded["input_ids"][0].tolist()
        with torch.inference_mode():
            logits = model(**encoded).logits[0]
        assert output.outputs.score == pytest.approx(logits.sigmoid().item(), abs=1e-4)
        assert llm.score(first, second, use_tqdm=False)[0].outputs.score == output.outputs.score
    assert llm.pooling_info.has_segments == (ENCODERS[model_type].get("type_vocab_size") == 2)
    (cut,) = llm.encode(firsts[2:], PoolingParams(truncate_prompt_tokens=9), use_tqdm=False)
    assert cut.prompt_token_ids == tokenizer(firsts[2], truncation=True, max_length=9)["input_ids"]
    pair = {"prompt": firsts[2], "pair": seconds[1]}
    (cut,) = llm.encode([pair], PoolingParams(truncate_prompt_tokens=9), use_tqdm=False)
    assert cut.prompt_token_ids == tokenizer(firsts[2], seconds[1], truncation=True, max_length=9)["input_ids"]
    if llm.pooling_info.has_segments:
        (swapped,) = llm.encode({"prompt": firsts[0] + " [SEP] " + seconds[0]}, use_tqdm=False)
        assert swapped.outputs.data.item() != outputs[0].outputs.score, "the segments are known apart"


@pytest.mark.parametrize("model_type", ENCODERS)
def test_heads_of_encoders_for_tokens(model_type: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForTokenClassification
    folder = make_classifier(tmp_path / "tokens", auto, model_type, num_labels=3)
    outputs = LLM(folder, **SETTINGS).encode(PROMPTS, use_tqdm=False)
    for output, logits in zip(outputs, logits_of(folder, auto, PROMPTS), strict=True):
        torch.testing.assert_close(output.outputs.data, logits.softmax(-1), atol=1e-4, rtol=0)


# -- serving -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_serving_and_a_kill_give_the_same_bits(embedder: Path) -> None:
    prompts = make_prompts(12, VOCAB_SIZE, max_length=120, seed=3)
    params = PoolingParams(pooling_type="MEAN")
    expected = [one.outputs.data.tolist() for one in LLM(embedder, **SETTINGS).encode(prompts, params, use_tqdm=False)]

    async def encode(llm: AsyncLLM, prompt: list[int]) -> list[float]:
        (output,) = [output async for output in llm.encode(prompt, params, deadline_ms=60_000)]
        assert output.prompt_token_ids == prompt
        numbers: list[float] = output.outputs.data.tolist()
        return numbers

    async def main(llm: AsyncLLM) -> None:
        assert llm.pooling_info.tasks == ("embed", "token_embed")
        assert await asyncio.gather(*(encode(llm, prompt) for prompt in prompts)) == expected
        tasks = [asyncio.ensure_future(encode(llm, prompt)) for prompt in prompts]
        await asyncio.sleep(0)  # they are sent
        os.kill(llm.engine_pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        with pytest.raises(RequestError, match="dimensions is 81"):
            await anext(llm.encode([1, 2], PoolingParams(dimensions=81)))
        left = asyncio.ensure_future(encode(llm, prompts[0]))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left

    with engine(embedder, **SETTINGS, max_num_batched_tokens=16) as (llm, recorder):
        asyncio.run(main(llm))
        assert recorder.num_restarts == 1


# -- malformed requests ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(embedder: Path) -> LLM:
    return LLM(embedder, **SETTINGS)


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ("x", {"task": "rank"}, "task is 'rank'; it must be one of embed, classify"),
        ("x", {"task": "score"}, "task is 'score'; this model offers embed, token_embed"),
        ("x", {"dimensions": 0}, "dimensions is 0; it must be from 1 to"),
        ("x", {"dimensions": 10**30}, r"dimensions is 10+; it must be from 1 to 2\*\*31 - 1"),
        ("x", {"dimensions": 81}, "dimensions is 81; embeddings of this model have 80"),
        ("x", {"dimensions": "8"}, "dimensions is '8'; it must be an integer"),
        ("x", {"normalize": 1}, "normalize is 1; it must be true or false"),
        ("x", {"truncate_prompt_tokens": -2}, r"truncate_prompt_tokens is -2; it must be from 1 to 2\*\*31 - 1, or -1"),
        ("x", {"truncate_prompt_tokens": 129}, "truncate_prompt_tokens is 129; this model takes at most 128"),
        ("x", {"pooling_type": "mean"}, "pooling_type is 'mean'; it must be one of LAST"),
        ("x", {"pooling_type": "ALL"}, "pooling_type is 'ALL'; for the task embed it must be LAST"),
        ("x", {"task": "token_embed", "pooling_type": "STEP"}, "step_tag_id is missing"),
        ("x", {"task": "token_embed", "step_tag_id": 2**70}, "step_tag_id is"),
        ("x", {"task": "token_embed", "step_tag_id": -1}, "step_tag_id is -1; it must be a token id"),
        ("x", {"prompt_name": "query"}, "prompt_name is 'query'; the checkpoint's prompts are: none"),
        ("x", {"returned_token_ids": [0]}, "this task has 0 columns"),
        ("x", {"zzz": 1}, "'zzz' is no parameter of pooling"),
        ("", {}, "prompt is empty"),
        ({"prompt": "x", "pair": ""}, {}, "pair is empty"),
        ({"prompt": "x", "pair": 5}, {}, r"prompt has the keys \['pair', 'prompt'\]"),
        ([1] * 129, {}, "prompt_token_ids has 129 tokens; this model takes at most 128"),
        ([], {}, "prompt_token_ids is empty"),
        ([VOCAB_SIZE], {}, "out of vocabulary"),
    ],
)
def test_malformed_requests_are_clear(prompt: Any, params: dict[str, Any], match: str, small: LLM) -> None:
    with pytest.raises(RequestError, match=match):
        small.encode([prompt], PoolingParams.from_mapping(params), use_tqdm=False)
    assert len(small.embed([[1] * 128], use_tqdm=False)) == 1, "the longest prompt"


def test_texts_and_pairs_that_do_not_match(small: LLM) -> None:
    with pytest.raises(ValueError, match="data_2 holds 3 texts for 2 of data_1"):
        small.score(["a", "b"], ["c", "d", "e"], use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_params has 1 entries for 2 prompts"):
        small.embed(["a", "b"], [PoolingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_task is 'embed', and pooling_params name 'token_embed'"):
        small.embed(["a"], PoolingParams(task="token_embed"), use_tqdm=False)
    assert small.embed([], use_tqdm=False) == []
    (output,) = small.score("a", "a", use_tqdm=False, pooling_params=PoolingParams(task="score"))
    assert output.outputs.score == pytest.approx(1.0)


# -- real weights ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("QUIRE_SEQUENCES" not in os.environ, reason="large downloads")
def test_int8_ranks_pairs_as_float32_does() -> None:
    """1,000 pairs of sentences of the documentation: the second keeps from nothing to five sixths of the first."""
    pages = [path.read_text("utf-8") for path in sorted((Path(__file__).parents[3] / "docs").rglob("*.md"))]
    parts = {part.strip() for page in pages for part in re.split(r"(?<=[.!?])\s+|\n", page)}
    sentences, rng = sorted(part for part in parts if 40 < len(part) < 200), random.Random(0)
    firsts, seconds = [], []
    for i in range(1000):
        first, other = rng.sample(sentences, 2)
        words, share = (first.split(), other.split()), i % 6 / 6
        kept = words[0][: round(share * len(words[0]))] + words[1][round(share * len(words[1])) :]
        firsts.append(first)
        seconds.append(" ".join(kept))
    ranks = []
    for quantization in (None, "int8"):
        llm = LLM(minilm(), dtype="float32", quantization=quantization, weight_cache_dir="")
        scores = [output.outputs.score for output in llm.score(firsts, seconds, use_tqdm=False)]
        ranks.append(torch.tensor(scores, dtype=torch.float64).argsort().argsort().double())
    assert torch.corrcoef(torch.stack(ranks))[0, 1] >= 0.999
