"""Encoders against transformers: every family, alone and in a batch, recorded and op by op."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_cache import KVCacheGroups
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.rope import rope_cos_sin
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
from transformers import AutoModel

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


@pytest.fixture
def small(made: Callable[[str, Callable[[Path], object]], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint of `ENCODERS`, for a test to change."""

    def copy(name: str, **changes: Any) -> Path:
        original = made(f"encoder-{name}", lambda path: make_encoder(path, name, load_tokenizer(TINYPY), torch.float32))
        path = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(original, path)
        edit_json(path / "config.json", **changes)
        return path

    return copy


@pytest.mark.parametrize(("name", "norm"), [("bert", "LayerNorm"), ("modernbert", "norm")])
def test_large_features_of_norms_leave_the_others_their_bits(
    name: str, norm: str, small: Callable[..., Path], prompts: list[list[int]]
) -> None:
    path = small(name)
    weights = load_file(path / "model.safetensors")
    for key, weight in weights.items():
        if norm in key and key.endswith(".weight"):
            weight[:3] *= 40
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    exact, quantized = (torch.cat(compute(load(path, kind), prompts))[:, 3:] for kind in ("fp32", "int8"))
    assert cosine(quantized, exact) >= LEAST_COSINE["int8"]


HUB_FIELDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "nomic_bert": {
        "hidden_size": None, "n_embd": 96, "num_hidden_layers": None, "n_layer": 3, "num_attention_heads": None,
        "n_head": 6, "intermediate_size": None, "n_inner": 132, "layer_norm_eps": None, "layer_norm_epsilon": 1e-12,
        "rope_parameters": None, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "hidden_act": None,
        "activation_function": "swiglu", "max_position_embeddings": None, "max_trained_positions": 160,
        "n_positions": 8192, "head_dim": None,
    },
    "gte": {"architectures": ["NewModel"], "model_type": "new", "rope_parameters": None, "rope_theta": 160000.0},
}  # fmt: skip


@pytest.mark.parametrize(("name", "prefix"), [("bert", "bert."), ("nomic_bert", "bert."), ("gte", "new.")])
def test_published_checkpoints(name: str, prefix: str, small: Callable[..., Path], prompts: list[list[int]]) -> None:
    """Of a model with a head, whose tensors are not the encoder's; old names of norms, and the fields of authors' own
    code."""
    expected, folder = compute(load(small(name)), prompts), small(name, **HUB_FIELDS[name])
    file = folder / "model.safetensors"
    tensors = {
        f"{prefix}{key}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for key, one in load_file(file).items()
    }
    sizes = {
        f"{prefix}pooler.dense.weight": (96, 96),
        f"{prefix}pooler.dense.bias": (96,),
        "classifier.weight": (2, 96),
    }
    head = {name: torch.ones(size) for name, size in {**sizes, "classifier.bias": (2,), "lm_head.bias": (1,)}.items()}
    save_file({**head, **tensors}, file)
    kind = {"bert": "Bert", "nomic_bert": "NomicBert", "gte": "New"}[name]
    edit_json(folder / "config.json", architectures=[f"{kind}ForSequenceClassification"])
    for out, wanted in zip(compute(load(folder), prompts), expected, strict=True):
        assert torch.equal(out, wanted)


def test_the_second_text_of_a_pair_has_another_type(small: Callable[..., Path], prompts: list[list[int]]) -> None:
    folder = small("bert")
    pair, types = prompts[3], torch.tensor([[0] * 20 + [1] * 13])
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([pair]), token_type_ids=types).last_hidden_state[0]
    for records in (False, True):
        out, other = compute(load(folder), [pair, prompts[1]], records=records, segments=[20, None])
        assert cosine(out, expected) >= 0.99999
        assert torch.equal(other, compute(load(folder), [prompts[1]])[0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of gelu"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder is True; it must be false"),
        ("bert", {"type_vocab_size": -1}, "type_vocab_size"),
        ("bert", {"max_position_embeddings": 161}, "position_embeddings"),
        ("bert", {"num_hidden_layers": 4}, "hold no layers.3."),
        ("bert", {"num_hidden_layers": 2}, "has no place in this architecture"),
        ("roberta", {"pad_token_id": 200}, "max_position_embeddings is 160; it must be above 201"),
        ("modernbert", {"local_attention": 0}, "local_attention is 0"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("nomic_bert", {"prenorm": True}, "prenorm is True"),
        ("nomic_bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 16; it must be 32"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ],
)  # fmt: skip
def test_what_cannot_be_served(name: str, changes: dict[str, Any], message: str, small: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_checkpoint(small(name, **changes))


def test_positions_end_where_the_table_does(small: Callable[..., Path]) -> None:
    assert CheckpointConfig.from_folder(small("bert")).max_position_embeddings == 160
    assert CheckpointConfig.from_folder(small("roberta")).max_position_embeddings == 158
    assert CheckpointConfig.from_folder(small("mpnet")).max_position_embeddings == 160


def test_gte_stretches_its_rotation(small: Callable[..., Path]) -> None:
    """As the code of its authors does: NTK-aware, with the whole factor on the base."""
    folder = small("gte", rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "ntk", "factor": 8.0})
    rope = CheckpointConfig.from_folder(folder).options.layers[0].attention.rope
    assert rope is not None
    table, size = rope_cos_sin(rope, 16, 40), torch.arange(0, 16, 2) / 16
    inverse = 1 / (8e4**size * 8 ** (2 / 16))
    torch.testing.assert_close(table[:, :8], torch.outer(torch.arange(40.0), inverse).cos())


def test_there_are_no_stages(small: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="use tensor_parallel_size"):
        CheckpointConfig.from_folder(small("bert")).check_parallel(1, 2)
