"""The metadata of a GGUF file's model: the fields of `config.json`, and tensors, both by the names that they have here.

The names in a file are llama.cpp's (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py). Its
conversion changes some tensors: `GgufReader` changes them back.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import StoredTensor
from quire_engine.models.checkpoints.files import brief
from quire_engine.models.checkpoints.gguf_states import (
    ALONE,
    LFMS,
    NEMOTRONS,
    is_of_state,
    split_rows,
    state_fields,
    state_parts,
)
from quire_engine.models.checkpoints.gguf_types import FORMATS, Array, ModelValues

ARCHITECTURES = {
    "deepseek2": "DeepseekV2ForCausalLM", "falcon-h1": "FalconH1ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM", "gemma3n": "Gemma3nForCausalLM", "gemma4": "Gemma4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM", "granite": "GraniteForCausalLM", "granitehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM", "lfm2": "Lfm2ForCausalLM", "lfm2moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM", "mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM",
    "mistral3": "MistralForCausalLM", **dict.fromkeys(NEMOTRONS, "NemotronHForCausalLM"), "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen35": "Qwen3_5ForCausalLM", "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "qwen3next": "Qwen3NextForCausalLM", "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM", "smollm3": "SmolLM3ForCausalLM",
}  # fmt: skip
"""llama.cpp's name → transformers'; see `_architecture`."""
INTERLEAVED = ("granite", "granitehybrid", "granitemoe", "llama", "mistral3", *NEMOTRONS, "smollm3")
"""Architectures whose queries and keys llama.cpp reorders: rows that are rotated together are side by side."""
GEMMAS = ("gemma2", "gemma3", "gemma3n", "gemma4")
WHOLE = {
    "token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer", "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj",
}  # fmt: skip
"""The tensors of a layer that are one tensor here and there."""
LAYER_INPUTS = {
    "inp_gate.weight": "per_layer_input_gate.weight", "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}  # fmt: skip
GEMMA3N_LAYER = {
    **LAYER_INPUTS,
    "altup_correct_coef.weight": "altup.correction_coefs.weight",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef.weight": "altup.prediction_coefs.weight",
    "altup_router.weight": "altup.modality_router.weight", "altup_router_norm.weight": "altup.router_norm.weight",
    "laurel_l.weight": "laurel.linear_left.weight", "laurel_r.weight": "laurel.linear_right.weight",
    "laurel_post_norm.weight": "laurel.post_laurel_norm.weight",
}  # fmt: skip
"""Those that Gemma 3n has besides."""
STREAMS = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}
"""Stacks of its projections of streams."""
GEMMA4_LAYER = {
    **LAYER_INPUTS, "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight", "ffn_gate_inp.weight": "moe.gate.weight",
    "ffn_gate_inp.scale": "moe.gate_norm.weight", "ffn_down_exps.scale": "moe.expert_scale.weight",
}  # fmt: skip
"""Those that Gemma 4 has besides, or instead."""
OTHER_LAYERS = {"gemma3n": GEMMA3N_LAYER, "gemma4": GEMMA4_LAYER}
EXPERTS = {
    "ffn_gate_exps": ("gate_proj",), "ffn_up_exps": ("up_proj",), "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}  # fmt: skip
"""Stacks of all experts, and the projections in each, one after the other."""
NEXTN = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm", "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}  # fmt: skip
"""Those of the first layer of multi-token prediction, which is behind the others."""
DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""They are read as a part of the configuration."""
END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|call|>")
"""Tokens that end an answer, which some files name as such only by their text, as llama.cpp knows them."""
UNTURNED = 1e29
"""Features whose frequencies are divided by more are not rotated."""
MAX_EXPERTS = 1 << 12
"""Experts of a layer; the largest real ones have an eighth of it."""
MAX_TENSORS = 1 << 17
"""Tensors of a model, whose experts count one by one; the largest real ones have half of it."""


