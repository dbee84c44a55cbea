"""Mixing of streams, and gates of which only large numbers count, against transformers' own modules."""

import pytest
import torch
from quire_kernels import gaussian_topk, match_rms, mix_streams, row_moments
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextMLP

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 2e-6, "rtol": 2e-6}


@DTYPES
@pytest.mark.parametrize(("rows", "streams", "size"), [(1, 2, 8), (5, 3, 67), (4, 4, 256), (0, 2, 8)])
def test_mix_streams(rows: int, streams: int, size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    torch.manual_seed(0)
    config = Gemma3nTextConfig(hidden_size=8, num_attention_heads=2, altup_num_inputs=streams, altup_active_idx=1)
    altup = Gemma3nTextAltUp(config)
    routes = torch.randn(rows, streams)
    altup.compute_router_modalities = lambda _: routes.tanh()[None]  # type: ignore[assignment]
    wide = torch.randn(rows, streams * size + 5).to(dtype)
    hidden = wide[:, 2:-3].unflatten(1, (streams, size))
    coefs = altup.prediction_coefs.weight.data.view(streams, streams, streams)
    out = mix_streams(hidden, hidden, routes, coefs)
    expected = altup.predict(hidden.float().transpose(0, 1)[:, None])[:, 0].transpose(0, 1).detach()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, **tolerance(dtype))
    computed = torch.randn(rows, size).to(dtype)
    innovation = (computed.float() - hidden[:, 1].float()).to(dtype)
    coefs = altup.correction_coefs.weight.data.view(streams, 1, streams)
    corrected = mix_streams(hidden, innovation[:, None], routes, coefs, 1.0)
    expected = altup.correct(hidden.float().transpose(0, 1)[:, None], computed.float()[None])[:, 0].transpose(0, 1)
    torch.testing.assert_close(corrected.float(), expected.detach(), **tolerance(dtype))
    if rows and cpu_kernels != "torch":
        alone = mix_streams(hidden[-1:], innovation[-1:, None], routes[-1:], coefs, 1.0)
        assert torch.equal(alone, corrected[-1:]), "depends on other rows"


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (5, 67), (3, 768)])
def test_match_rms(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    torch.manual_seed(0)
    hidden, like = (torch.randn(shape[0], shape[1] + 3) * 7).to(dtype)[:, 1:-2], torch.randn(shape).to(dtype)
    hidden[0] = 0
    wide = torch.ones(shape[0], 3 * shape[1]).to(dtype)
    out = match_rms(hidden, like, 1e-5, wide[:, shape[1] : 2 * shape[1]])
    wanted, own = (x.float().square().mean(-1, keepdim=True) for x in (like, hidden))
    expected = hidden.float() * wanted.sqrt() / own.clamp(min=1e-5).sqrt()
    torch.testing.assert_close(out.float(), expected, **tolerance(dtype))
    assert (wide[:, : shape[1]] == 1).all()
    assert (wide[:, 2 * shape[1] :] == 1).all()
    assert torch.equal(match_rms(hidden, hidden, 2.0**-126), hidden), "a row is its own model"
    if cpu_kernels != "torch":
        assert torch.equal(match_rms(hidden[-1:], like[-1:], 1e-5), out[-1:]), "depends on other rows"
    for bad, error in ((like.double(), TypeError), (like[:, :-1], ValueError)):
        with pytest.raises(error, match="like_TE"):
            match_rms(hidden, bad, 1e-5)
    with pytest.raises(ValueError, match="out"):
        match_rms(hidden, like, 1e-5, wide[:, : shape[1] - 1])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (5, 67), (3, 768)])
def test_gaussian_topk(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape[0], shape[1] + 3) * 2 + 5).to(dtype)[:, 1:-2]
    moments = row_moments(x)
    torch.testing.assert_close(moments[:, 0], x.float().mean(1))
    torch.testing.assert_close(moments[:, 1], x.float().var(1, correction=0))
    config = Gemma3nTextConfig(
        hidden_size=8, intermediate_size=shape[1], num_hidden_layers=1, activation_sparsity_pattern=[0.8],
        layer_types=["full_attention"], num_attention_heads=2, num_kv_shared_layers=0,
    )  # fmt: skip
    multiplier = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.8)).item()
    out = gaussian_topk(x, moments, multiplier)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), Gemma3nTextMLP(config)._gaussian_topk(x.float()), **tolerance(dtype))
    assert 0 < (out > 0).sum() < 0.4 * out.numel()
    if cpu_kernels != "torch":
        assert torch.equal(gaussian_topk(x[-1:], row_moments(x[-1:]), multiplier), out[-1:]), "depends on other rows"
    for bad, error in ((moments.double(), TypeError), (moments[:, :1], ValueError)):
        with pytest.raises(error, match="moments_T2"):
            gaussian_topk(x, bad, multiplier)


def test_streams_that_do_not_fit_are_rejected() -> None:
    streams, routes, coefs = torch.zeros(3, 2, 8), torch.zeros(3, 2), torch.zeros(2, 2, 2)
    for name, arguments in (
        ("base_TQE", (streams.transpose(1, 2), streams, routes, coefs)),
        ("inputs_TPE", (streams, streams[:2], routes, coefs)),
        ("routes_TM", (streams, streams, routes[:2], coefs)),
        ("weight_QPM", (streams, streams, routes, coefs[:1])),
    ):
        with pytest.raises(ValueError, match=name):
            mix_streams(*arguments)
    with pytest.raises(TypeError, match="inputs_TPE"):
        mix_streams(streams, streams.double(), routes, coefs)
