"""Checkpoints as quantisers publish them: random codes and scales, packed word by word as their libraries do, and what
their formulas make of them in float32."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["FORMS", "SIZES", "Form", "awq", "compressed_tensors", "gptq", "make_model", "quantized", "write_quantized"]

Tensors = dict[str, torch.Tensor]
HYBRID = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None,
}  # fmt: skip
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 144, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "attention_bias": True,
    },
    "phi3": {  # q, k and v are one tensor, and k and v do not begin at words
        "hidden_size": 80, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20,
        "pad_token_id": None,
    },
    "qwen3_moe": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 3,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "deepseek_v2": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 48, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "qwen3_5_text": {**HYBRID, **GATED_DELTA, "intermediate_size": 96},
    "qwen3_5_moe_text": {
        **HYBRID, **GATED_DELTA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_next": {
        **HYBRID, **GATED_DELTA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {
        **HYBRID, "intermediate_size": 144, "conv_bias": True, "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16,
    },
    "granitemoehybrid": {
        **HYBRID, **MAMBA, "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"],
    },
    "nemotron_h": {
        **HYBRID, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "intermediate_size": 96,
        "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2,
    },
    "falcon_h1": {
        **HYBRID, **MAMBA, "intermediate_size": 96, "mamba_d_ssm": 128, "mlp_multipliers": [0.8, 0.9],
        "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 0.7, 0.5, 1.3, 0.6],
    },
    "gemma3n_text": {
        **HYBRID, "intermediate_size": 96, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 515,
        "num_hidden_layers": 3, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0], "tie_word_embeddings": True,
    },
    "jamba": {
        **HYBRID, "intermediate_size": 96, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1,
        "num_experts": 3, "mamba_d_state": 16, "mamba_dt_rank": 16,
    },
    "lfm3": {  # whose gates have an output feature for each head
        **HYBRID, "num_attention_heads": 16, "intermediate_size": 96, "num_hidden_layers": 3, "eos_token_id": 1,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
    },
    "recurrent_gemma": {**HYBRID, "intermediate_size": 192, "block_types": ["recurrent", "attention"]},
    "zamba2": {
        **HYBRID, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 96, "n_mamba_heads": 8,
        "mamba_ngroups": 2, "mamba_d_state": 16, "layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8,
        "use_shared_attention_adapter": True, "tie_word_embeddings": True,
    },
    "bamba": {**HYBRID, **MAMBA, "intermediate_size": 96, "attn_layer_indices": [1]},
    "olmo_hybrid": {**HYBRID, **GATED_DELTA, "linear_num_key_heads": 8, "intermediate_size": 96, "eos_token_id": 1},
}  # fmt: skip
"""Families' models of a few kilobytes, whose sizes are no multiples of most groups'."""


@dataclass(frozen=True)
class Form:
    """How one quantiser publishes a weight."""

    config: dict[str, Any]
    """`quantization_config`."""
    make: Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]
    """(N, K, random numbers) → tensors by the rest of their names, and [N, K] float32."""
    is_exact: bool = True
    """The weight stays what the formula says, to the last bit."""
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other JSON files of the folder."""


