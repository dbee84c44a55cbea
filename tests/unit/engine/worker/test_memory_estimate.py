"""What is estimated of a model before it is loaded is what the engine finds once it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import EngineConfig
from quire_engine.core.build_engine import build_engine
from quire_engine.models import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable
from quire_engine.models.loader import load_model
from quire_engine.models.packed_values import Encoder
from quire_engine.worker import cache_memory
from quire_engine.worker.memory_estimate import MemoryEstimate
from support.gguf_files import write_gguf
from support.quantized import FORMS, make_model, write_quantized

CPU = torch.device("cpu")
MAX_MODEL_LEN = 64


def estimate(folder: Path, **settings: Any) -> tuple[EngineConfig, MemoryEstimate]:
    config = EngineConfig.from_settings({"model": str(folder), "max_model_len": MAX_MODEL_LEN, **settings})
    return config, MemoryEstimate.of(config, CheckpointConfig.from_folder(folder), MAX_MODEL_LEN, CPU)


def bytes_of(model: Decoder) -> int:
    """What a loaded model's weights take."""
    encoder = Encoder()
    packed = {name: one.packed_weight for name, one in model.named_modules() if isinstance(one, Packable)}
    encoder.encode_all({name: weight for name, weight in packed.items() if weight is not None})
    return encoder.size + sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize(
    ("name", "settings", "padding"),
    [
        ("tinypy", {}, 0.001),
        ("tinypy", {"dtype": "float32"}, 0.001),
        ("tinypy", {"quantization": "int8", "kv_cache_dtype": "int8"}, 0.03),  # and scales
        ("tinypy", {"quantization": "int4", "kv_cache_dtype": "fp8"}, 0.03),
        ("tinypy", {"quantization": "fp8"}, 0.03),
        ("gemma3", {"max_num_batched_tokens": 16}, 0.1),  # layers with a window have groups of their own
        ("gemma3n", {"max_num_batched_tokens": 16}, 0.2),  # whose features are padded to panels
        ("deepseek-v3", {}, 0.2),  # latent attention, and experts, both tiny
        ("gpt-oss", {}, 0.1),
    ],
)
def test_weights_and_cache_are_those_of_the_engine(
    name: str, settings: dict[str, Any], padding: float, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    sizes = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 1000, "device": "cpu"}
    config, estimated = estimate(folder, **settings, **sizes)
    there = CheckpointConfig.from_folder(folder)
    dtype = getattr(torch, there.dtype if config.model.dtype == "auto" else config.model.dtype)
    model = load_model(folder, there, dtype, MAX_MODEL_LEN, quantization=config.model.quantization)
    assert estimated.num_parameters == model.num_parameters()
    assert estimated.weight_bytes == pytest.approx(bytes_of(model), rel=padding)

    engine = build_engine(config.core)
    try:
        assert estimated.num_kv_cache_tokens == engine.ready.num_kv_cache_tokens
        specs = [spec for spec in model.state_specs if spec.window is None]
        if len(specs) == len(model.state_specs):  # one block for all layers
            block_bytes = engine.ready.cpu_cache_bytes // engine.ready.num_blocks
            assert estimated.kv_bytes_per_token == block_bytes // engine.ready.block_size
    finally:
        engine.shutdown()


def test_of_random_weights_no_file_is_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint("tinypy") / "config.json").read_text())
    _, estimated = estimate(tmp_path, load_format="dummy", tokenizer=str(checkpoint("tinypy")))
    _, expected = estimate(checkpoint("tinypy"))
    assert estimated.num_parameters == expected.num_parameters
    assert estimated.weight_bytes == expected.weight_bytes


def test_each_rank_has_its_part(checkpoint: Callable[[str], Path]) -> None:
    _, whole = estimate(checkpoint("tinypy"))
    _, half = estimate(checkpoint("tinypy"), tensor_parallel_size=2)
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.02)


def test_weights_that_do_not_fit_are_said_to(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_memory, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ValueError, match=r"^its weights take [0-9]+ bytes .* leaves no room for a KV cache"):
        estimate(checkpoint("tinypy"))


@pytest.mark.parametrize(("form", "quantization"), [("awq", None), ("awq", "int8"), ("gptq-8", None), ("packed", None)])
def test_weights_that_are_stored_in_codes_are_estimated_as_they_are_packed(
    form: str, quantization: str | None, tmp_path: Path
) -> None:
    write_quantized(make_model("llama", tmp_path / "model", hidden_size=512), FORMS[form], tmp_path)
    folder = tmp_path / "quantized"
    _, estimated = estimate(folder, quantization=quantization, dtype="bfloat16", max_num_seqs=4)
    there = CheckpointConfig.from_folder(folder)
    model = load_model(folder, there, torch.bfloat16, MAX_MODEL_LEN, quantization=quantization)
    assert estimated.weight_bytes == pytest.approx(bytes_of(model), rel=0.1)


@pytest.mark.parametrize(("kind", "quantization"), [("Q4_0", None), ("Q4_0", "int8"), ("Q8_0", None), ("Q5_0", None)])
def test_gguf_types_are_estimated_as_they_are_packed(
    kind: str, quantization: str | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint("tinypy"), file, {"_proj.weight": kind})
    _, estimated = estimate(file, quantization=quantization, dtype="bfloat16", max_num_seqs=4)
    model = load_model(
        file, CheckpointConfig.from_folder(file), torch.bfloat16, MAX_MODEL_LEN, quantization=quantization
    )
    assert estimated.weight_bytes == pytest.approx(bytes_of(model), rel=0.1)
