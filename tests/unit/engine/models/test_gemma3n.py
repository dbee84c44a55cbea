"""Gemma 3n: what its files say, and that a row's bits depend on no other row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.options import AttentionOptions, MLPOptions
from quire_kernels import cpu
from support.checkpoints import changed_copy
from support.every_kind import core_of
from support.oracle import VOCAB_SIZE, make_prompts
from transformers import AutoConfig

FULL, SLIDING = "full_attention", "sliding_attention"
E2B = {
    "hidden_size": 2048, "intermediate_size": [8192] * 30, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "layer_types": ([*[SLIDING] * 4, FULL] * 6), "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": None, "model_type": "gemma3n_text", "vocab_size": 262400, "altup_lr_multiplier": 1.0,
}  # fmt: skip
"""As it is published, but for what transformers adds."""
PROMPTS = [*make_prompts(5, VOCAB_SIZE, max_length=60), *make_prompts(1, VOCAB_SIZE, max_length=400, seed=3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.mark.parametrize("text", [E2B, {"model_type": "gemma3n_text"}], ids=["published", "defaults"])
@pytest.mark.parametrize("stored", [False, True], ids=["as published", "as transformers stores it"])
def test_as_transformers_reads_it(text: dict[str, Any], stored: bool, tmp_path: Path) -> None:
    theirs = AutoConfig.for_model(**text)
    given = json.loads(theirs.to_json_string(use_diff=False)) if stored else text
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": given}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = CheckpointConfig.from_folder(tmp_path)
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    sizes = theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim
    assert (config.num_heads, config.num_kv_heads, config.head_size) == sizes
    assert len(config.options.layers) == theirs.num_hidden_layers
    for number, layer in enumerate(config.options.layers):
        attention, mlp, kind = layer.attention, layer.mlp, theirs.layer_types[number]
        assert isinstance(attention, AttentionOptions)
        assert isinstance(mlp, MLPOptions)
        assert attention.window == (theirs.sliding_window if kind == SLIDING else None)
        assert (attention.cache_of is not None) == (theirs.kv_sharing_modes[number] == "reuse")
        if attention.cache_of is not None:
            assert theirs.kv_sharing_modes[attention.cache_of] == "store"
            assert theirs.layer_types[attention.cache_of] == kind
        assert attention.rope is not None
        assert attention.rope.rope_theta == theirs.rope_parameters[kind]["rope_theta"]
        assert (mlp.intermediate_size, mlp.sparsity) == (
            theirs.intermediate_size[number], theirs.activation_sparsity_pattern[number],
        )  # fmt: skip
    altup, inputs = config.options.altup, config.options.layer_inputs
    assert altup is not None
    assert (altup.num_streams, altup.active, altup.scales_output, altup.laurel_rank) == (
        theirs.altup_num_inputs, theirs.altup_active_idx, theirs.altup_correct_scale, theirs.laurel_rank,
    )  # fmt: skip
    assert inputs is not None
    assert (inputs.size, inputs.vocab_size) == (theirs.hidden_size_per_layer_input, theirs.vocab_size_per_layer_input)
    assert config.options.logits_soft_cap == theirs.final_logit_softcapping


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [8192] * 29}, "it must be a size, or one for each of 30 layers"),
        ({"intermediate_size": [8192] * 29 + [0]}, "intermediate_size is 0; it must be an integer from 1"),
        ({"activation_sparsity_pattern": [0.95] * 29}, "it must be a number from 0 to below 1 for each of 30 layers"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "it must be a number from 0 to below 1 for each of 30 layers"),
        ({"altup_num_inputs": 1}, "altup_num_inputs is 1; it must be an integer from 2 to 16"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4; it must be an integer from 0 to 3"),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30; it must be an integer from 0 to 29"),
        ({"num_kv_shared_layers": 26}, "num_kv_shared_layers is 26; it must be less: the layers before have none"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0; it must be an integer from 1"),
        ({"hidden_activation": "tanh"}, "hidden_activation is 'tanh'; it must be one of"),
    ],
)
def test_what_is_wrong_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3nForCausalLM"], **E2B, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as rejected:
        CheckpointConfig.from_folder(tmp_path)
    assert message in str(rejected.value)


def test_ranks_divide_the_feed_forwards_of_all_layers(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3nForCausalLM"], **E2B, "intermediate_size": [8192] * 29 + [8190]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="intermediate_size=8190 is no multiple of it; for this model it must be 1 or"):
        CheckpointConfig.from_folder(tmp_path).check_parallel(4)


def test_what_training_left_is_ignored(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Published checkpoints have keys and values of layers that use another's. What is missing is named."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in ("k_proj", "v_proj", "k_norm"):
            key = f"model.language_model.layers.1.self_attn.{name}.weight"
            assert key.replace("layers.1", "layers.3") not in weights
            weights[key.replace("layers.1", "layers.3")] = weights[key].clone()

    whole, name = checkpoint("gemma3n-conditional"), "model.language_model.layers.2.altup.correct_output_scale"
    check_checkpoint(changed_copy(whole, tmp_path, change))
    changed_copy(whole, tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=r"hold no layers\.2\.altup\.correct_output_scale"):
        check_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_no_other_row(dtype: str, checkpoint: Callable[[str], Path]) -> None:
    """Alone, in a batch, in chunks of a prompt, recorded or not, and from a cached prefix."""
    if cpu.library() is None:
        pytest.skip("products of torch have other bits in other batches")

    def scores(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.get_stats().num_failed_steps == 0
        return [
            [(token, logprob.logprob) for one in (*(out.prompt_logprobs or ())[1:], *(out.outputs[0].logprobs or ()))
             for token, logprob in one.items()]
            for out in outputs
        ]  # fmt: skip

    sizes = {"dtype": dtype, "max_model_len": 448, "kv_cache_memory_bytes": 1 << 22, "enable_prefix_caching": False}
    llm = LLM(checkpoint("gemma3n"), max_num_batched_tokens=512, **sizes)
    alone = [scores(llm, [prompt])[0] for prompt in PROMPTS]
    assert scores(llm, PROMPTS) == alone
    llm.shutdown()
    for size in (1, 7, 64):
        llm = LLM(
            checkpoint("gemma3n"), max_num_batched_tokens=max(size, 16), long_prefill_token_threshold=size, **sizes
        )
        assert scores(llm, PROMPTS[::-1]) == alone[::-1]
        llm.shutdown()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    llm = LLM(checkpoint("gemma3n"), **{**sizes, "enable_prefix_caching": True})
    said = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
    assert llm.get_stats().prefix_cache_hits > 200
    for outputs in said:
        found = [[(t, one.logprob) for entry in out.outputs[0].logprobs or () for t, one in entry.items()]
                 for out in outputs]  # fmt: skip
        assert found == [one[-8:] for one in alone]
    core_of(llm).scheduler.check_integrity()
    llm.shutdown()


def test_streams_differ(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The tokens are those of all streams: with other projections of them, others follow."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name: torch.roll(one, 1, 0) for name, one in weights.items() if "altup_projections" in name}

    changed_copy(checkpoint("gemma3n"), tmp_path, change)
    said = []
    for folder in (checkpoint("gemma3n"), tmp_path):
        llm = LLM(folder, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 20)
        said.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)])
        llm.shutdown()
    assert said[0] != said[1]
