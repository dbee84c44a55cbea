"""`quantization: "int4"`: which layers have 4 bits."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.models.layers.parallel import ColumnParallel, VocabParallel
from quire_engine.models.linear import base
from quire_engine.models.linear.int8 import Int4
from quire_kernels import GroupedCodes, linear, pack_grouped, quantize_grouped
from support.checkpoints import edit_json

ALONE = ParallelState()


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[GroupedCodes]:
    """The weights of 4 bits that are packed from now on."""
    seen: list[GroupedCodes] = []

    def spy(codes: GroupedCodes, *arguments: object, **options: object) -> object:
        seen.append(codes)
        return pack_grouped(codes, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(base, "pack_grouped", spy)
    return seen


@pytest.mark.parametrize(
    ("in_features", "group_size"), [(96, 32), (48, 16), (40, None)], ids=["groups of 32", "groups of 16", "no groups"]
)
def test_a_layer_has_the_largest_groups_that_fit(
    in_features: int, group_size: int | None, packed: list[GroupedCodes]
) -> None:
    """And 8 bits where none does."""
    layer = ColumnParallel(in_features, {"gate_proj": 24, "up_proj": 24}, True, ALONE, gated=True)
    layer.create(Int4())
    generator = torch.Generator().manual_seed(0)
    assert layer.weight is not None
    assert layer.bias is not None
    weight = layer.weight.data.normal_(generator=generator).clone()
    bias = layer.bias.data.normal_(generator=generator).clone()
    layer.pack()
    x = torch.randn(3, in_features, generator=generator)
    gate, up = torch.split(torch.nn.functional.linear(x, weight, bias), 24, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    assert (layer(x) - exact).norm() / exact.norm() < (0.02 if group_size is None else 0.2)
    assert [one.group_size for one in packed] == ([] if group_size is None else [group_size])


def test_the_head_has_8_bits(packed: list[GroupedCodes]) -> None:
    head = VocabParallel(40, 32, ALONE, is_head=True)
    head.create(Int4())
    assert head.weight is not None
    head.weight.data.normal_()
    head.pack()
    assert head.packed.is_quantized
    assert not packed


EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


@pytest.mark.parametrize(("name", "sizes"), [("untied-mha", {}), ("qwen2-moe", EXPERTS), ("deepseek-v3", {})])
def test_generates_near_to_the_unquantised_model(
    name: str, sizes: dict[str, int], checkpoint: Callable[[str], Path], packed: list[GroupedCodes], tmp_path: Path
) -> None:
    """With random weights."""
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safe*"))
    edit_json(tmp_path / "config.json", **sizes)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    logprobs = []
    for quantization in (None, "int4"):
        llm = LLM(tmp_path, load_format="dummy", quantization=quantization, kv_cache_memory_bytes=1 << 22)
        (output,) = llm.generate([[*range(2, 60)]], params, use_tqdm=False)
        llm.shutdown()
        assert len(output.outputs[0].token_ids) == 4
        entries = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True))[1:]
        logprobs.append(torch.tensor([entry[token_id].logprob for token_id, entry in entries if entry is not None]))
    assert packed, "int4 was not used"
    assert 0 < (logprobs[0] - logprobs[1]).abs().mean() < 0.1


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    weight = quantize_grouped(torch.randn(70, 96, generator=torch.Generator().manual_seed(1)), 32)
    packed = pack_grouped(weight, dtype=torch.float32)
    x = torch.randn(65, 96, generator=torch.Generator().manual_seed(2))
    together = linear(x, packed)
    for row in (0, 31, 64):
        assert torch.equal(linear(x[row : row + 1], packed)[0], together[row])