def pack_words(values_MX: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [M, ⌈X / per word⌉]: value `order[j]` of each word's at bit `j · bits`."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, size = values_MX.shape
    padded = np.zeros((rows, -(-size // per_word) * per_word), np.uint32)
    padded[:, :size] = values_MX
    words = np.zeros((rows, padded.shape[1] // per_word), np.uint32)
    for word in range(words.shape[1]):
        for j in range(per_word):
            words[:, word] |= padded[:, word * per_word + order[j]] << np.uint32(j * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def random_codes(rows: int, columns: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1 << bits, (rows, columns), generator=generator)


def random_scales(rows: int, columns: int, dtype: torch.dtype, bits: int, generator: torch.Generator) -> torch.Tensor:
    return ((torch.rand(rows, columns, generator=generator) + 0.5) * 0.3 / (1 << bits)).to(dtype)


def make_groups(columns: int, group_size: int | None, order: str, generator: torch.Generator) -> torch.Tensor:
    """[K] the group of each column."""
    groups = torch.arange(columns) // (group_size or columns)
    return groups[torch.randperm(columns, generator=generator)] if order == "shuffled" else groups


def gptq(
    bits: int, group_size: int | None, *, sym: bool = True, version: str = "gptq", order: str = "in order",
    dtype: torch.dtype = torch.float16, own_order: bool = False,
) -> Form:  # fmt: skip
    """AutoGPTQ's `QuantLinear.pack` and its formula.

    Args:
        bits: 4 or 8.
        group_size: None: channels.
        sym: all zero points are in the middle.
        version: `checkpoint_format`.
        order: `in order` or `shuffled` (act-order).
        dtype: of scales.
        own_order: each projection has another order.
    """

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        num_groups = -(-columns // (group_size or columns))
        codes_KN = random_codes(columns, rows, bits, generator)
        scales_GN = random_scales(num_groups, rows, dtype, bits, generator)
        middle = torch.full((num_groups, rows), 1 << bits - 1)
        zeros_GN = middle if sym else torch.randint(1, 1 << bits, (num_groups, rows), generator=generator)
        seeded = generator if own_order else torch.Generator().manual_seed(columns)
        groups_K = make_groups(columns, group_size, order, seeded)
        stored = zeros_GN - 1 if version == "gptq" else zeros_GN
        tensors = {
            "qweight": pack_words(codes_KN.t().numpy(), bits).t().contiguous(),
            "qzeros": pack_words(stored.numpy(), bits), "scales": scales_GN, "g_idx": groups_K.int(),
        }  # fmt: skip
        weight_KN = scales_GN.float()[groups_K] * (codes_KN - zeros_GN[groups_K])
        return tensors, weight_KN.t().contiguous()

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size or -1, "sym": sym,
        "desc_act": order != "in order", "checkpoint_format": version,
    }  # fmt: skip
    return Form(config, make)


def awq(group_size: int | None, *, zero_point: bool = True) -> Form:
    """AutoAWQ's `WQLinear_GEMM.from_linear` and its formula."""

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        num_groups = -(-columns // (group_size or columns))
        codes_KN = random_codes(columns, rows, 4, generator)
        scales_GN = random_scales(num_groups, rows, torch.float16, 4, generator)
        zeros_GN = random_codes(num_groups, rows, 4, generator) if zero_point else torch.full((num_groups, rows), 8)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": pack_words(codes_KN.numpy(), 4, order), "scales": scales_GN}
        if zero_point:
            tensors["qzeros"] = pack_words(zeros_GN.numpy(), 4, order)
        groups_K = make_groups(columns, group_size, "in order", generator)
        weight_KN = (codes_KN - zeros_GN[groups_K]) * scales_GN.float()[groups_K]
        return tensors, weight_KN.t().contiguous()

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size or -1, "zero_point": zero_point,
              "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
    return Form(config, make)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def compressed_tensors(
    bits: int, group_size: int | None, *, symmetric: bool = True, actorder: str | None = None, packed_zeros: bool = True
) -> Form:
    """compressed-tensors' `pack_to_int32`, of signed codes with an offset, and its `dequantize`."""

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        num_groups, offset = -(-columns // (group_size or columns)), 1 << bits - 1
        signed_NK = random_codes(rows, columns, bits, generator) - offset
        scales_NG = random_scales(rows, num_groups, torch.bfloat16, bits, generator)
        zeros_NG = torch.zeros(rows, num_groups, dtype=torch.int64)
        tensors = {"weight_packed": pack_words((signed_NK + offset).numpy(), bits), "weight_scale": scales_NG,
                   "weight_shape": torch.tensor([rows, columns])}  # fmt: skip
        if not symmetric:
            zeros_NG = random_codes(rows, num_groups, bits, generator) - offset
            words = pack_words((zeros_NG + offset).t().numpy(), bits).t().contiguous()
            tensors["weight_zero_point"] = words if packed_zeros else zeros_NG.to(torch.int8)
        order = "shuffled" if actorder == "group" else "in order"
        groups_K = make_groups(columns, group_size, order, torch.Generator().manual_seed(columns))
        if actorder == "group":
            tensors["weight_g_idx"] = groups_K.int()
        return tensors, scales_NG.float()[:, groups_K] * (signed_NK - zeros_NG[:, groups_K])

    strategy = "channel" if group_size is None else "group"
    config = compressed_config(
        "pack-quantized", num_bits=bits, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric,
        actorder=actorder, dynamic=False,
    )  # fmt: skip
    return Form(config, make)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 = torch.tensor([*E2M1, *(-one for one in E2M1)])


def nvfp4(modelopt: bool, algorithm: str = "NVFP4") -> Form:
    """compressed-tensors' `pack_fp4_to_uint8`, or modelopt's; scales of 16 columns in fp8 and one of the weight."""

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes_NK = random_codes(rows, columns, 4, generator)
        packed = (codes_NK[:, ::2] | (codes_NK[:, 1::2] << 4)).to(torch.uint8)
        scales_NG = (torch.rand(rows, columns // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
        whole = torch.rand(1, generator=generator) * 1000 + 5000
        scales = scales_NG.float() * (1 / whole) if modelopt else scales_NG.float() / whole
        tensors = {"weight_scale": scales_NG, "input_global_scale": torch.ones(1)}
        if modelopt:
            tensors = {"weight_scale": scales_NG, "input_scale": torch.tensor(1.0), "weight": packed,
                       "weight_scale_2": (1 / whole)[0]}  # fmt: skip
        else:
            tensors |= {"weight_packed": packed, "weight_global_scale": whole}
        return tensors, FP4[codes_NK] * scales.repeat_interleave(16, 1)

    if modelopt:
        extra = {"hf_quant_config.json": {"quantization": {"quant_algo": algorithm, "group_size": 16}}}
        return Form({}, make, extra=extra)
    return Form(compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                                  group_size=16, symmetric=True), make)  # fmt: skip


def fp8(
    shape: str,
    config: dict[str, Any],
    extra: dict[str, dict[str, Any]] | None = None,
    names: tuple[str, str] = ("weight_scale", "input_scale"),
) -> Form:
    """One scale for a weight (`[]` or `[1]`), or for each output feature; and the names of the scales of weights and of
    activations."""

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = (torch.randn(rows, columns, generator=generator) * 50).to(torch.float8_e4m3fn)
        sizes = {"[]": (), "[1]": (1,), "[N]": (rows,), "[N, 1]": (rows, 1)}[shape]
        scales = torch.rand(sizes, generator=generator) * 1e-3 + 1e-3
        by_row = scales.view(-1, 1) if scales.numel() > 1 else scales.view(1, 1)
        return {"weight": weight, **dict(zip(names, (scales, torch.tensor(1.0)), strict=True))}, weight.float() * by_row

    return Form(config, make, extra=extra or {})


def int8(is_per_tensor: bool = False, scb: bool = False) -> Form:
    """compressed-tensors' int8 with one scale for a weight, or bitsandbytes'."""

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
        scales = torch.rand(1 if is_per_tensor else rows, generator=generator) * 1e-3 + 1e-3
        numbers = weight.float() * scales.view(-1, 1)
        if scb:
            return {"weight": weight, "SCB": scales * 127, "weight_format": torch.tensor(0, dtype=torch.uint8)}, numbers
        return {"weight": weight, "weight_scale": scales}, numbers

    if scb:
        return Form({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, make, is_exact=False)
    config = compressed_config("int-quantized", num_bits=8, type="int", strategy="tensor", symmetric=True)
    return Form(config, make, is_exact=False)


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip
BNB_FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]


def bitsandbytes(kind: str, nested: bool, block_size: int = 64) -> Form:
    """bitsandbytes' blocks of a flattened weight, the higher bits first, with its `quant_state`."""
    numbers, largest = (NF4, 127) if kind == "nf4" else ([*BNB_FP4, *(-one for one in BNB_FP4)], 120)
    rounded = (torch.tensor(numbers) * largest).round()

    def make(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = random_codes(rows, columns, 4, generator)
        flat = codes.flatten()
        blocks = rows * columns // block_size
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block_size, "dtype": "bfloat16",
                                 "shape": [rows, columns]}  # fmt: skip
        absmax = torch.rand(blocks, generator=generator) * 0.2 + 0.1
        tensors = {"weight": ((flat[::2] << 4) | flat[1::2]).to(torch.uint8).view(-1, 1),
                   "weight.quant_map": torch.tensor(numbers)}  # fmt: skip
        if nested:
            quantized = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
            of_blocks = torch.rand(-(-blocks // 256), generator=generator) * 0.1
            quant_map = torch.linspace(-1, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.2}
            absmax = quant_map[quantized.int()] * of_blocks[torch.arange(blocks) // 256] + 0.2
            tensors |= {"weight.absmax": quantized, "weight.nested_absmax": of_blocks,
                        "weight.nested_quant_map": quant_map}  # fmt: skip
        else:
            tensors["weight.absmax"] = absmax
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        weight = rounded[flat].view(-1, block_size) * (absmax / largest).view(-1, 1)
        return tensors, weight.view(rows, columns)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": nested}  # fmt: skip
    return Form(config, make)


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FORMS = {
    "gptq": gptq(4, 128),
    "gptq-32-asym": gptq(4, 32, sym=False),
    "gptq-v2-asym": gptq(4, 64, sym=False, version="gptq_v2", dtype=torch.bfloat16),
    "gptq-channel": gptq(4, None, dtype=torch.float32),
    "gptq-8": gptq(8, 128),
    "gptq-8-asym": gptq(8, 16, sym=False),
    "gptq-act-order": gptq(4, 16, order="shuffled"),
    "gptq-act-order-asym": gptq(4, 32, sym=False, order="shuffled"),
    "gptq-act-order-channel": gptq(4, None, order="shuffled"),
    "gptq-orders": gptq(4, 16, order="shuffled", own_order=True),
    "awq": awq(16),
    "awq-128": awq(128),
    "awq-symmetric": awq(64, zero_point=False),
    "packed": compressed_tensors(4, 32),
    "packed-asym": compressed_tensors(4, 16, symmetric=False),
    "packed-asym-int8-zeros": compressed_tensors(4, 16, symmetric=False, packed_zeros=False),
    "packed-channel-asym": compressed_tensors(4, None, symmetric=False),
    "packed-8-channel": compressed_tensors(8, None),
    "packed-8-asym": compressed_tensors(8, 64, symmetric=False),
    "packed-act-order": compressed_tensors(4, 16, symmetric=False, actorder="group"),
    "packed-weight-order": compressed_tensors(4, 16, actorder="weight"),
    "nvfp4": nvfp4(modelopt=False),
    "modelopt-nvfp4": nvfp4(modelopt=True),
    "modelopt-nvfp4-weights": nvfp4(modelopt=True, algorithm="W4A16_NVFP4"),
    "fp8-tensor": fp8("[]", FP8_CONFIG),
    "fp8-static": fp8(
        "[]",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        names=("weight_scale_inv", "activation_scale"),
    ),
    "fp8-tensor-1": fp8("[1]", compressed_config("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8-channel": fp8("[N, 1]", compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fbgemm-fp8": fp8("[N, 1]", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt-fp8": fp8("[]", {}, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}),
    "int8-tensor": int8(is_per_tensor=True),
    "bitsandbytes-int8": int8(scb=True),
    "nf4": bitsandbytes("nf4", nested=False, block_size=64),
    "nf4-nested": bitsandbytes("nf4", nested=True),
    "fp4": bitsandbytes("fp4", nested=True),
}
"""By name."""


def make_model(family: str, folder: Path, **sizes: Any) -> Path:
    """A random model in float32; for sizes that are not given see `SIZES`."""
    common = {"num_hidden_layers": 2, "vocab_size": 515, "max_position_embeddings": 256, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **{**common, **SIZES[family], **sizes})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def quantized(name: str) -> bool:
    """Whether quantisers take a tensor."""
    return name.endswith(
        ("_proj.weight", "_proj_with_mqa.weight", ".in_proj_qkv.weight", ".in_proj_qkvz.weight", ".in_proj_z.weight",
         ".w1.weight", ".w2.weight", ".w3.weight", ".shared_mlp.input_linear.weight",
         ".shared_mlp.output_linear.weight")
    )  # fmt: skip


def write_quantized(model: Path, form: Form, folder: Path, takes: Callable[[str], bool] = quantized) -> None:
    """Write a model as a quantiser publishes it, `folder/quantized`, and what that stands for, `folder/plain`.

    Args:
        model: from `make_model`.
        form: of the quantiser.
        folder: to write to.
        takes: whether it takes a tensor; others stay as they are.
    """
    plain, packed = load_file(model / "model.safetensors"), {}
    for number, name in enumerate([one for one in plain if takes(one)]):
        tensors, weight = form.make(*plain.pop(name).shape, torch.Generator().manual_seed(number))
        packed |= {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}
        packed[f"{name}@"] = weight
    weights = {name.removesuffix("@"): packed.pop(name) for name in list(packed) if name.endswith("@")}
    for kind, tensors in (("quantized", packed), ("plain", weights)):
        (folder / kind).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            (folder / kind / file).write_bytes((model / file).read_bytes())
        save_file(plain | tensors, folder / kind / "model.safetensors")
    path = folder / "quantized" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | ({"quantization_config": form.config} if form.config else {})))
    for name, values in form.extra.items():
        (folder / "quantized" / name).write_text(json.dumps(values))
