"""The norm of each head of queries and keys, fused with their rotation: to the bits what `rms_norm` before it does."""

import pytest
import torch
from quire_kernels import rms_norm, rope_and_cache
from quire_kernels.kv_cache import natural_key_order
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROTARY = pytest.mark.parametrize(("head_size", "rotary_size"), [(6, 2), (80, 20), (128, 96), (96, 48), (64, 0)])
HEAD_SIZES = pytest.mark.parametrize("head_size", [6, 16, 80, 128, 272, 1024])
H, K, B, EPS = 5, 2, 4, 1e-6


class Inputs:
    """Some tokens: slices of a merged projection, as in a model, and the tables for them."""

    def __init__(self, num_tokens: int, head_size: int, dtype: torch.dtype, rotary_size: int | None = None) -> None:
        generator = torch.Generator().manual_seed(num_tokens + head_size)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.qkv = (randn(num_tokens, (H + 2 * K) * head_size) * 3).to(dtype)
        heads = self.qkv.unflatten(-1, (-1, head_size))
        self.query, self.key, self.value = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
        self.query_norm, self.key_norm = (1 + randn(2, head_size) / 4).to(dtype)
        rotary_size = head_size if rotary_size is None else rotary_size
        self.angles = torch.outer(torch.arange(99), 10000 ** -(torch.arange(0, rotary_size, 2) / max(rotary_size, 1)))
        self.positions = torch.randint(0, 99, (num_tokens,), generator=generator)
        self.cos_sin = torch.cat((self.angles.cos(), self.angles.sin()), -1)
        self.slots = torch.randperm(num_tokens + 6, generator=generator)[:num_tokens]
        self.cache_shape = (2, -(-(num_tokens + 6) // B), K, B, head_size)

    def rope(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        query_cos_sin: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries, and both caches."""
        caches = torch.zeros(self.cache_shape, dtype=query.dtype)
        out = rope_and_cache(
            query, key, self.value, self.positions, self.cos_sin, self.slots, caches[0], caches[1],
            query_norm_D=query_norm, key_norm_D=key_norm, eps=EPS, query_cos_sin=query_cos_sin,
        )  # fmt: skip
        return out, caches


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.flatten(0, 1), weight, EPS).view(x.shape)


@DTYPES
@HEAD_SIZES
@pytest.mark.parametrize("num_tokens", [1, 9, 90])  # the last is shared among threads
def test_a_fused_norm_is_rms_norm(num_tokens: int, head_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(num_tokens, head_size, dtype)
    before = x.qkv.clone()
    normed_query, normed_key = normed(x.query, x.query_norm), normed(x.key, x.key_norm)
    for query, key, query_norm, key_norm in (
        (normed_query, normed_key, x.query_norm, x.key_norm),
        (normed_query, x.key, x.query_norm, None),
        (x.query, normed_key, None, x.key_norm),
    ):
        out, caches = x.rope(x.query, x.key, query_norm, key_norm)
        expected_out, expected_caches = x.rope(query, key)
        assert torch.equal(out, expected_out)
        assert torch.equal(caches, expected_caches)
    assert torch.equal(x.qkv, before)


@DTYPES
@HEAD_SIZES
def test_values_are_normed_and_keys_may_be_values(head_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(9, head_size, dtype)
    got, expected = torch.zeros(2, *x.cache_shape, dtype=dtype)
    rope = (x.positions, x.cos_sin, x.slots)
    for key, value in ((x.key, x.value), (x.key, x.key)):
        rope_and_cache(x.query, key, value, *rope, *got, key_norm_D=x.key_norm, value_norm_D=x.query_norm, eps=EPS)
        rope_and_cache(x.query, normed(key, x.key_norm), normed(value, x.query_norm), *rope, *expected)
        assert torch.equal(got, expected)


@DTYPES
def test_without_key_heads_queries_alone_are_rotated(dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(9, 80, dtype)
    expected, caches = x.rope(x.query, x.key, x.query_norm)
    before = caches.clone()
    tables = (x.positions, x.cos_sin, x.slots)
    out = rope_and_cache(x.query, x.key[:, :0], None, *tables, caches[0], None, query_norm_D=x.query_norm, eps=EPS)
    assert torch.equal(out, expected)
    assert torch.equal(caches, before)


@DTYPES
def test_heads_with_gaps(dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(7, 48, dtype)
    query, key = (torch.stack((part, torch.full_like(part, 1e9)), -1)[..., 0] for part in (x.query, x.key))
    assert query.stride(-1) == 2
    out, caches = x.rope(query, key, x.query_norm, x.key_norm)
    expected_out, expected_caches = x.rope(x.query, x.key, x.query_norm, x.key_norm)
    assert torch.equal(out, expected_out)
    assert torch.equal(caches, expected_caches)


@DTYPES
@pytest.mark.parametrize("head_size", [6, 128])
def test_it_is_what_qwen3_does(head_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(9, head_size, dtype)
    out, caches = x.rope(x.query, x.key, x.query_norm, x.key_norm)
    parts = []
    for part, weight in ((x.query, x.query_norm), (x.key, x.key_norm)):
        norm = Qwen3RMSNorm(head_size, eps=EPS)
        norm.weight.data = weight
        parts.append(norm(part).transpose(0, 1)[None])
    angles = torch.cat((x.angles, x.angles), -1)[x.positions][None]
    expected = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(*parts, angles.cos(), angles.sin())]
    keys = natural_key_order(caches[0])[x.slots // B, :, x.slots % B]
    tolerance = {"atol": 3e-2, "rtol": 1.6e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1.3e-6}
    for got, want in zip((out, keys), expected, strict=True):
        torch.testing.assert_close(got, want.to(dtype), **tolerance)


@DTYPES
@ROTARY
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_only_the_first_features_are_rotated(
    head_size: int, rotary_size: int, norms: bool, dtype: torch.dtype, cpu_kernels: str
) -> None:
    x = Inputs(9, head_size, dtype, rotary_size)
    weights = (x.query_norm, x.key_norm) if norms else (None, None)
    out, caches = x.rope(x.query, x.key, *weights)
    angles = torch.cat((x.angles, x.angles), -1)[x.positions]
    keys = natural_key_order(caches[0])[x.slots // B, :, x.slots % B]
    tolerance = {"atol": 3e-2, "rtol": 1.6e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1.3e-6}
    for got, part, weight in zip((out, keys), (x.query, x.key), weights, strict=True):
        part = part if weight is None else normed(part, weight)
        rotated, rest = part[..., :rotary_size].float(), part[..., rotary_size:]
        half = rotary_size // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
        expected = rotated * angles.cos()[:, None] + turned * angles.sin()[:, None]
        torch.testing.assert_close(got[..., :rotary_size].float(), expected, **tolerance)
        assert torch.equal(got[..., rotary_size:], rest)


@DTYPES
def test_queries_with_a_table_of_their_own(dtype: torch.dtype, cpu_kernels: str) -> None:
    x, other = Inputs(9, 48, dtype), Inputs(9, 48, dtype)
    other.cos_sin = x.cos_sin * (1 + torch.arange(99.0)).log1p().unsqueeze(1)
    out, caches = x.rope(x.query, x.key, x.query_norm, x.key_norm, other.cos_sin)
    assert torch.equal(out, other.rope(x.query, x.key, x.query_norm, x.key_norm)[0])
    assert torch.equal(caches, x.rope(x.query, x.key, x.query_norm, x.key_norm)[1])


def test_float32_norms_of_bfloat16_heads(cpu_kernels: str) -> None:
    x = Inputs(9, 48, torch.bfloat16)
    weights = torch.rand(2, 48, generator=torch.Generator().manual_seed(0)) + 0.5
    out, caches = x.rope(x.query, x.key, *weights)
    expected_out, expected_caches = x.rope(normed(x.query, weights[0]), normed(x.key, weights[1]))
    assert torch.equal(out, expected_out)
    assert torch.equal(caches, expected_caches)


@DTYPES
@pytest.mark.parametrize("head_size", [6, 80, 576])
def test_keys_alone_are_written_as_beside_values(head_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    x = Inputs(9, head_size, dtype)
    expected, caches = x.rope(x.query, x.key)
    keys = torch.zeros(x.cache_shape[1:], dtype=dtype)
    out = rope_and_cache(x.query, x.key, None, x.positions, x.cos_sin, x.slots, keys, None)
    assert torch.equal(out, expected)
    assert torch.equal(keys, caches[0])


@DTYPES
@pytest.mark.parametrize("rotary_size", [0, 128])
def test_tokens_whose_slots_follow_each_other_are_written_as_alone(
    rotary_size: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    x = Inputs(90, 128, dtype, rotary_size)  # shared among threads where it is rotated
    x.slots = torch.cat((torch.arange(3, 60), torch.arange(62, 95)))
    out, caches = x.rope(x.query, x.key)
    expected = torch.zeros_like(caches)
    for token in range(len(x.slots)):
        own = slice(token, token + 1)
        heads = (part[own] for part in (x.query, x.key, x.value))
        alone = rope_and_cache(*heads, x.positions[own], x.cos_sin, x.slots[own], *expected)
        assert torch.equal(out[own], alone)
    assert torch.equal(caches, expected)
