"""Decoders that run with transformers' own code and our attention say what transformers says."""

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_cache import block_bytes
from quire_engine.models import check_checkpoint
from quire_engine.models.checkpoints import weight_files
from quire_engine.models.fallback.attention import PROBE, PagedAttention, Probe, UnfitModelError
from quire_engine.models.fallback.checkpoint import TransformersCheckpoint
from quire_engine.models.fallback.model import TransformersModel, load_transformers_model
from quire_engine.system.memory import mapped_ranges
from quire_kernels import cpu
from safetensors.torch import load_file, save_file
from support.checkpoints import changed_copy
from support.oracle import Expected, assert_exact, generate_greedily, make_prompts
from support.transformers_models import DECODERS, VOCAB_SIZE, WINDOW, make_decoder
from transformers import AutoModelForCausalLM

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"
BLOCKS = 10
"""With these, requests that run together cannot all keep theirs."""

Made = Callable[[str], Path]
Workload = Callable[[str], tuple[list[list[int]], list[int], list[Expected]]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Folder of a checkpoint, by model type."""
    return cache(lambda name: make_decoder(tmp_path_factory.mktemp(name), name, load_tokenizer(TINYPY)))


@pytest.fixture(scope="module")
def said(decoder: Made) -> Workload:
    """Prompts, of which some begin alike, how many tokens each gets, and what transformers makes of them."""

    @cache
    def ask(name: str) -> tuple[list[list[int]], list[int], list[Expected]]:
        model = AutoModelForCausalLM.from_pretrained(decoder(name), dtype=torch.float32).eval()
        prompts = make_prompts(12, VOCAB_SIZE, max_length=80)
        lengths = [6 + (i * 7) % 17 for i in range(len(prompts))]
        return prompts, lengths, [generate_greedily(model, p, n) for p, n in zip(prompts, lengths, strict=True)]

    return ask


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "max_model_len": 128, "model_impl": "transformers", **settings})


def load(folder: Path, **settings: Any) -> TransformersModel:
    checkpoint = check_checkpoint(folder, load_format="dummy", model_impl="transformers")
    assert isinstance(checkpoint, TransformersCheckpoint)
    arguments = {"max_position": 128, "device": torch.device("cpu"), "load_format": "auto", **settings}
    return load_transformers_model(folder, checkpoint, torch.float32, **arguments)


def check_exact(llm: LLM, prompts: list[list[int]], lengths: list[int], expected: list[Expected]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    assert_exact(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.get_stats().num_failed_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_mixed_batches_in_pieces_with_shared_prefixes_and_preemption_are_token_exact(
    name: str, decoder: Made, said: Workload
) -> None:
    folder = decoder(name)
    prompts, lengths, expected = said(name)
    per_block = block_bytes(load(folder).state_specs, block_size=16, dtype_bytes=4)
    llm = make_llm(folder, max_num_batched_tokens=48, kv_cache_memory_bytes=BLOCKS * per_block)
    check_exact(llm, prompts, lengths, expected)
    stats = llm.get_stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0
    assert stats.num_blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"async_scheduling": True}],
)
@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_speculation_and_steps_ahead_change_no_token(
    settings: dict[str, Any], name: str, decoder: Made, said: Workload
) -> None:
    check_exact(make_llm(decoder(name), **settings), *said(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
def test_to_the_last_bit_a_request_is_its_own_in_any_batch_and_in_pieces(name: str, decoder: Made) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    prompts = make_prompts(10, VOCAB_SIZE, max_length=80)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    said = []
    for num_seqs, budget in ((1, 128), (16, 256), (16, 24)):
        llm = make_llm(decoder(name), dtype="bfloat16", max_num_seqs=num_seqs, max_num_batched_tokens=budget)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert said[0] == said[1] == said[2]


def test_a_tied_head_is_in_memory_once(decoder: Made) -> None:
    model = load(decoder("gpt2"))
    table, head = model._model.get_input_embeddings(), model._model.get_output_embeddings()
    assert table.packed is head.packed
    assert model.num_parameters() == AutoModelForCausalLM.from_pretrained(decoder("gpt2")).num_parameters()
    assert not any(isinstance(module, torch.nn.Linear) for module in model._model.modules())


def test_rounding_errors_that_grow_from_layer_to_layer_are_no_other_attention(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, "llama", load_tokenizer(TINYPY), num_hidden_layers=8)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("k_proj.weight")]:
        weights[name] *= 100  # scores are so large that bfloat16 does not hold them
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(make_llm(folder, dtype="bfloat16").generate([5, 6, 7], use_tqdm=False)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_is_a_little_different_is_noticed(
    decoder: Made, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Probe.attend

    def with_another_scale(self: Probe, *args: Any, **kwargs: Any) -> Any:
        result = attend(self, *args, **kwargs)
        for attention in self.layers.values():
            attention.scale = 0.4
        return result

    monkeypatch.setattr(Probe, "attend", with_another_scale)
    monkeypatch.setattr(PagedAttention, "__eq__", lambda self, other: True)
    with pytest.raises(CheckpointError, match="computes other results with our attention than with its own"):
        make_llm(decoder("llama"), dtype=dtype)


def test_no_weight_is_a_view_of_a_file(decoder: Made) -> None:
    for name in ("gpt2", "gpt_neox"):
        mapped = mapped_ranges(weight_files(decoder(name)))
        assert mapped == [], "another test has left it mapped"
        model = load(decoder(name))
        assert mapped_ranges(weight_files(decoder(name))) == []
        del model


def test_weights_have_to_be_finite(decoder: Made, tmp_path: Path) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    changed_copy(decoder("gpt2"), tmp_path, lambda weights: weights[name].view(-1)[5].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"tensor transformer\.h\.1\.mlp\.c_fc\.weight holds nan"):
        load(tmp_path)


def test_which_code_computes_is_said_once_and_chosen_by_the_setting(
    decoder: Made, caplog: pytest.LogCaptureFixture
) -> None:
    said = "LlamaForCausalLM runs with transformers' own modelling code"
    with caplog.at_level(logging.INFO):
        LLM(decoder("llama"), dtype="float32", max_model_len=64).shutdown()
        assert said not in caplog.text
        make_llm(decoder("llama")).shutdown()
    assert caplog.text.count(said) == 1


def test_discarded_weights_are_loaded_again(decoder: Made) -> None:
    llm = make_llm(decoder("gpt2"), kv_cache_memory_bytes=1 << 20)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    said = []
    for _ in range(2):
        said.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.sleep(2)
        llm.wake_up()
    assert said[0] == said[1]


def test_layers_tell_their_heads_and_windows(decoder: Made) -> None:
    model = load(decoder("cohere2"))
    assert [(one.num_heads, one.num_kv_heads, one.head_size) for one in model.state_specs] == [(6, 2, 16)] * 3
    assert [one.spec.window for one in model._attentions] == [WINDOW, None, WINDOW]
    assert (load(decoder("gpt_bigcode")).state_specs[0].num_kv_heads, load(decoder("opt")).hidden_size) == (1, 32)


def test_a_window_as_long_as_the_context_is_none(decoder: Made) -> None:
    assert [one.spec.window for one in load(decoder("cohere2"), max_position=WINDOW)._attentions] == [None] * 3


def test_memory_is_measured_with_one_layer_of_each_kind(decoder: Made) -> None:
    model = load(decoder("gpt2"))
    assert model._layers is not None
    layers = model._decoder.h
    with model.one_layer_of_each_kind():
        assert (len(model.state_specs), len(model._decoder.h)) == (1, 1)
    assert (len(model.state_specs), model._decoder.h) == (3, layers)


def test_random_weights_need_no_files(decoder: Made, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(decoder("gpt2") / "config.json")
    (tmp_path / "tokenizer.json").symlink_to(TINYPY / "tokenizer.json")
    assert load(tmp_path, load_format="dummy").num_parameters() > 0


def test_a_tensor_that_is_missing_is_named(decoder: Made, tmp_path: Path) -> None:
    changed_copy(decoder("gpt2"), tmp_path, lambda weights: weights.pop("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(CheckpointError, match=r"missing keys: \['transformer\.h\.1\.mlp\.c_fc\.weight'\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("diffllama", {"num_key_value_heads": 2}, "computes other results with our attention than with its own"),
        ("doge", {"num_key_value_heads": 2}, "makes masks of its own"),
        (
            "deepseek_v2",
            {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": None,
             "n_routed_experts": 4, "first_k_dense_replace": 3},
            "is a model with latent attention",
        ),
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, "counts positions in another way than from 0"),
        ("bert", {}, "has attention that is"),
    ],
)  # fmt: skip
def test_what_our_attention_cannot_stand_in_for_is_found_when_it_loads(
    name: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    folder = make_decoder(tmp_path, name, load_tokenizer(TINYPY), **sizes, **changes)
    with pytest.raises(CheckpointError, match=rf"\w+ {why}.*; with transformers' own code decoders are served"):
        load(folder)


def skip_attention(model: Any) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def reach_the_token_before(model: Any) -> None:
    model.model.layers[1].mlp.forward = lambda hidden: hidden.roll(1, 1)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (skip_attention, "has 3 layers, of which 2 call the attention interface"),
        (reach_the_token_before, "mixes tokens in other ways than by attention"),
    ],
)
def test_each_check_finds_its_fault(spoil: Callable[[Any], None], why: str, decoder: Made) -> None:
    Probe(128)
    model = AutoModelForCausalLM.from_pretrained(decoder("llama"), dtype=torch.float32, attn_implementation=PROBE)
    spoil(model.eval())
    with pytest.raises(UnfitModelError, match=why):
        TransformersModel(model, 3, 128)


def test_a_llama_under_another_name_is_exact(tmp_path: Path) -> None:
    """EXAONE 3's own code is not run: transformers computes the type as a Llama, with other names."""
    make_decoder(tmp_path, "exaone", load_tokenizer(TINYPY), **DECODERS["llama"])
    assert "transformer.h.0.mlp.c_fc_0.weight" in load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    config["architectures"], config["num_layers"] = ["ExaoneForCausalLM"], config.pop("num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = make_prompts(3, VOCAB_SIZE, max_length=40)
    expected = [generate_greedily(model, prompt, 6) for prompt in prompts]
    check_exact(LLM(tmp_path, dtype="float32", max_model_len=128), prompts, [6] * 3, expected)
