"""Rotary embedding with the cache write, and copies of the cache's blocks, against plain torch."""

from itertools import product

import pytest
import torch
from quire_kernels import rms_norm, rope_and_cache
from quire_kernels.kv_cache import new_kv_cache
from support.full import pairs

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#                                   H  K  D  block size
SHAPES = [(4, 2, 64, 16), (9, 3, 80, 32), (3, 3, 96, 16), (20, 10, 128, 128), (8, 1, 256, 32), (2, 1, 6, 1)]


def rotated(x: torch.Tensor, weight: torch.Tensor | None, angles: torch.Tensor) -> torch.Tensor:
    """Each pair of dimensions i, i + D / 2 as a complex number, turned by its angle; in float64."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    first, second = x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(
    ("shape", "normed", "dtype"), pairs(product(SHAPES, ["", "query", "key", "query and key"], DTYPES)), ids=str
)
def test_rope_and_cache(
    shape: tuple[int, int, int, int], normed: str, dtype: torch.dtype, device: torch.device, tolerance: dict[str, float]
) -> None:
    torch.manual_seed(0)
    (num_heads, num_kv_heads, head_size, block_size), num_tokens, num_blocks = shape, 5, 8
    merged = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size).to(device, dtype)
    sizes = [heads * head_size for heads in (num_heads, num_kv_heads, num_kv_heads)]
    query, key, value = (part.unflatten(-1, (-1, head_size)) for part in merged.split(sizes, -1))  # strided
    positions = torch.randint(0, 100, (num_tokens,), device=device)
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
    angles = torch.outer(torch.arange(100, device=device), frequencies)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(device)
    key_cache, value_cache = (
        new_kv_cache(num_blocks, num_kv_heads, block_size, head_size, dtype, device) for _ in range(2)
    )
    weights = {
        name: weight for name, weight in zip(("query", "key"), torch.randn(2, head_size).to(device, dtype), strict=True)
        if name in normed
    }  # fmt: skip

    out = rope_and_cache(
        query, key, value, positions, torch.cat((angles.cos(), angles.sin()), -1).float(), slots, key_cache,
        value_cache, query_norm_D=weights.get("query"), key_norm_D=weights.get("key"),
    )  # fmt: skip

    if normed:  # rounded twice more
        tolerance = {name: 3 * step for name, step in tolerance.items()}
    torch.testing.assert_close(out.double(), rotated(query, weights.get("query"), angles[positions]), **tolerance)
    blocks, offsets = slots // block_size, slots % block_size
    expected = rotated(key, weights.get("key"), angles[positions])
    torch.testing.assert_close(key_cache[blocks, :, offsets].double(), expected, **tolerance)
    assert torch.equal(value_cache[blocks, :, offsets], value)
    assert int((value_cache != 0).any(-1).sum()) == num_tokens * num_kv_heads, "something else was written to"


@pytest.mark.parametrize(("head_size", "rotary_size"), [(6, 2), (80, 20), (128, 96), (64, 0)])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_only_the_first_features_are_rotated(
    head_size: int, rotary_size: int, norms: bool, device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, head_size).to(device, dtype)
    weights: list[torch.Tensor | None] = [None, None]
    if norms:
        weights = [*torch.randn(2, head_size, device=device)]  # float32 in any dtype
        tolerance = {name: 3 * step for name, step in tolerance.items()}
    slots, angles = torch.arange(6, device=device), torch.rand(9, rotary_size // 2, device=device).double()
    caches = [new_kv_cache(1, 2, 16, head_size, dtype, device) for _ in range(2)]
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    out = rope_and_cache(
        query, key, value, slots, cos_sin, slots, *caches, query_norm_D=weights[0], key_norm_D=weights[1]
    )
    for got, x, weight in zip((out, caches[0][0, :, :6].transpose(0, 1)), (query, key), weights, strict=True):
        plain = rotated(x, weight, torch.zeros(6, head_size // 2, dtype=torch.float64, device=device))
        turned = rotated(plain[..., :rotary_size], None, angles[:6]) if rotary_size else plain[..., :0]
        torch.testing.assert_close(got.double(), torch.cat((turned, plain[..., rotary_size:]), -1), **tolerance)
        if weight is None:
            assert torch.equal(got[..., rotary_size:], x[..., rotary_size:])


def test_values_are_normed_and_queries_may_be_alone(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, 48).to(device, dtype)
    weight, slots, table = (
        torch.randn(48, device=device),
        torch.arange(6, device=device),
        torch.rand(6, 48, device=device),
    )
    caches = [new_kv_cache(1, 2, 16, 48, dtype, device) for _ in range(2)]
    out = rope_and_cache(query, key, value, slots, table, slots, *caches, value_norm_D=weight)
    expected = rms_norm(value.flatten(0, 1), weight, 1e-6).view(value.shape)
    torch.testing.assert_close(caches[1][0, :, :6].transpose(0, 1), expected)
    before = caches[0].clone()
    assert torch.equal(rope_and_cache(query, key[:, :0], None, slots, table, slots, caches[0], None), out)
    assert torch.equal(caches[0], before)


def test_queries_with_a_table_of_their_own(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, 32).to(device, dtype)
    slots, table = torch.arange(6, device=device), torch.rand(6, 32, device=device)
    caches = [new_kv_cache(1, 2, 16, 32, dtype, device) for _ in range(6)]
    out = rope_and_cache(query, key, value, slots, table, slots, *caches[:2], query_cos_sin=3 * table)
    plain, scaled = (
        rope_and_cache(query, key, value, slots, one, slots, *pair)
        for one, pair in ((table, caches[2:4]), (3 * table, caches[4:]))
    )
    assert not torch.equal(out, plain)
    assert torch.equal(out, scaled)
    assert torch.equal(caches[0], caches[2])


def test_normed_heads_are_those_of_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Rounded before the weight and after it, as `rms_norm` does; only the order of the sum of squares is another."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, 80).to(device, dtype)
    weights, slots = torch.randn(2, 80).to(device, dtype), torch.arange(6, device=device)
    cos_sin = torch.ones(1, 80, device=device)
    cos_sin[:, 40:] = 0  # an angle of 0
    caches = [new_kv_cache(1, 2, 16, 80, dtype, device) for _ in range(2)]
    tables = (torch.zeros_like(slots), cos_sin, slots, caches[0], caches[1])
    out = rope_and_cache(query, key, value, *tables, query_norm_D=weights[0], key_norm_D=weights[1], eps=1e-5)
    for got, x, weight in zip((out, caches[0][0, :, :6].transpose(0, 1)), (query, key), weights, strict=True):
        expected = rms_norm(x.flatten(0, 1), weight, 1e-5).view(x.shape)
        torch.testing.assert_close(got, expected)
        if dtype != torch.float32:  # the same bits, but for numbers halfway between two
            assert (got == expected).float().mean() > 0.98


def test_an_fp8_cache(device: torch.device) -> None:
    """Keys and values are rounded to the nearest, and cut off at 448."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, 64).to(device, torch.bfloat16)
    key[0], value[1, 1, 3], value[2, 0, 0] = 3000.0, 1e4, -1e4
    slots, cos_sin = torch.arange(6, device=device), torch.ones(1, 64, device=device)
    cos_sin[:, 32:] = 0  # an angle of 0
    caches = [new_kv_cache(1, 2, 16, 64, torch.float8_e4m3fn, device) for _ in range(2)]
    rope_and_cache(query, key, value, torch.zeros_like(slots), cos_sin, slots, *caches)
    for cache, x in zip(caches, (key, value), strict=True):
        expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache.float()[0, :, :6].transpose(0, 1), expected.float())


