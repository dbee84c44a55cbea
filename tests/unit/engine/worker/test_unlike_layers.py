"""Layers of one model may differ in heads and windows: in the KV cache, in the plans, however a step is computed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.kv_cache import AttentionSpec, block_bytes
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder, DecoderLayer
from quire_engine.models.layers.parallel import Packable, create_parameters
from quire_engine.models.loader import UNQUANTISED
from quire_engine.worker import model_loader
from quire_engine.worker.forward import recorded
from quire_kernels import cpu
from quire_kernels.gpu.interpreter import INTERPRETED
from support.checkpoints import with_windows
from support.oracle import make_prompts
from support.triton_interpreter import interpreted_kernels

WINDOW = 13
PROMPTS = make_prompts(5, 500, max_length=40)


def unlike(config: CheckpointConfig, max_model_len: int) -> Decoder:
    """Of two layers, the second one with half the heads and a window."""
    half = replace(config, num_heads=config.num_heads // 2, num_kv_heads=config.num_kv_heads // 2)
    half = with_windows(half, (None, WINDOW))
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config, max_model_len)
    last = max(model.layers, key=int)
    model.layers[last] = DecoderLayer(half, half.options.layers[int(last)], model.parallel, model.tables)
    create_parameters(model, UNQUANTISED)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()
    return model


@pytest.fixture
def make_llm(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An engine of such a model."""
    config = CheckpointConfig.from_folder(checkpoint("tied-gqa"))

    def load(folder: Path, checkpoint: CheckpointConfig, dtype: torch.dtype, max_model_len: int, *_: Any) -> Decoder:
        return unlike(config, max_model_len)

    monkeypatch.setattr(model_loader, "load_model", load)
    given = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_num_seqs": 5}
    yield lambda **settings: LLM(checkpoint("tied-gqa"), **{**given, **settings})
    cpu.status.cache_clear()


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, num_tokens: int = 8) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.shutdown()
    return outputs


def test_every_way_of_computing_them_gives_the_same_tokens(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = tokens(make_llm())
    assert len({tuple(one) for one in got}) > 1
    monkeypatch.setattr(recorded, "RECORDED_TOKENS", 0)
    assert tokens(make_llm()) == got
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, "torch")
    cpu.status.cache_clear()
    assert tokens(make_llm()) == got
    if INTERPRETED.value:
        with interpreted_kernels():
            llm = make_llm(kv_cache_memory_bytes=1 << 20, max_num_seqs=2, max_num_batched_tokens=48)
            assert tokens(llm, PROMPTS[:2], 3) == [one[:3] for one in got[:2]]


def test_each_layer_has_the_cache_that_it_needs(
    make_llm: Callable[..., LLM], checkpoint: Callable[[str], Path]
) -> None:
    llm = make_llm(kv_cache_memory_bytes=1 << 18)
    one = llm._core.executor._worker  # type: ignore[attr-defined]
    specs = one.runner.model.state_specs
    config = CheckpointConfig.from_folder(checkpoint("tied-gqa"))
    assert specs == [
        *[AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size)] * (config.num_layers - 1),
        AttentionSpec(config.num_heads // 2, config.num_kv_heads // 2, config.head_size, WINDOW),
    ]
    shapes = [(key.shape[1], key.shape[3]) for key, _ in one.runner.kv_caches]
    assert shapes == [(spec.num_kv_heads, spec.head_size) for spec in specs]
    wanted = (1 << 18) // block_bytes(specs, llm._core.ready.block_size, 4)  # type: ignore[attr-defined]
    assert len(one.runner.kv_caches[0][0]) == min(wanted, 5 * 64 // 16)
    llm.shutdown()
