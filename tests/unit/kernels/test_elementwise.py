"""Norms, activation and rotary embedding against transformers' own modules."""

import pytest
import torch
from quire_kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rope_and_cache, silu_and_mul, xielu
from quire_kernels.kv_cache import natural_key_order, natural_value_order, new_kv_cache, write_kv_cache
from transformers.activations import ACT2CLS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (5, 67)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, residual, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
    )
    norm = LlamaRMSNorm(shape[1], eps=1e-5)
    norm.weight.data = weight
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5), norm(hidden))
    total = hidden + residual
    torch.testing.assert_close(add_rms_norm(hidden, residual, weight, 1e-5), norm(total))
    torch.testing.assert_close(residual, total)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (5, 67), (3, 768)])
def test_layer_norm(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, cpu_kernels: str) -> None:
    """Also of rows whose mean is large compared with their deviation, and of parts of longer rows."""
    torch.manual_seed(0)
    rows, size = shape
    hidden = (torch.randn(rows, size + 3) + 50).to(dtype)[:, 1 : size + 1]
    residual, weight = torch.randn(shape).to(dtype), torch.randn(size)
    bias = torch.randn(size) if has_bias else None
    tolerance = 1e-2 if dtype == torch.bfloat16 else 5e-5
    expected = torch.nn.functional.layer_norm(hidden.float(), (size,), weight, bias, 1e-5)
    out = layer_norm(hidden, weight, bias, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    total = hidden + residual
    expected = torch.nn.functional.layer_norm(total.float(), (size,), weight, bias, 1e-5)
    out = add_layer_norm(hidden, residual, weight, bias, 1e-5)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual, total)
    assert torch.equal(layer_norm(total[:1], weight, bias, 1e-5), out[:1]), "depends on other rows"
    with pytest.raises(TypeError, match="weight_E"):
        layer_norm(hidden, weight.double(), bias, 1e-5)
    with pytest.raises(ValueError, match="bias_E"):
        layer_norm(hidden, weight, torch.ones(size + 1), 1e-5)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_of_parts(has_bias: bool, dtype: torch.dtype, cpu_kernels: str) -> None:
    """Each part of a row has a mean and weights of its own."""
    torch.manual_seed(0)
    rows, heads, size = 5, 3, 40
    hidden = (torch.randn(rows, 2 * heads * size) + 1).to(dtype)[:, size : size + heads * size]
    weight, bias = torch.randn(heads, size), torch.randn(heads, size) if has_bias else None
    parts = hidden.float().unflatten(1, (heads, size))
    expected = torch.nn.functional.layer_norm(parts, (size,), eps=1e-5) * weight + (0 if bias is None else bias)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    out = layer_norm(hidden, weight, bias, 1e-5)
    torch.testing.assert_close(out.float(), expected.flatten(1), atol=tolerance, rtol=tolerance)
    with pytest.raises(ValueError, match="weight_E"):
        layer_norm(hidden, weight[:2], None, 1e-5)


@DTYPES
def test_xielu(dtype: torch.dtype, cpu_kernels: str) -> None:
    x = torch.cat((torch.linspace(-30, 30, 97), torch.tensor([0.0, -1e-4, 1e-4, torch.nan]))).to(dtype).repeat(3, 2)
    module = ACT2CLS["xielu"](alpha_p_init=0.7, alpha_n_init=1.3, dtype=torch.float32)
    alpha_p, alpha_n = module.alpha_p.data, module.alpha_n.data
    out = xielu(x[:, :101], alpha_p, alpha_n)
    assert out.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    expected = module(x[:, :101].float()).detach()
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    with pytest.raises(ValueError, match="alpha_n"):
        xielu(x, alpha_p, torch.ones(2))