def test_an_fp8_cache_of_normed_keys(device: torch.device) -> None:
    """They are rounded to fp8 after all else."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 2, 64).to(device, torch.bfloat16)
    weights = torch.randn(2, 64).to(device, torch.bfloat16)
    angles = torch.rand(6, 32, device=device)
    slots, cos_sin = torch.arange(6, device=device), torch.cat((angles.cos(), angles.sin()), -1)
    fp8, plain = ([new_kv_cache(1, 2, 16, 64, kind, device) for _ in range(2)] for kind in (FP8, torch.bfloat16))
    for caches in (fp8, plain):
        rope_and_cache(
            query, key, value, slots, cos_sin, slots, *caches, query_norm_D=weights[0], key_norm_D=weights[1]
        )
    for cache, exact in zip(fp8, plain, strict=True):
        assert torch.equal(cache.float(), exact.to(FP8).float())


def test_keys_alone_are_written_as_beside_values(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(5, 4, 48).to(device, dtype), torch.randn(5, 1, 48).to(device, dtype)
    cos_sin, positions = torch.rand(9, 16, device=device), torch.arange(5, device=device)
    caches = [new_kv_cache(2, 1, 16, 48, dtype, device) for _ in range(3)]
    arguments = (positions, cos_sin, positions * 3)
    expected = rope_and_cache(query, key, key, *arguments, caches[0], caches[1])
    assert torch.equal(rope_and_cache(query, key, None, *arguments, caches[2], None), expected)
    assert torch.equal(caches[2], caches[0])
    assert caches[2].any()
