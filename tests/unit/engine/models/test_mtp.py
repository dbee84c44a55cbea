"""The layer of multi-token prediction: what it computes over a paged cache, and checkpoints that do not have it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.loader import load_model
from quire_engine.models.mtp import MultiTokenPredictor, check_mtp, load_mtp
from quire_kernels.kv_cache import new_kv_cache
from support.checkpoints import changed_copy, edit_json
from support.drafting import context_of
from support.mtp import Reference
from support.oracle import mtp_names

BLOCK_SIZE = 16
FAMILIES = ["deepseek-v3-mtp", "glm4-moe-mtp", "mimo-mtp", "qwen3-5-mtp", "qwen3-next-mtp"]


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    parallel: ParallelState = ParallelState(),
) -> MultiTokenPredictor:
    config = CheckpointConfig.from_folder(folder)
    target = load_model(folder, config, dtype, 64, parallel, quantization)
    return load_mtp(folder, config, target, 64, quantization)


def new_cache(layer: MultiTokenPredictor) -> tuple[torch.Tensor, ...]:
    (spec,) = layer.state_specs
    return tuple(new_kv_cache(6, spec.num_kv_heads, BLOCK_SIZE, spec.head_size, layer.dtype) for _ in spec.tensors)


@pytest.mark.parametrize(("family", "dtype", "quantization", "largest_error"), [
    *((family, torch.float32, None, 1e-5) for family in FAMILIES),  # with rounded numbers other experts are chosen
    ("mimo-mtp", torch.bfloat16, None, 0.05), ("mimo-mtp", torch.bfloat16, "int8", 0.1),
])  # fmt: skip
@torch.inference_mode()
def test_positions_and_two_drafts_are_those_of_transformers(
    family: str,
    dtype: torch.dtype,
    quantization: str | None,
    largest_error: float,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Two sequences: the first in two steps, over a page's end; then each drafts two tokens."""
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    layer, reference = load(folder, dtype, quantization), Reference(folder)
    cache, generator = new_cache(layer), torch.Generator().manual_seed(1)
    hidden = [torch.randn(number, 64, generator=generator) for number in (19, 5)]
    token_ids = [torch.randint(4096, (number,), generator=generator) for number in (19, 5)]

    def check(got: torch.Tensor, expected: torch.Tensor) -> None:
        error = (got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < largest_error

    def run(tables: list[list[int]], computed: list[int], parts: list[slice]) -> torch.Tensor:
        rows = [hidden[i][part].to(dtype) for i, part in enumerate(parts)]
        tokens = torch.cat([token_ids[i][part] for i, part in enumerate(parts)])
        context = context_of(tables, computed, [len(one) for one in rows], BLOCK_SIZE)
        return layer.run_layer(layer.embed(tokens), torch.cat(rows), context, cache)

    run([[4, 1]], [0], [slice(15)])
    out = run([[4, 1], [2, 0]], [15, 0], [slice(15, None), slice(None)])
    assert out.dtype == dtype
    expected = [reference(token_ids[i], hidden[i]) for i in range(2)]
    check(out, torch.cat((expected[0][15:], expected[1])))
    last, lengths = out[[3, 8]], [19, 5]
    for _ in range(2):
        logits = layer.logits(last)
        assert (logits.shape, logits.dtype) == ((2, 4096), torch.float32)
        check(logits, reference.logits(torch.stack([each[-1] for each in expected])))
        for i, drafted in enumerate(logits.argmax(-1)):
            token_ids[i] = torch.cat((token_ids[i], drafted[None]))
            hidden[i] = torch.cat((hidden[i], expected[i][-1:]))
            expected[i] = reference(token_ids[i], hidden[i])
        last = run([[4, 1], [2, 0]], lengths, [slice(number, None) for number in lengths]).clone()
        lengths = [number + 1 for number in lengths]
        check(last, torch.stack([each[-1] for each in expected]))


@pytest.mark.parametrize(("ranks", "stages", "rank"), [(1, 1, 0), (2, 1, 0), (1, 2, 1)])
@torch.inference_mode()
def test_it_uses_the_targets_matrices_where_the_rank_has_all_of_them(
    ranks: int, stages: int, rank: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("mimo-mtp"), tmp_path / "mimo-mtp")
    parallel = ParallelState(rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    layer = load(folder, parallel=parallel)
    own = {name for name, _ in layer.named_children()} & {"embed_tokens", "lm_head"}
    assert (hasattr(layer, "embed_tokens"), layer.lm_head is not None) == (ranks * stages > 1, ranks > 1), own
    context = context_of([[0]], [0], [1], BLOCK_SIZE)
    out = layer.run_layer(layer.embed(torch.tensor([7])), torch.ones(1, 64), context, new_cache(layer))
    reference = Reference(folder)
    expected = reference(torch.tensor([7]), torch.ones(1, 64))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.logits(out), reference.logits(expected), rtol=1e-4, atol=1e-4)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(folder, drafts=("mtp", None))
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_model_without_the_layer_is_refused(checkpoint: Callable[[str], Path]) -> None:
    assert refusal(checkpoint("qwen2")) == (
        f"speculative_config: method is 'mtp'; {checkpoint('qwen2')} has no layer of multi-token prediction by its "
        "config.json: draft with another method"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_lost_the_layer_is_served_without_it(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    prefix, *_ = mtp_names(checkpoint(family))

    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    folder = changed_copy(checkpoint(family), tmp_path / family, edit)
    check_checkpoint(folder)
    assert "holds no tensors of the layer that its config.json names" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_does_not_fit_is_refused_only_where_it_drafts(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    prefix, norm, _, projection, _ = mtp_names(checkpoint(family))
    for number, (change, message) in enumerate([
        ({norm: None}, "hold no pre_fc_norm_embedding.weight"),
        ({projection: torch.zeros(64, 64)}, f"{projection} has shape (64, 64); config.json asks for (64, 128)"),
        ({f"{prefix}extra.weight": torch.zeros(3)}, f"{prefix}extra.weight has no place in this architecture"),
    ]):  # fmt: skip

        def edit(tensors: dict[str, Any], change: dict[str, Any] = change) -> None:
            tensors |= change
            for name in [name for name, tensor in change.items() if tensor is None]:
                del tensors[name]

        folder = changed_copy(checkpoint(family), tmp_path / str(number), edit)
        check_checkpoint(folder)
        assert message in refusal(folder)


def test_further_layers_are_not_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(3)

    folder = changed_copy(checkpoint("deepseek-v3-mtp"), tmp_path / "two", edit)
    edit_json(folder / "config.json", num_nextn_predict_layers=2)
    names = check_mtp(folder, CheckpointConfig.from_folder(folder)).keys()
    assert "layers.0.self_attn.o_proj.weight" in names
    assert not any(name.startswith("layers.4.") for name in names)


def test_an_indexer_of_the_layer_is_not_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors |= {f"model.layers.{number}.self_attn.indexer.wk.weight": torch.zeros(3) for number in range(4)}

    folder = changed_copy(checkpoint("deepseek-v3-mtp"), tmp_path / "v32", edit)
    edit_json(folder / "config.json", architectures=["DeepseekV32ForCausalLM"])
    check_checkpoint(folder, drafts=("mtp", None))
