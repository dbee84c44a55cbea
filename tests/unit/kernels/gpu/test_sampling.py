"""`sample`, `argmax`, `probabilities`, the noise and the bitmask, against plain torch."""

import pytest
import torch
from quire_kernels import apply_token_bitmask, argmax, probabilities, sample
from quire_kernels.sampling import _gumbel_noise_torch, _kept_logits_torch, _philox, _sample_torch
from support import sampling as support
from support.sampling import columns, extreme_rows, logits_of, without_noise

INFINITY = float("inf")
VOCAB_SIZES = [1, 515, 5000]
MASKS = {**support.MASKS, "large top-k": {"top_k": 2000}}


def sample_on(device: torch.device, logits: torch.Tensor, arguments: dict[str, torch.Tensor]) -> list[int]:
    token_ids: list[int] = sample(logits.to(device), **{k: v.to(device) for k, v in arguments.items()}).tolist()
    return token_ids


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_that_of_torch(vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    logits = logits_of(11, vocab_size, 1.0, dtype)
    logits[1] = 0
    logits[2] = -INFINITY
    logits[3] = INFINITY
    logits[4, vocab_size // 2] = INFINITY
    logits[5], logits[5, -1] = -INFINITY, -1e4
    logits[6, vocab_size // 2 :] = float("nan")
    logits[7, -1] = -float("nan")
    logits[8] = logits[8].clamp(max=0.5)  # ties
    logits[9, 0], logits[9, 1:] = -0.0, 0.0
    wide = torch.cat((logits, torch.full_like(logits, 1e4)), dim=1)[:, :vocab_size]
    assert argmax(wide.to(device)).tolist() == logits.argmax(-1).tolist()
    assert argmax(logits[:0].to(device)).tolist() == []


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_those_of_torch(vocab_size: int, mask: dict[str, float], device: torch.device) -> None:
    for rows, scale, dtype in ((3, 0.1, torch.float32), (4, 4.0, torch.float32), (3, 2.0, torch.bfloat16)):
        logits = logits_of(rows, vocab_size, scale, dtype)
        temperature = torch.linspace(0, 1.6, rows)
        arguments = columns(rows, temperature=temperature, seeds=torch.arange(rows) * 977 - 9, **mask)
        assert sample_on(device, logits, arguments) == _sample_torch(logits, **arguments).tolist()


@pytest.mark.parametrize(
    "mask", [MASKS["top-k"], MASKS["top-p"], MASKS["all"], {"top_k": 1}, {"top_k": 3}, {"top_p": 0.004}], ids=str
)
def test_only_kept_tokens_are_drawn(mask: dict[str, float], device: torch.device) -> None:
    """With next to no difference between the tokens of a mask, and the others all but as likely."""
    draws, vocab_size = 16, 400
    row = -torch.arange(vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))] * 1e-6
    logits = row.expand(draws, vocab_size)
    arguments = columns(draws, seeds=torch.arange(draws), **mask)
    tokens = sample_on(device, logits, arguments)
    kept = int(mask.get("top_k", vocab_size))
    ranks = row.argsort(descending=True).argsort()[tokens]
    assert ranks.max() < kept * mask.get("top_p", 1.0) + 1
    assert ranks.max() >= int(kept * mask.get("top_p", 1.0) * 0.7)
    assert tokens == _sample_torch(logits, **arguments).tolist()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_extreme_rows(mask: dict[str, float], device: torch.device) -> None:
    logits = extreme_rows()
    for temperature in (1.0, 1e-30, 1e30):
        arguments = columns(len(logits), temperature=temperature, **mask)
        tokens = sample_on(device, logits, arguments)
        assert 0 <= tokens.pop() < logits.shape[1]
        assert tokens == _sample_torch(logits, **arguments).tolist()[:-1]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_probabilities_are_those_of_torch(mask: dict[str, float], device: torch.device) -> None:
    for logits in (logits_of(4, 515, 1.0), logits_of(4, 4099, 0.1), logits_of(4, 63, 3.0, torch.bfloat16)):
        arguments = without_noise(4, temperature=torch.tensor([0.0, 0.3, 1.0, 1.6]), **mask)
        p = probabilities(logits.to(device), **{name: column.to(device) for name, column in arguments.items()}).cpu()
        kept = _kept_logits_torch(logits[1:].float(), *(column[1:] for column in arguments.values()))
        assert p[0].nonzero().tolist() == [[int(logits[0].argmax())]]
        torch.testing.assert_close(p[1:], kept.softmax(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(p[1:] > 0, kept.softmax(-1) > 0) or mask.get("top_p", 1.0) < 1


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_probabilities_of_extreme_rows(device: torch.device) -> None:
    logits = extreme_rows()
    for mask in (MASKS["none"], MASKS["all"]):
        arguments = without_noise(len(logits), temperature=1.0, **mask)
        p = probabilities(logits.to(device), **{name: column.to(device) for name, column in arguments.items()}).cpu()
        assert p[[0, 1, 3, 7, 8], [0, 700, 123, 9, 5]].tolist() == [1, 1, 1, 1, 1]
        torch.testing.assert_close(p.sum(-1), torch.ones(len(logits)))
        assert not p[4, 500:].any()


def test_top_k_and_top_p_keep_ties(device: torch.device) -> None:
    draws = 40
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]).expand(draws, 5)
    for mask in ({"top_k": 2}, {"top_p": 0.6}):
        tokens = sample_on(device, logits, columns(draws, seeds=torch.arange(draws), **mask))
        assert set(tokens) == {0, 1, 2, 3}


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    rows, vocab_size = 8, 4099
    logits = logits_of(rows, vocab_size, 2.0)
    arguments = columns(rows, seeds=torch.arange(rows), positions=torch.arange(rows) + 2**31)
    arguments["temperature"] = torch.linspace(0.1, 2, rows).where(torch.arange(rows) % 5 > 0, 0)
    arguments["top_k"] = (torch.arange(rows) * 20 + 1).where(torch.arange(rows) % 2 > 0, 10**6)
    arguments["top_p"] = torch.linspace(0.05, 0.99, rows).where(torch.arange(rows) % 3 > 0, 1.0)
    together = sample_on(device, logits, arguments)
    alone = [
        sample_on(device, logits[row : row + 1], {name: column[row : row + 1] for name, column in arguments.items()})
        for row in range(rows)
    ]
    assert [[token] for token in together] == alone


@pytest.mark.parametrize("vocab_size", [1, 63, 10_001])
def test_noise_is_that_of_torch_but_for_the_last_bits(vocab_size: int, device: torch.device) -> None:
    from quire_kernels.gpu.sampling import gumbel_noise

    seeds, positions = torch.tensor([0, -1, 2**40 + 3]), torch.tensor([0, 2**32 - 1, 77])
    noise = gumbel_noise(seeds.to(device), positions.to(device), vocab_size).cpu()
    torch.testing.assert_close(noise, _gumbel_noise_torch(seeds, positions, vocab_size), rtol=5e-7, atol=5e-7)
    # Of the same random bits to the last: the noise of neighbouring numbers of 23 bits differs by more than its error
    # where it is large.
    bits = _philox(seeds, positions, -(-vocab_size // 4))[:, :vocab_size] >> 9
    uniform = noise.double().neg().exp().neg().exp()
    large = uniform > 0.5
    assert torch.equal((uniform * 2**23 - 0.5).round().long()[large], bits[large])


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 4096, 5000])
def test_token_bitmask(vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    logits = logits_of(4, vocab_size, 1.0, dtype)
    tokens = torch.arange(vocab_size)
    allowed = (words[:, tokens // 32] >> (tokens % 32)) & 1 == 1
    expected = logits.clone()
    expected[[3, 1]] = logits[[3, 1]].where(allowed, -INFINITY)
    out = logits.to(device)
    apply_token_bitmask(out, torch.tensor([3, 1]), words)
    assert torch.equal(out.cpu(), expected)
