"""The table of rotary angles."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families.reading import read_rope
from quire_engine.models.layers.rope import rope_cos_sin, rope_tables
from quire_engine.models.options import RopeConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Devices(TorchDispatchMode):
    """Notes where ops compute."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.of[func.name()] = result.device.type
        return result


def test_angles_are_computed_on_the_host_whichever_device_they_are_for() -> None:
    rope = RopeConfig(rope_type="llama3", rope_theta=5e5, factor=8.0)
    with torch.device("meta"), Devices() as devices:
        table = rope_cos_sin(rope, 64, 100)
    assert (table.device.type, table.shape) == ("meta", (100, 64))
    assert {device for name, device in devices.of.items() if name != "aten::_to_copy"} == {"cpu"}
    assert {"aten::pow.Scalar", "aten::cos", "aten::sin"} <= devices.of.keys()


ORIGINAL, LONGEST, HEAD_SIZE = 64, 256, 20
FACTORS = {
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.5, 1.7, 2, 2.5, 3, 4], "long_factor": [1.5, 2, 2, 3, 4, 5, 6, 8, 9.5, 11],
}  # fmt: skip


def read(rope: dict[str, Any], **fields: Any) -> RopeConfig:
    values = {"max_position_embeddings": LONGEST, "rope_parameters": rope, **fields}
    return read_rope(Fields(Path("config.json"), values), HEAD_SIZE)


@pytest.mark.parametrize("max_model_len", [ORIGINAL, LONGEST])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.6},
        {"rope_type": "yarn", "factor": None},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
        {"rope_type": "longrope", **FACTORS},
        {"rope_type": "longrope", "factor": 9.0, **FACTORS},
        {"rope_type": "longrope", "attention_factor": 1.2, **FACTORS},
        {
            "rope_type": "longrope", "partial_rotary_factor": 0.6,
            **{name: factors[:6] for name, factors in FACTORS.items()},
        },
    ],
    ids=str,
)  # fmt: skip
def test_angles_are_those_of_transformers(rope: dict[str, Any], max_model_len: int) -> None:
    """For a sequence as long as the model's longest."""
    rope = {**rope, "rope_theta": 500.0, "original_max_position_embeddings": ORIGINAL}
    theirs = LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, head_dim=HEAD_SIZE, max_position_embeddings=LONGEST,
        rope_parameters=dict(rope),
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"), seq_len=max_model_len)
    angles = torch.outer(torch.arange(max_model_len).float(), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), -1) * scale
    table = rope_cos_sin(read(rope), HEAD_SIZE, max_model_len)
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-4)  # an angle of 256 has 2**-16 to its neighbour


@pytest.mark.parametrize("max_model_len", [LONGEST, 3 * LONGEST])
def test_dynamic_angles_are_those_of_the_longest_sequence(max_model_len: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    theirs = LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, head_dim=HEAD_SIZE, max_position_embeddings=LONGEST,
        rope_parameters=dict(rope),
    )  # fmt: skip
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=max_model_len)
    config = read(rope)
    table = rope_cos_sin(config, HEAD_SIZE, max_model_len)
    angles = torch.outer(torch.arange(max_model_len).float(), frequencies)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), -1), rtol=1e-6, atol=1e-3)
    assert config.extended_length == 4 * LONGEST
    plain = rope_cos_sin(RopeConfig(rope_theta=500.0), HEAD_SIZE, max_model_len)
    assert torch.equal(table, plain) == (max_model_len == LONGEST)


def test_yarn_extends_the_original_length() -> None:
    assert read({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}).extended_length == 2560
    assert read({"rope_type": "linear", "factor": 40.0}).extended_length == 0


def test_where_the_fields_were_before() -> None:
    """LongRoPE was called otherwise; the original length and the rotated part stood outside."""
    for old_name in ("su", "yarn"):
        config = read_rope(
            Fields(Path("config.json"), {
                "rope_scaling": {"type": old_name, **{name: factors[:5] for name, factors in FACTORS.items()}},
                "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5, "rope_theta": 1e5,
                "max_position_embeddings": LONGEST,
            }), HEAD_SIZE,
        )  # fmt: skip
        assert (config.rope_type, config.original_max_position_embeddings, config.factor) == ("longrope", 64, 4.0)
        assert (config.rotary_size(HEAD_SIZE), config.rope_theta) == (10, 1e5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope"}, "rope_parameters.rope_type is 'mrope'; it must be one of default, linear, llama3"),
        ({"rope_type": "longrope"}, "rope_parameters.short_factor is missing"),
        ({"rope_type": "longrope", **FACTORS, "short_factor": [1.0]}, "it must be a list of 10 finite numbers above 0"),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [0.0] * 10}, "it must be a list of 10 finite numbers"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "it must be an even number of features of 20"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "it must be an even number of features of 20"),
        ({"rope_type": "yarn", "attention_factor": -1}, "attention_factor is -1; it must be a finite number above 0"),
    ],
    ids=str,
)
def test_what_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(rope)
    assert message in str(refused.value)


def test_queries_grow_beyond_the_original_length() -> None:
    rope = read({"rope_type": "yarn", "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4})
    keys, queries = rope_tables(40)(rope, HEAD_SIZE)
    scales = torch.tensor([1.0] * 16 + [1 + 0.4 * math.log(2)] * 16 + [1 + 0.4 * math.log(3)] * 8)
    torch.testing.assert_close(queries, keys * scales.unsqueeze(1))
    keys, queries = rope_tables(16)(rope, HEAD_SIZE)
    assert queries is keys


def test_layers_that_rotate_alike_share_a_table() -> None:
    tables = rope_tables(8)
    first, second = (tables(RopeConfig(rope_theta=theta), HEAD_SIZE)[0] for theta in (500.0, 9.0))
    assert tables(RopeConfig(rope_theta=500.0), HEAD_SIZE)[0] is first
    assert not torch.equal(first, second)
    assert tables(None, HEAD_SIZE)[0].shape == (8, 0)


def test_queries_cannot_grow_where_a_part_is_not_rotated() -> None:
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta is 0\.1; it must be left out where a part"):
        read({"rope_type": "default", "partial_rotary_factor": 0.6, "llama_4_scaling_beta": 0.1})
