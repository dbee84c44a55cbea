"""Encoders against transformers: every family, alone and in a batch, recorded and op by op."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_cache import KVCacheGroups
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.decoder import Decoder
from quire_engine.models.encoder import Encoder
from quire_engine.models.loader import load_model
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.cache_allocator import CacheLayout
from quire_engine.worker.forward.eager import EagerForward
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels.kv_cache import new_kv_cache
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.encoders import ENCODERS, VOCAB_SIZE, expected_states, make_encoder

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"
LENGTHS = (1, 7, 16, 33, 100, 3)
LEAST_COSINE = {"fp32": 0.99999, "bf16": 0.9995, "int8": 0.995}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", params=ENCODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param, load_tokenizer(TINYPY), torch.float32)


def load(folder: Path, kind: str = "fp32") -> Decoder:
    config = CheckpointConfig.from_folder(folder)
    check_checkpoint(folder)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return load_model(folder, config, dtype, 160, quantization="int8" if kind == "int8" else None)


def compute(
    model: Decoder, prompts: Sequence[Sequence[int]], *, records: bool = False, segments: Sequence[int | None] = ()
) -> list[torch.Tensor]:
    """The last hidden states of prompts in one step, as a worker computes it; the cache held something before."""
    specs = model.state_specs
    layout = CacheLayout.of(specs, model.layer_numbers, KVCacheGroups.of([None] * len(specs), 160))
    num_blocks = 10 * len(prompts)
    tensors = [
        tuple(new_kv_cache(num_blocks, spec.num_kv_heads, 16, spec.head_size, model.dtype).fill_(7.0) for _ in range(2))
        for spec in layout.tensor_specs
    ]
    batch = InputBatch(len(prompts), 160, 16, VOCAB_SIZE, 1, model.row_columns)
    for i, prompt in enumerate(prompts):
        pooling = PoolingParams(task="embed", pooling_type="LAST", segment_start=segments[i] if segments else None)
        batch.add(NewRequestData(
            request_id=str(i), token_ids=list(prompt), num_prompt_tokens=len(prompt), sampling_params=SamplingParams(),
            stop_token_ids=[], block_ids=list(range(10 * i, 10 * i + 10)), num_computed_tokens=0,
            pooling_params=pooling,
        ))  # fmt: skip
    inputs = StepInputs.of(batch, SchedulerOutput({str(i): len(prompt) for i, prompt in enumerate(prompts)}))
    kind = RecordedForward if records else EagerForward
    forward = kind(model, [tensors[i] for i in layout.tensor_ids], batch, None)
    assert forward.takes(inputs)
    with torch.inference_mode():
        hidden_TE = forward(inputs)
    assert hidden_TE is not None
    return [one.float().clone() for one in hidden_TE.split([len(prompt) for prompt in prompts])]


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1).min())


@pytest.mark.parametrize("kind", LEAST_COSINE)
def test_equals_transformers(folder: Path, kind: str, prompts: list[list[int]]) -> None:
    """Each token's hidden state, and the mean of a prompt's; bit for bit the same alone and in a batch."""
    model, expected = load(folder, kind), expected_states(folder, prompts)
    together = compute(model, prompts)
    for out, wanted in zip(together, expected, strict=True):
        assert cosine(out, wanted) >= LEAST_COSINE[kind], f"a token of {len(out)}"
        assert cosine(out.mean(0), wanted.mean(0)) >= LEAST_COSINE[kind], f"the mean of {len(out)}"
    alone = [compute(model, [prompt])[0] for prompt in prompts]
    is_exact = not (folder / "config.json").read_text().count('"hidden_size": 60')  # plain torch promises no such thing
    for out, own in zip(together, alone, strict=True):
        assert torch.equal(out, own) or not is_exact


def test_a_small_step_is_recorded(folder: Path, prompts: list[list[int]]) -> None:
    model = load(folder)
    if model.hidden_size == 60:
        pytest.skip("its heads have no kernel in C++")
    for chosen in ([prompts[1]], [prompts[3], prompts[0], prompts[5]]):
        recorded = compute(model, chosen, records=True)
        for out, expected in zip(recorded, compute(model, chosen), strict=True):
            assert torch.equal(out, expected)


def test_layers_share_a_cache(folder: Path) -> None:
    model = load(folder)
    layout = CacheLayout.of(
        model.state_specs, model.layer_numbers, KVCacheGroups.of([None] * len(model.state_specs), 160)
    )
    assert len(layout.tensor_specs) == 1
    assert not CheckpointConfig.from_folder(folder).is_causal
    assert model.compute_logits(torch.zeros(1, model.hidden_size)) is None
