"""Checkpoints of AWQ, GPTQ, compressed-tensors, bitsandbytes and others: the numbers that their formulas give."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint, weight_cache
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.latent_attention import _HeadProjections
from quire_engine.models.layers.parallel import Packable, VocabParallel
from quire_engine.models.layers.rg_lru import _Gates
from quire_engine.models.linear import base
from quire_engine.models.loader import load_model
from quire_engine.outputs import RequestOutput
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import GroupedCodes, LinearWeight, pack_linear
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.full import FULL
from support.quantized import FORMS, Form, awq, compressed_tensors, gptq, make_model, quantized, write_quantized

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"
WHOLE = ParallelState()
SECOND = ParallelState(rank=1, tensor_parallel_size=2)
HYBRIDS = [
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba",
    "bamba", "olmo_hybrid", "lfm3", "recurrent_gemma", "zamba2",
]  # fmt: skip
"""Families with recurrent layers."""
HYBRID_FORMS = ["gptq-32-asym", "gptq-act-order", "awq", "packed-asym"]
OF_HYBRIDS = [*((form, WHOLE) for form in [*HYBRID_FORMS, "int8-tensor"]), ("awq", SECOND), ("packed-asym", SECOND)]
"""Form and rank: by default every other one with each family."""
ACT_ORDER = [name for name in FORMS if "act-order" in name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a family's model in a form, and of what it stands for."""

    @cache
    def model(family: str) -> Path:
        return make_model(family, tmp_path_factory.mktemp(family))

    @cache
    def write(family: str, form: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{form}")
        write_quantized(model(family), FORMS[form], folder)
        return folder

    return write


@pytest.fixture
def dequantises(monkeypatch: pytest.MonkeyPatch) -> list[GroupedCodes]:
    return record_dequantised(monkeypatch)


def record_dequantised(monkeypatch: pytest.MonkeyPatch) -> list[GroupedCodes]:
    """Pack codes as what they stand for from now on, so that products are exact; returns what is packed."""
    packed: list[GroupedCodes] = []

    def pack(codes: GroupedCodes, bias: torch.Tensor | None, **options: Any) -> LinearWeight:
        packed.append(codes)
        del options["activation_bits"]
        return pack_linear(codes.dequantize().to(options["dtype"]), bias, **options)

    monkeypatch.setattr(base, "pack_grouped", pack)
    return packed


def load(
    folder: Path,
    parallel: ParallelState = WHOLE,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
) -> Decoder:
    return load_model(folder, CheckpointConfig.from_folder(folder), dtype, 64, parallel, quantization)


def rows_of(model: Decoder) -> list[torch.Tensor]:
    """What the linear layers of a rank make of each input feature alone: their weights, if they are exact."""
    results = []
    for module in model.modules():
        if isinstance(module, _HeadProjections):
            results += [one.packed.data for one in module.packed_weight]
        elif isinstance(module, _Gates):
            results.append(module.packed_weight.packed.data)
        elif isinstance(module, Packable) and not isinstance(module, VocabParallel):
            size = module.projections[0].columns.stop - module.projections[0].columns.start
            results.append(module.apply_linear(torch.eye(size), torch.float32))
    return results


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("form", list(FORMS))
def test_weights_are_what_the_formula_says(
    form: str, family: str, written: Callable[[str, str], Path], dequantises: list[GroupedCodes],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if form.startswith(("nf4", "fp4")):  # whose blocks divide rows
        sizes = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 16}
        write_quantized(make_model(family, tmp_path / "model", **sizes), FORMS[form], tmp_path)
    folder = tmp_path if (tmp_path / "model").exists() else written(family, form)
    monkeypatch.setattr("quire_engine.models.linear.base.BAND", 1000)  # several bands to a matrix
    check_checkpoint(folder / "quantized")
    ours, theirs = (rows_of(load(folder / kind)) for kind in ("quantized", "plain"))
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        if FORMS[form].is_exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    has_codes = not form.startswith(("fp8", "fbgemm", "modelopt-fp8", "int8", "bitsandbytes"))
    assert len(dequantises) == (0 if not has_codes else 4 if (form, family) == ("gptq-orders", "llama") else 8)


@pytest.mark.parametrize(
    ("family", "form", "parallel"),
    [
        pytest.param(family, form, parallel, id=f"{family}-{form}-rank{parallel.rank}")
        for number, family in enumerate(HYBRIDS)
        for place, (form, parallel) in enumerate(OF_HYBRIDS)
        if FULL or (number + place) % 2 == 0
    ],
)
def test_recurrent_layers(
    family: str, form: str, parallel: ParallelState, written: Callable[[str, str], Path],
    dequantises: list[GroupedCodes],
) -> None:  # fmt: skip
    """Projections are cut where no word begins, and Falcon-H1's are multiplied."""
    check_checkpoint(written(family, form) / "quantized")
    ours, theirs = (rows_of(load(written(family, form) / kind, parallel)) for kind in ("quantized", "plain"))
    is_exact = FORMS[form].is_exact and family != "falcon_h1"
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
    assert bool(dequantises) == (form != "int8-tensor")


@pytest.mark.parametrize(
    "form", ["gptq-32-asym", "gptq-channel", "gptq-8", "awq", "packed-asym", "nvfp4", "fp8-channel"]
)
def test_ranks_have_slices(form: str, written: Callable[[str, str], Path], dequantises: list[GroupedCodes]) -> None:
    ours, theirs = (rows_of(load(written("llama", form) / kind, SECOND)) for kind in ("quantized", "plain"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "gptq-act-order-channel", "awq", "packed-asym", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_experts_and_latent_attention(
    family: str, form: str, written: Callable[[str, str], Path], dequantises: list[GroupedCodes]
) -> None:
    models = [load(written(family, form) / kind) for kind in ("quantized", "plain")]
    ours, theirs = map(rows_of, models)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for one, other in zip(*(model.mixtures.values() for model in models), strict=True):
        torch.testing.assert_close(one(x), other(x), rtol=1e-4, atol=1e-5)  # a permuted sum has another order


def test_columns_that_no_kernel_takes_are_dequantised(tmp_path: Path, dequantises: list[GroupedCodes]) -> None:
    model = make_model("llama", tmp_path / "model", hidden_size=72, intermediate_size=40)
    write_quantized(model, compressed_tensors(4, None, symmetric=False), tmp_path)
    ours, theirs = (rows_of(load(tmp_path / kind)) for kind in ("quantized", "plain"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len(dequantises) == 2, "only o_proj has a multiple of 16"


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order-asym", "awq", "packed-8-asym", "nvfp4", "nf4"])
def test_products_of_the_kernels_are_near(form: str, tmp_path: Path) -> None:
    """Activations are quantised there."""
    model = make_model("llama", tmp_path / "model", hidden_size=128, intermediate_size=192)
    write_quantized(model, FORMS[form], tmp_path)
    models = [load(tmp_path / kind, dtype=torch.bfloat16) for kind in ("quantized", "plain")]
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    modules = [[one for one in each.modules() if isinstance(one, Packable)] for each in models]
    for ours, theirs in zip(*modules, strict=True):
        if not isinstance(ours, VocabParallel):
            size = ours.projections[0].shape[1]
            result, expected = (one.apply_linear(x[:, :size], torch.float32) for one in (ours, theirs))
            assert (result - expected).norm() < 0.02 * expected.norm()


# -- engines -----------------------------------------------------------------------------------------------------------


def with_tokenizer(folder: Path) -> Path:
    for file in TINYPY.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def answers_of(folder: Path, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    llm = LLM(with_tokenizer(folder), max_model_len=128, kv_cache_memory_bytes=1 << 20, **settings)
    try:
        outputs = llm.generate([[5, 9, 200, 31], [7] * 20, [*range(2, 60)]], params, use_tqdm=False)
        assert llm.get_stats().num_failed_steps == 0
        return outputs
    finally:
        llm.shutdown()


def generate(folder: Path, **settings: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in answers_of(folder, **settings)]


def logprobs_of(outputs: list[RequestOutput]) -> torch.Tensor:
    """Of the tokens of the prompts, and of those that were generated."""
    entries = [
        *(zip(output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True) for output in outputs),
        *(zip(one.token_ids, one.logprobs or [], strict=True) for output in outputs for one in output.outputs),
    ]
    return torch.tensor([entry[token_id].logprob for each in entries for token_id, entry in each if entry is not None])


@pytest.mark.parametrize("form", ["gptq-act-order", "awq", "packed-8-channel"])
def test_an_engine_says_what_the_dequantised_checkpoint_does(
    form: str, written: Callable[[str, str], Path], dequantises: list[GroupedCodes]
) -> None:
    ours, theirs = (generate(written("llama", form) / kind, dtype="float32") for kind in ("quantized", "plain"))
    assert ours == theirs
    assert dequantises


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [
        (family, form)
        for family, own in [*zip(HYBRIDS, cycle(HYBRID_FORMS), strict=False), ("gemma3n_text", None)]
        for form in HYBRID_FORMS
        if FULL or own in (form, None)  # the rows of all are above
    ],
)
def test_a_hybrid_says_what_the_dequantised_checkpoint_does(
    family: str, form: str, written: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nearly so with the kernels, which quantise activations."""
    folders = [written(family, form) / kind for kind in ("quantized", "plain")]
    near, wanted = (logprobs_of(answers_of(folder, dtype="bfloat16")) for folder in folders)
    assert 0 < (near - wanted).abs().mean() < 0.1 * wanted.std()
    packed = record_dequantised(monkeypatch)
    ours, theirs = (answers_of(folder, dtype="float32") for folder in folders)
    assert [one.outputs[0].token_ids for one in ours] == [one.outputs[0].token_ids for one in theirs]
    torch.testing.assert_close(logprobs_of(ours), logprobs_of(theirs), rtol=0, atol=1e-4)
    assert packed


def test_packed_weights_are_kept_with_their_order(
    written: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    folder = written("llama", "gptq-act-order") / "quantized"
    config = CheckpointConfig.from_folder(folder)

    def start() -> tuple[Decoder, weight_cache.WeightCache]:
        cache = weight_cache.cache_for(str(tmp_path), folder, config, torch.bfloat16, None, WHOLE)
        assert cache is not None
        return load_model(folder, config, torch.bfloat16, 64, cache=cache), cache

    first, cache = start()
    cache.save(lambda: first)
    monkeypatch.setattr("quire_engine.models.loader.check_weights", lambda *_, **__: pytest.fail("it is compared"))
    second, cache = start()
    assert cache.mapped_bytes
    x = torch.randn(5, 144, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = [model.layers["0"].self_attn.qkv_proj(x) for model in (first, second)]  # type: ignore[union-attr,operator]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_act_order_is_recorded(
    dtype: str, written: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written("llama", "gptq-act-order") / "quantized"
    with caplog.at_level(logging.WARNING, logger="quire_engine"):
        recorded = generate(folder, dtype=dtype)
    assert "op by op" not in caplog.text
    monkeypatch.setattr(RecordedForward, "takes", lambda self, inputs: False)
    assert generate(folder, dtype=dtype) == recorded


@pytest.mark.parametrize("form", ["gptq", "awq", "packed-asym", "nvfp4", "nf4", "fp8-tensor", "int8-tensor"])
def test_random_weights_need_no_files(form: str, written: Callable[[str, str], Path], tmp_path: Path) -> None:
    shutil.copytree(written("llama", "awq") / "quantized", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    config = FORMS[form].config
    edit_json(tmp_path / "config.json", quantization_config=config, hidden_size=128)
    assert [len(one) for one in generate(tmp_path, load_format="dummy")] == [12] * 3


# -- what is not quantised, and what is said ---------------------------------------------------------------------------


def test_layers_without_scales_are_not_quantised(tmp_path: Path, dequantises: list[GroupedCodes]) -> None:
    model = make_model("llama", tmp_path / "model")
    write_quantized(model, awq(16), tmp_path, lambda name: quantized(name) and "0.self_attn" not in name)
    ours, theirs = (rows_of(load(tmp_path / kind)) for kind in ("quantized", "plain"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len(dequantises) == 6
    assert load(tmp_path / "quantized", quantization="int8").layers["0"].self_attn.o_proj.packed.is_quantized  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("parallel", [WHOLE, SECOND], ids=["one rank", "tensor parallel"])
def test_a_head_may_be_quantised(parallel: ParallelState, tmp_path: Path, dequantises: list[GroupedCodes]) -> None:
    model = make_model("llama", tmp_path / "model")
    write_quantized(model, compressed_tensors(4, 16, symmetric=False), tmp_path, lambda name: name == "lm_head.weight")
    check_checkpoint(tmp_path / "quantized")
    heads = [load(tmp_path / kind, parallel).head for kind in ("quantized", "plain")]
    ours, theirs = (head.apply_linear(torch.eye(144), torch.float32) for head in heads)
    assert torch.equal(ours, theirs)
    assert len(dequantises) == 1


@pytest.mark.parametrize("form", ["awq", "packed-act-order"])
def test_projections_of_one_product_may_differ(form: str, tmp_path: Path, dequantises: list[GroupedCodes]) -> None:
    others = ("0.self_attn.k", "1.mlp.up")
    model = make_model("llama", tmp_path / "model")
    write_quantized(
        model, FORMS[form], tmp_path, lambda name: quantized(name) and not any(one in name for one in others)
    )
    ours, theirs = (rows_of(load(tmp_path / kind)) for kind in ("quantized", "plain"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert dequantises


def test_a_setting_of_4_bits_leaves_codes_as_they_are(
    written: Callable[[str, str], Path], dequantises: list[GroupedCodes]
) -> None:
    ours, theirs = (
        rows_of(load(written("llama", "awq") / kind, quantization=quantization))
        for kind, quantization in (("quantized", "int4"), ("plain", None))
    )
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_setting_of_8_bits_makes_8_bits(written: Callable[[str, str], Path]) -> None:
    ours, theirs = (load(written("llama", "awq") / kind, quantization="int8") for kind in ("quantized", "plain"))
    for one, other in zip(ours.modules(), theirs.modules(), strict=True):
        is_packed = isinstance(one, Packable) and one.packed_weight is not None  # else the table of the embedding
        if is_packed and isinstance(one, Packable) and isinstance(other, Packable):
            assert torch.equal(one.packed.data, other.packed.data)
            assert one.packed.data.dtype == torch.int8


def test_biases_of_zeros_are_no_others(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    shutil.copytree(written("phi3", "gptq") / "quantized", tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, name: torch.zeros(80)}, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file({**tensors, name: torch.ones(80)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.bias has no place"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("form", "quantization", "words"),
    [
        ("fp8-tensor", None, "weights in fp8 are served in bfloat16, or with quantization in int8"),
        ("fp8-tensor", "int8", "weights in fp8 are served in int8"),
        ("nf4", None, "the numbers that nf4 stands for are rounded to 8 bits"),
    ],
)
def test_what_is_converted_is_logged_once(
    form: str, quantization: str | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(
        make_model("llama", tmp_path / "model", hidden_size=128, intermediate_size=192), FORMS[form], tmp_path
    )
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        load(tmp_path / "quantized", dtype=torch.bfloat16, quantization=quantization)
    assert caplog.text.count(words) == 1


def test_auto_round_is_gptq_or_awq(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def read(form: str, **changes: Any) -> Any:
        own = {**FORMS[form].config, "quant_method": "auto-round", **changes}
        shutil.copyfile(written("llama", form) / "quantized" / "config.json", config)
        edit_json(config, quantization_config=own)
        return CheckpointConfig.from_folder(tmp_path).weight_format

    for form, packing in (("gptq-32-asym", "auto_round:auto_gptq"), ("awq", "auto_round:awq")):
        expected = CheckpointConfig.from_folder(written("llama", form) / "quantized").weight_format
        assert read(form, packing_format=packing) == expected
    assert read("gptq", packing_format="auto_round:exllamav2").method == "gptq"
    with pytest.raises(CheckpointError, match=r"packing_format is .*; it must be one of gptq or awq"):
        read("gptq-32-asym", packing_format="auto_round:exllamav2")


# -- hostile checkpoints -----------------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.down_proj"


def change_config(**changes: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: config.update(changes)


def change_weights(**changes: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(changes)


def change(kind: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., None]:
    """Another tensor in the place of one, or none."""

    def apply(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensor = make(tensors.pop(f"{NAME}.{kind}"))
        if tensor is not None:
            tensors[f"{NAME}.{kind}"] = tensor.contiguous()

    return apply


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return put


HOSTILE: list[tuple[str, Callable[..., None], str]] = [
    ("gptq", change_config(bits=3), "bits is 3; it must be 4 or 8"),
    ("gptq", change_config(bits=True), "bits is True; it must be 4 or 8"),
    ("gptq", change_config(group_size=0), "group_size is 0; it must be -1 or a multiple of 16"),
    ("gptq", change_config(group_size=-2), "group_size is -2; it must be"),
    ("gptq", change_config(group_size=1 << 60), r"group_size is \d+; it must be"),
    ("gptq", change_config(group_size=24), "group_size is 24; it must be"),
    ("gptq", change_config(group_size=[128]), r"group_size is \[128\]; it must be"),
    ("gptq", change_config(group_size=64), r"scales has shape \(2, \d+\); .*qweight and quantization_config ask for"),
    ("gptq", change_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; it must be gptq or gptq_v2"),
    ("gptq", change_config(desc_act="yes"), "desc_act is 'yes'; it must be true or false"),
    ("gptq", change_config(bits=8), "(scales|g_idx) has shape"),
    ("gptq", change("qweight", lambda one: one[1:]), "(qweight|scales|g_idx) has shape"),
    ("gptq", change("qweight", lambda one: one.flatten()), r"qweight has shape .*; it must be a matrix of words"),
    ("gptq", change("qweight", lambda one: one.float()), "qweight is F32; .* asks for I32"),
    (
        "gptq",
        change("qweight", lambda one: None),
        "down_proj.scales has no place|hold no layers.1.mlp.down_proj.weight",
    ),
    ("gptq", change("scales", lambda one: one[:, 1:]), r"scales has shape \(2, 143\)"),
    ("gptq", change("scales", lambda one: None), "hold no layers.1.mlp.down_proj.weight_scale"),
    ("gptq", change("scales", lambda one: one.int()), "scales is I32; .* a floating-point type"),
    ("gptq", change("scales", with_value(float("nan"))), "scales holds nan; weights must be finite"),
    ("gptq", change("scales", with_value(float("inf"))), "scales holds inf; weights must be finite"),
    ("gptq", change("g_idx", with_value(2)), "g_idx must give each group 128 of the 224 columns"),
    ("gptq", change("g_idx", with_value(-1)), "g_idx must give each group 128 of the 224 columns"),
    ("gptq", change("g_idx", lambda one: one.flip(0)), "g_idx has columns in another order"),
    ("gptq", change("g_idx", lambda one: one[:100]), r"g_idx has shape \(100,\)"),
    ("gptq-32-asym", change("qzeros", lambda one: None), "hold no layers.1.mlp.down_proj.weight_zero_point"),
    ("gptq-32-asym", change("qzeros", lambda one: one[:3]), r"qzeros has shape \(3, 18\); .* ask for \(7, 18\)"),
    ("awq", change_config(bits=8), "bits is 8; it must be 4"),
    ("awq", change_config(version="gemv"), "version is 'gemv'; it must be gemm"),
    ("awq", change("qweight", lambda one: one[1:]), "must be a matrix of words"),
    ("awq", change("qzeros", lambda one: one[:, 1:]), r"qzeros has shape \(14, 17\)"),
    ("packed", change_weights(num_bits=3), "with weights of 3 bits, type int"),
    ("packed", change_weights(group_size=0), "weights.group_size is 0; it must be"),
    ("packed", change_weights(strategy=[1]), "strategy .1."),
    ("packed", change_config(config_groups={}), "config_groups is {}; it must be one or more groups"),
    ("packed", change_config(config_groups={"a": 1}), "config_groups.a is 1; it must be an object"),
    ("packed", change_config(sparsity_config={"format": "sparse-24-bitmask"}), "the weights are sparse"),
    ("packed", change_config(transform_config={"config_groups": {"u": {}}}), "activations are rotated"),
    ("packed-asym", change("weight_zero_point", lambda one: one.t()), r"weight_zero_point has shape \(14, 18\)"),
    ("packed-act-order", change("weight_g_idx", with_value(99)), "g_idx must give each group 16 of the 224 columns"),
    ("nvfp4", change("weight_scale", lambda one: one[:, 1:]), r"weight_scale has shape \(144, 13\)"),
    ("nvfp4", change("weight_global_scale", with_value(0)), "weight_global_scale is 0"),
    (
        "modelopt-nvfp4",
        change("weight_scale_2", lambda one: one * 1e38),
        r"weight_scale_2 is \S+; weights must be finite",
    ),
    ("nvfp4", change("weight_global_scale", lambda one: torch.ones(3)), r"weight_global_scale has shape \(3,\)"),
    ("fp8-tensor", change("weight_scale", lambda one: torch.ones(3)), r"weight_scale is F32 of shape \(3,\)"),
    ("int8-tensor", change("weight_scale", lambda one: torch.ones(3)), r"weight_scale has shape \(3, 1\)"),
    ("bitsandbytes-int8", change("SCB", with_value(float("nan"))), "SCB holds nan; weights must be finite"),
]


def check_is_rejected(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("form", "apply", "message"), HOSTILE, ids=[f"{form}-{number}" for number, (form, _, _) in enumerate(HOSTILE)]
)
def test_what_does_not_fit_is_rejected(
    form: str, apply: Callable[..., None], message: str, written: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = written("llama", form) / "quantized"
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    apply(tensors, config.get("quantization_config"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_is_rejected(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [1 << 60, 2]}, "shape is .*; it must be two positive integers"),
        ({"shape": [64, 128]}, "asks for 4096 elements of U8"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": 96}, "blocksize is 96; it must be a multiple of 64 that divides the rows"),
        ({"nested_offset": "a"}, "nested_offset is 'a'; it must be a finite number"),
        ({"nested_offset": float("inf")}, "nested_offset is inf; it must be a finite number"),
        (None, "not JSON"),
        ({"x": "y" * 5000}, "must be JSON of at most 4096 bytes"),
    ],
)
def test_a_hostile_quant_state_is_rejected(changes: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", hidden_size=128, intermediate_size=192)
    write_quantized(model, FORMS["nf4-nested"], tmp_path)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors, name = load_file(path), f"{NAME}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    text = b"{" if changes is None else json.dumps({**state, **changes}).encode()
    save_file({**tensors, name: torch.tensor(list(text), dtype=torch.uint8)}, path)
    check_is_rejected(tmp_path / "quantized", message)


def test_a_truncated_file_is_rejected(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    shutil.copytree(written("llama", "awq") / "quantized", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    check_is_rejected(tmp_path, "truncated")


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "MIXED_PRECISION", 3])
def test_other_algorithms_of_modelopt_are_rejected(
    algorithm: object, written: Callable[[str, str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("llama", "modelopt-fp8") / "quantized", tmp_path, dirs_exist_ok=True)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    check_is_rejected(tmp_path, r"hf_quant_config.json: quantization.quant_algo is .*; it must be FP8 or NVFP4")


@pytest.mark.parametrize(
    ("form", "sizes", "message"),
    [
        (gptq(4, 16, order="shuffled"), {}, "tensor_parallel_size cuts the input features of this layer"),
        (compressed_tensors(4, 16), {"intermediate_size": 208}, "stores them in blocks of 16, which cannot be cut"),
    ],
    ids=["act-order", "groups"],
)
def test_ranks_that_cut_groups_are_rejected(form: Form, sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    write_quantized(make_model("llama", tmp_path / "model", **sizes), form, tmp_path)
    with pytest.raises((CheckpointError, ValueError), match=message):
        load(tmp_path / "quantized", SECOND)