@DTYPES
def test_silu_and_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 14).to(dtype)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    torch.testing.assert_close(silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up, atol=1e-2, rtol=1e-2)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("head_size", [6, 16, 80, 128])
def test_rope_and_cache(head_size: int, block_size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads, num_kv_heads = 9, 4, 2
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size).to(dtype)  # strided views, as in a model
    query, key, value = (
        part.unflatten(-1, (-1, head_size))
        for part in qkv.split([num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size], -1)
    )
    positions = torch.randint(0, 100, (num_tokens,))
    angles = torch.outer(torch.arange(100).float(), 10000 ** -(torch.arange(0, head_size, 2).float() / head_size))
    slots = torch.randperm(8 * block_size)[:num_tokens] if 8 * block_size >= num_tokens else torch.randperm(num_tokens)
    num_blocks = int(slots.max()) // block_size + 1
    key_cache = torch.zeros(num_blocks, num_kv_heads, block_size, head_size, dtype=dtype)
    value_cache = torch.zeros_like(key_cache)

    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    rotated = rope_and_cache(query, key, value, positions, cos_sin, slots, key_cache, value_cache)

    full = torch.cat((angles, angles), -1)[positions].to(torch.float32)
    want_q, want_k = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], full.cos()[None].to(dtype), full.sin()[None].to(dtype)
    )
    # transformers rounds every product to bfloat16, the C++ kernel only the result.
    tolerance = {"atol": 3e-2, "rtol": 1.6e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1.3e-6}
    torch.testing.assert_close(rotated, want_q[0].transpose(0, 1), **tolerance)
    key_cache, value_cache = natural_key_order(key_cache), natural_value_order(value_cache)
    for token, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(
            key_cache[slot // block_size, :, slot % block_size], want_k[0, :, token], **tolerance
        )
        torch.testing.assert_close(value_cache[slot // block_size, :, slot % block_size], value[token])
    assert int((value_cache != 0).any(-1).sum()) == num_tokens * num_kv_heads, "something else was written to"


def test_rope_norms_heads_before(cpu_kernels: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 32), torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    weights = torch.randn(2, 32).unbind()
    angles = torch.randn(5, 16)
    tables = (torch.arange(5), torch.cat((angles.cos(), angles.sin()), -1), torch.arange(5))
    caches = torch.zeros(4, 1, 2, 16, 32)
    out = rope_and_cache(
        query, key, value, *tables, caches[0], caches[1],
        query_norm_D=weights[0], key_norm_D=weights[1], eps=1e-6,
    )  # fmt: skip
    normed = [rms_norm(x.flatten(0, 1), w, 1e-6).view(x.shape) for x, w in zip((query, key), weights, strict=True)]
    expected = rope_and_cache(normed[0], normed[1], value, *tables, caches[2], caches[3])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(caches[0], caches[2])
    torch.testing.assert_close(caches[1], caches[3])


@DTYPES
@pytest.mark.parametrize("head_size", [16, 20, 80, 128])
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_an_int8_cache_has_codes_and_the_scale_of_each_head(
    block_size: int, head_size: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    """Those of what a cache of the model's dtype would have; bit for bit, whatever op writes them."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, heads, head_size).to(dtype) for heads in (4, 2, 2))
    key[1], value[2, 0] = 0.0, 0.0
    value[3, 1, 5], value[4, 0, 2] = float("nan"), float("inf")
    angles, slots = torch.randn(9, head_size // 2), torch.randperm(5 * block_size)[:9]
    tables = (torch.arange(9), torch.cat((angles.cos(), angles.sin()), -1), slots)
    caches = {kind: [new_kv_cache(5, 2, block_size, head_size, kind) for _ in range(2)] for kind in (dtype, torch.int8)}
    for pair in caches.values():
        rope_and_cache(query, key, value, *tables, *pair)
    keys, values = (
        order(x) for order, x in zip((natural_key_order, natural_value_order), caches[torch.int8], strict=True)
    )
    assert keys.shape == (5, 2, block_size, head_size + 4)
    blocks, offsets = slots // block_size, slots % block_size
    for rows, exact in ((keys, natural_key_order(caches[dtype][0])), (values, natural_value_order(caches[dtype][1]))):
        written, x = rows[blocks, :, offsets], exact[blocks, :, offsets].float()
        scales = written[..., head_size:].contiguous().view(torch.float32)
        is_finite = x.isfinite().all(-1, keepdim=True)
        assert scales.isnan().equal(~is_finite)
        largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-10)
        assert torch.equal(scales[is_finite], (largest / 127)[is_finite])
        codes = (x / scales).round()
        assert torch.equal(written[..., :head_size].float() * is_finite, codes.nan_to_num(0.0))
        assert int((rows != 0).any(-1).sum()) == 9 * 2
    others = [torch.zeros_like(one) for one in caches[torch.int8]]
    rotated = natural_key_order(caches[dtype][0])[blocks, :, offsets]
    write_kv_cache(rotated, value, slots, *others)
    others = [natural_key_order(others[0]), natural_value_order(others[1])]
    for own, other in zip((keys, values), others, strict=True):
        is_number = own[..., head_size:].contiguous().view(torch.float32).isfinite()
        assert torch.equal(own * is_number, other * is_number)


def test_an_fp8_cache_is_cut_off_at_its_largest_number(cpu_kernels: str) -> None:
    query = key = value = torch.tensor([1000.0, -1000.0, 1.01, -0.3]).repeat(8).view(1, 1, 32)
    cos_sin = torch.cat((torch.ones(1, 16), torch.zeros(1, 16)), -1)
    caches = torch.zeros(2, 1, 1, 16, 32, dtype=torch.float8_e4m3fn)
    zero = torch.zeros(1, dtype=torch.int64)
    rope_and_cache(query, key, value, zero, cos_sin, zero, caches[0], caches[1])
    expected = torch.tensor([448.0, -448.0, 1.0, -0.3125]).repeat(8)
    assert torch.equal(caches.float()[:, 0, 0, 0], expected.expand(2, 32))