class Metadata(ModelValues):
    """The metadata of a model. Its methods raise CheckpointError if a value is missing or wrong.

    Args:
        path, values, stored: see `ModelValues`.
        read_floats: reads a short tensor of float32.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        stored: Mapping[str, StoredTensor],
        read_floats: Callable[[StoredTensor], list[float]],
    ) -> None:
        kind = values.get("general.architecture")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{path}: general.architecture is {brief(kind)}; it must be one of {known}")
        super().__init__(path, values, stored, kind)
        self._read_floats = read_floats

    def _has(self, name: str) -> bool:
        return name in self.stored

    def config(self) -> dict[str, Any]:
        """The fields of `config.json`."""
        embedding = self.stored.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path}: there is no tensor token_embd.weight; is it a part of a model?")
        get = self.get
        num_experts, expert_size = get("expert_count") or None, get("expert_feed_forward_length")
        has_bias, extra = self.has_any(".attn_q.bias"), get("nextn_predict_layers", 0)
        fields = {
            "architectures": [self._architecture()],
            "dtype": "bfloat16",
            "vocab_size": embedding.shape[0],
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length") or expert_size,
            "num_hidden_layers": self.num_layers,
            "num_nextn_predict_layers": extra,
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("attention.key_length"),
            "max_position_embeddings": get("context_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": not self._has("output.weight"),
            "eos_token_id": self._end_tokens(),
            "sliding_window": get("attention.sliding_window"),
            "rope_theta": get("rope.freq_base"),
            "attention_bias": has_bias,
            "qkv_bias": has_bias,
            "mlp_bias": self._has("blk.0.ffn_up.bias"),
            # a mixture's, by all the names that they have
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), num_experts),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": expert_size,
            **dict.fromkeys(
                ("shared_expert_intermediate_size", "shared_intermediate_size"),
                get("expert_shared_feed_forward_length"),
            ),
            "norm_topk_prob": self.kind in ("qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe"),
            # Granite's
            "attention_multiplier": get("attention.scale"),
            "embedding_multiplier": get("embedding_scale"),
            "residual_multiplier": get("residual_scale"),
            "logits_scaling": get("logit_scale"),
            # Gemma's
            "attn_logit_softcapping": get("attn_logit_softcapping"),
            "final_logit_softcapping": get("final_logit_softcapping"),
        }
        if self.kind in GEMMAS:
            one = {"gemma3n": self._gemma3n, "gemma4": self._gemma4}.get(self.kind, self._gemma)
            fields |= one()
        if self.kind in NEMOTRONS:
            fields |= self._balanced()
        if self.kind == "glm4moe":
            fields |= {**self._balanced(), "use_qk_norm": self.has_any(".attn_q_norm.weight")}
        if self.kind == "gpt-oss":
            fields["intermediate_size"] = expert_size
        if self.kind == "deepseek2":
            fields |= self._deepseek(num_experts)
        return {**fields, **state_fields(self), "rope_parameters": self._rope()}

    def _architecture(self) -> str:
        if self.kind == "llama" and self.get("expert_count"):
            return "MixtralForCausalLM"
        if self.kind == "mamba" and self.get("ssm.dt_b_c_rms"):
            return "FalconMambaForCausalLM"
        if self.kind == "mistral3" and self.get("attention.temperature_scale"):
            return "Ministral3ForCausalLM"
        if self.kind == "olmo2" and self.get("attention.sliding_window"):
            return "Olmo3ForCausalLM"
        if self.kind == "granitemoe" and self.get("expert_shared_feed_forward_length"):
            return "GraniteMoeSharedForCausalLM"
        if self.kind == "deepseek2" and self.get("expert_gating_func") == 2:  # sigmoid
            return "DeepseekV3ForCausalLM"
        return ARCHITECTURES[self.kind]

    def _end_tokens(self) -> list[Any]:
        names = ("eos", "eot", "eom")
        ids = [self.values.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        tokens = self.values.get("tokenizer.ggml.tokens")
        found = _end_tokens(tokens) if isinstance(tokens, Array) else ()
        return list(dict.fromkeys([*(one for one in ids if type(one) is int), *found]))

    def _gemma(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"sliding_window": self.get("attention.sliding_window", 4096)}
        if self.kind == "gemma2":
            fields["attn_logit_softcapping"] = self.get("attn_logit_softcapping", 50.0)
            fields["final_logit_softcapping"] = self.get("final_logit_softcapping", 30.0)
        # The models with 27 billion parameters differ from the others in what no file states; llama.cpp counts layers.
        is_27b = self.get("block_count") == {"gemma2": 46, "gemma3": 62}[self.kind]
        size = self.size("attention.key_length")
        if is_27b:
            size = self.size("embedding_length") // self.size("attention.head_count")
        return {**fields, "query_pre_attn_scalar": size, "rope_local_base_freq": self.get("rope.freq_base_swa", 1e4)}

    def _gemma3n(self) -> dict[str, Any]:
        """Of the sparsity the file has quantiles of the normal distribution, in float32."""
        get, windows, normal = self.get, self.per_layer("attention.sliding_window_pattern"), NormalDist()
        sizes, scales = get("feed_forward_length"), get("activation_sparsity_scale")
        laurel, inputs = (self.stored.get(f"{one}.weight") for one in ("blk.0.laurel_l", "per_layer_token_embd"))
        known = isinstance(scales, Array) and scales.kind in FORMATS and scales.count <= len(windows)
        return {
            "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
            "intermediate_size": self.per_layer("feed_forward_length") if isinstance(sizes, Array) else sizes,
            "activation_sparsity_pattern": [round(normal.cdf(one), 6) for one in scales.read()] if known else None,
            "rope_local_base_freq": get("rope.freq_base_swa", 1e4),
            "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
            "hidden_size_per_layer_input": get("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": None if inputs is None else inputs.shape[0],
            "altup_num_inputs": get("altup.num_inputs"),
            "altup_active_idx": get("altup.active_idx"),
            "laurel_rank": None if laurel is None else laurel.shape[0],
        }

    def _gemma4(self) -> dict[str, Any]:
        """Layers that see all keys have sizes of their own."""
        get, windows = self.get, self.per_layer("attention.sliding_window_pattern")
        sizes = get("feed_forward_length")
        wide = self.per_layer("feed_forward_length") if isinstance(sizes, Array) else [sizes]
        kv_heads = get("attention.head_count_kv")
        each = self.kv_heads if isinstance(kv_heads, Array) else [kv_heads] * len(windows)
        full = [number for number, has_window in enumerate(windows) if not has_window]
        with_window = next((one for one, has_window in zip(each, windows, strict=True) if has_window), each[0])
        inputs = self.stored.get("per_layer_token_embd.weight")
        return {
            "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
            "head_dim": get("attention.key_length_swa"),
            "num_key_value_heads": with_window,
            "per_layer_config": {
                str(number): {"head_dim": get("attention.key_length"), "num_key_value_heads": each[number]}
                for number in full
            },
            "attention_k_eq_v": bool(full) and not self._has(f"blk.{full[0]}.attn_v.weight"),
            "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
            "intermediate_size": wide[0],
            "use_double_wide_mlp": len(set(wide)) > 1,
            "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": None if inputs is None else inputs.shape[0],
            "enable_moe_block": bool(get("expert_count")),
            "top_k_experts": get("expert_used_count"),
        }

    def _balanced(self) -> dict[str, Any]:
        """A choice of experts as DeepSeek-V3 makes it."""
        return {
            "first_k_dense_replace": self.get("leading_dense_block_count", 0),
            "n_shared_experts": self.get("expert_shared_count"),
            "routed_scaling_factor": self.get("expert_weights_scale") or 1.0,
            "norm_topk_prob": self.get("expert_weights_norm", False),
            "n_group": self.get("expert_group_count") or 1,
            "topk_group": self.get("expert_group_used_count") or 1,
        }

    def _deepseek(self, num_experts: Any) -> dict[str, Any]:
        get, rope_size = self.get, self.size("rope.dimension_count")
        key_size = get("attention.key_length_mla") or self.size("attention.key_length")
        fields, groups, top_groups = self._balanced(), get("expert_group_count"), get("expert_group_used_count")
        if not groups:  # older files do not say it of the models that have them
            groups, top_groups = (8, 3) if num_experts == 160 else (8, 4) if num_experts == 256 else (1, 1)
        fields |= {
            "head_dim": rope_size,
            "num_key_value_heads": get("attention.head_count"),
            "q_lora_rank": get("attention.q_lora_rank"),
            "kv_lora_rank": get("attention.kv_lora_rank"),
            "qk_rope_head_dim": rope_size,
            "qk_nope_head_dim": key_size - rope_size if type(key_size) is int else key_size,
            "v_head_dim": get("attention.value_length_mla") or get("attention.value_length"),
            "n_group": groups,
            "topk_group": top_groups,
        }
        if self._architecture() == "DeepseekV2ForCausalLM":
            fields["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
        return fields

    def _rope(self) -> dict[str, Any]:
        get = self.get
        if self.kind in ALONE:
            return {}
        rope: dict[str, Any] = {"rope_theta": get("rope.freq_base")}
        if self.kind == "gemma4":
            freqs = self.stored.get("rope_freqs.weight")
            divisors = [1.0] if freqs is None else self._read_floats(freqs)
            turned = sum(one < UNTURNED for one in divisors) / len(divisors)
            rope |= {"rope_type": "proportional", "partial_rotary_factor": turned}
            return {
                "full_attention": {name: value for name, value in rope.items() if value is not None},
                "sliding_attention": {"rope_theta": get("rope.freq_base_swa", 1e4)},
            }
        head_size, rotated = get("attention.key_length"), get("rope.dimension_count")
        if head_size is None and self.kind != "deepseek2":
            head_size = self.size("embedding_length") // self.size("attention.head_count")
        if type(rotated) is type(head_size) is int and 0 < rotated < head_size and self.kind != "deepseek2":
            rope["partial_rotary_factor"] = (rotated + 0.25) / head_size  # of which as many features are the whole part
        kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor")
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        names = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
        one, short, long = (self.stored.get(name) for name in names)
        if one is not None or (short is not None and long is not None):
            factors = [self._read_floats(tensor) for tensor in (short or one, long or one) if tensor is not None]
            rope |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
            rope["attention_factor"] = get("rope.scaling.attn_factor", 1.0)
        elif kind == "linear":
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            rope |= {"rope_type": "yarn", "factor": factor, "truncate": self.kind != "gpt-oss"}
            rope["beta_fast"], rope["beta_slow"] = (get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow"))
            multiplier = get("rope.scaling.yarn_log_multiplier")
            if type(multiplier) is float and multiplier:  # for DeepSeek a tenth of it is written
                scale = float(f"{10 * multiplier:.6g}") if self.kind == "deepseek2" else multiplier
                rope["mscale"] = rope["mscale_all_dim"] = scale
            rope["llama_4_scaling_beta"] = get("attention.temperature_scale") or None
        elif kind != "none":
            raise CheckpointError(
                f"{self.path}: {self.kind}.rope.scaling.type is {brief(kind)}; it must be none, linear, "
                "yarn, or longrope with its factors"
            )
        return {name: value for name, value in rope.items() if value is not None}

    def interleaved_heads(self, name: str) -> int | None:
        """The number of heads in a tensor of queries or keys whose rows are reordered; None for other tensors."""
        part = name.split(".")[2:3]
        if self.kind not in INTERLEAVED or part not in (["attn_q"], ["attn_k"]):
            return None
        if part == ["attn_k"] and self.kind in ("granitehybrid", *NEMOTRONS):
            return max(self.kv_heads)
        return self.size("attention.head_count" if part == ["attn_q"] else "attention.head_count_kv")

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by their names here, with single projections and experts instead of fused and stacked ones."""
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in self.stored.items():
            parts = {} if name in DERIVED else self._parts(name, tensor)
            if twice := tensors.keys() & parts.keys():
                raise CheckpointError(f"{tensor.path}: {name} is {min(twice)}, which another tensor is as well")
            if len(tensors) + len(parts) > MAX_TENSORS:
                raise CheckpointError(f"{tensor.path}: more than {MAX_TENSORS} tensors, experts counted one by one")
            tensors |= parts
        return tensors

    def _parts(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        whole, _, kind = name.rpartition(".")
        if whole in WHOLE:
            return {f"{WHOLE[whole]}.{kind}": tensor}
        if whole == "token_embd_norm" and self.kind in LFMS:  # what the last norm is called
            return {f"norm.{kind}": tensor}
        if whole in STREAMS and self.kind == "gemma3n" and len(tensor.shape) == 3:
            return self._stack(STREAMS[whole], kind, ("",), tensor)
        match = re.fullmatch(r"blk\.(\d{1,5})\.(?:([\w.]+)\.(?:weight|bias|scale)|(ssm_[ad]|ffn_norm))", name)
        if match is None:
            return {name: tensor}
        number, part = int(match[1]), match[2] or match[3]
        layer, num_layers = f"layers.{number}", self.num_layers
        if type(num_layers) is int and number >= num_layers and self.get("nextn_predict_layers"):
            layer = f"mtp.layers.{number - num_layers}"
            if part in NEXTN:
                return {f"{'mtp' if number == num_layers else layer}.{NEXTN[part]}.{kind}": tensor}
        if is_of_state(self.kind, part):
            return state_parts(self, layer, part, kind, tensor)
        if own := OTHER_LAYERS.get(self.kind, {}).get(f"{part}.{kind}"):
            return {f"{layer}.{own}": tensor}
        if part in EXPERTS and len(tensor.shape) == (3 if kind == "weight" else 2):
            module = "moe" if self.kind == "gemma4" else "mlp"
            return self._stack(f"{layer}.{module}.experts", kind, tuple(f".{one}" for one in EXPERTS[part]), tensor)
        if self.kind == "phi3" and part == "attn_qkv":
            heads, kv_heads = self.size("attention.head_count"), self.size("attention.head_count_kv")
            names = [f"{layer}.self_attn.{one}_proj.{kind}" for one in "qkv"]
            return split_rows(tensor, dict(zip(names, (heads, kv_heads, kv_heads), strict=True)))
        if self.kind == "phi3" and part == "ffn_up":
            return split_rows(tensor, {f"{layer}.mlp.{one}_proj.{kind}": 1 for one in ("gate", "up")})
        match part, kind:
            case "attn_k_b", "weight":
                return {f"{layer}.self_attn.kv_b_proj.weight": self._joined(tensor)}
            case "attn_v_b", "weight":
                return {}
            case "attn_sinks", "weight":
                return {f"{layer}.self_attn.sinks": tensor}
            case "exp_probs_b", "bias":
                return {f"{layer}.mlp.choice_bias.weight": tensor}
            case "ffn_gate_inp_shexp", "weight" if len(tensor.shape) == 1:
                return {f"{layer}.mlp.shared_expert_gate.weight": dataclasses.replace(tensor, shape=(1, *tensor.shape))}
            case "attn_norm" | "ffn_norm", "weight" if self.kind in LFMS:
                return {f"{layer}.{'operator' if part == 'attn_norm' else 'ffn'}_norm.weight": tensor}
            case "shortconv.conv", "weight" if len(tensor.shape) == 2:
                shape = tensor.shape[0], 1, tensor.shape[1]
                return {f"{layer}.mixer.conv.weight": dataclasses.replace(tensor, shape=shape)}
            case "shortconv.conv", "bias":
                return {f"{layer}.mixer.conv.bias": tensor}
            case "shortconv.in_proj", _:
                return split_rows(tensor, {f"{layer}.mixer.{one}_proj.{kind}": 1 for one in "bcx"})
            case "shortconv.out_proj", _:
                return {f"{layer}.mixer.out_proj.{kind}": tensor}
            case "ffn_norm", _ if self.kind == "falcon-h1":  # without an ending
                return {f"{layer}.pre_ff_layernorm.weight": tensor}
            case "ffn_norm", "weight" if self.kind in GEMMAS:
                return {f"{layer}.pre_feedforward_layernorm.weight": tensor}
        return {f"{layer}.{LAYER[part]}.{kind}" if part in LAYER else name: tensor}

    def _stack(self, prefix: str, kind: str, parts: tuple[str, ...], stack: StoredTensor) -> dict[str, StoredTensor]:
        """Matrices of a stack, each of some parts, one after the other."""
        number, rows, *columns = stack.shape
        if number > MAX_EXPERTS:
            raise CheckpointError(f"{stack.path}: {stack.name} is of {number} experts; at most {MAX_EXPERTS} are read")
        each = rows // len(parts)
        piece = dataclasses.replace(stack, shape=(each, *columns), num_bytes=stack.num_bytes // number // len(parts))
        return {
            f"{prefix}.{matrix}{part}.{kind}": dataclasses.replace(piece, first_row=i * each, matrix=matrix)
            for matrix in range(number)
            for i, part in enumerate(parts)
        }

    def _joined(self, keys: StoredTensor) -> StoredTensor:
        values = self.stored.get(keys.name.replace("attn_k_b", "attn_v_b"))
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(f"{keys.path}: {keys.name} must be of three dimensions, and have attn_v_b beside it")
        nope_size = self.size("attention.key_length_mla") - self.size("rope.dimension_count")
        shape = (keys.shape[0] * (nope_size + values.shape[1]), keys.shape[1])
        num_bytes = keys.num_bytes + values.num_bytes
        joined = dataclasses.replace(keys, dtype="F32", shape=shape, num_bytes=num_bytes)
        return dataclasses.replace(joined, companions={"keys": keys, "values": values})

    def tokenizer(self) -> Mapping[str, Any]:
        """The values that describe the tokenizer."""
        values = {name: value for name, value in self.values.items() if name.startswith("tokenizer.")}
        if not isinstance(values.get("tokenizer.ggml.tokens"), Array):
            raise CheckpointError(f"{self.path}: there is no tokenizer in it; name a folder with the setting tokenizer")
        return {**values, "general.architecture": self.kind}


@functools.lru_cache(maxsize=4)
def _end_tokens(tokens: Array) -> tuple[int, ...]:
    found = {text: index for index, text in enumerate(tokens.read()) if text in (*END_TOKENS, "<|return|>")}
    if "<|return|>" in found:  # of gpt-oss, whose messages end in <|end|>, and whose answers go on then
        found.pop("<|end|>", None)
    return tuple(found.values())
