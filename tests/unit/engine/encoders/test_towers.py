"""Towers whose linear layers are quantised, against those in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quire_engine import EngineConfig
from quire_engine.encoders.family import as_arrays, find_family, load_processor
from quire_engine.encoders.image_encoder import make_image_encoder
from quire_engine.encoders.towers.loading import load_tower
from quire_engine.encoders.towers.transformers_tower import TransformersTower
from quire_engine.frontend.tokenizer import load_tokenizer
from support.pictures import PICTURES, image_of

IMAGE = image_of(40, 90)
LEAST_COSINE = 0.998
"""Of a hidden state in int8; these random towers have 0.9992 (Mistral 3, Pixtral) and 0.9999 (others)."""


@torch.inference_mode()
def states_of(folder: Path, quantization: str | None) -> torch.Tensor:
    family = find_family(folder)
    assert family is not None
    arrays = as_arrays(load_processor(family, folder)(images=[IMAGE], return_tensors="np", **family.arguments))
    tower = load_tower(folder, family, torch.float32, torch.device("cpu"), quantization)
    states: torch.Tensor = tower(**{name: torch.from_numpy(value) for name, value in arrays.items()})
    return states


@pytest.mark.parametrize("name", PICTURES)
def test_int8_is_near_float32(name: str, picture_checkpoint: Callable[[str], Path]) -> None:
    folder = picture_checkpoint(name)
    exact, quantised, four_bits = (states_of(folder, setting) for setting in (None, "int8", "int4"))
    family = find_family(folder)
    assert family is not None
    assert torch.equal(exact, quantised) == isinstance(family.tower(), TransformersTower), "only ours are quantised"
    assert F.cosine_similarity(exact, quantised, dim=-1).min() > LEAST_COSINE
    assert torch.equal(quantised, four_bits), "a tower has 8 bits with int4, too"


def test_the_tower_follows_the_setting(picture_checkpoint: Callable[[str], Path]) -> None:
    folder = picture_checkpoint("smolvlm")
    settings = {"model": str(folder), "dtype": "float32", "quantization": "int8"}
    encoder = make_image_encoder(EngineConfig.from_settings(settings), load_tokenizer(folder))
    assert encoder is not None
    try:
        parts = encoder.encode(IMAGE).parts
    finally:
        encoder.shutdown()
    found = torch.frombuffer(bytearray().join(part.tensor for part in parts), dtype=torch.float32)
    exact, quantised = (states_of(folder, setting).flatten() for setting in (None, "int8"))
    assert (found - quantised).norm() < (found - exact).norm() / 4, "or the process has a tower in float32"
