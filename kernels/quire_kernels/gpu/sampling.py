"""From logits to token ids in the Triton language, without a sort; see `quire_kernels/sampling.py` for the algorithm.

Four launches for any sampling parameters, with no transfer to the host between them::

    _maxima     program (row, chunk)   the chunk's largest logit and its token      ─► ranks [S, C]
    _bounds     program (row)          which tokens min-p, top-k and top-p keep     ─► bounds [S]
    _draws      program (row, chunk)   the largest logit + noise of kept tokens     ─► ranks [S, C]
    _tokens     program (row)          the largest of the row's ranks, as a token

The kernels use x = (logit - largest logit of the row) / temperature. As x is never above 0, the bits of |x|, as an
integer, order the tokens, the likeliest first. A row's *bound* is such an integer: tokens up to it are kept. It is the
smallest at which the number of tokens reaches k, or their probability reaches p. A search narrows it down by counting
at several pivots in one pass over the row, as in a search tree (the pivots of FlashInfer's sampling kernels,
https://flashinfer.ai/2025/03/10/sampling.html, without their rejected draws).

A row's chunks and passes are the same in any batch, and so is its token.
"""

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Upper bound on tokens per program: a row of 128k has 32 programs."""
PIVOTS = 8
"""Pivots per pass of a search."""
TILE = 2048
"""Upper bound on the tokens that a pass loads at a time: with 8 pivots and 16 warps, 32 counters per thread."""
EVERYTHING = 0x7F800000
"""The bits of infinity: a bound that keeps all tokens."""
LIKELIEST = -1
"""A bound that keeps no token: the row's token is the one with the largest logit."""
NONE = -(2**63)
"""The rank that stands for no token."""


@triton.jit
def _rank(values, tokens):
    """An integer that is larger for a larger value, and for the earlier token if values are equal. NaN is largest."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _value(rank):
    """The value of a rank; NaN for the rank of a NaN."""
    bits = (rank >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _token(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def _largest_rank(ranks, row, num_chunks, CHUNKS: tl.constexpr, NONE: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(ranks + row * num_chunks + chunks, mask=chunks < num_chunks, other=NONE), 0)


@triton.jit
def _depth(logits, largest, temperature):
    """|x| as an integer."""
    return tl.abs(tl.div_rn(logits - largest, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _maxima_kernel(logits, ranks, logits_stride, vocab_size, CHUNK: tl.constexpr, NONE: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    values = tl.load(logits + row * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    rank = tl.max(tl.where(inside, _rank(values, tokens), NONE), 0)
    tl.store(ranks + row * tl.num_programs(1) + chunk, rank)


@triton.jit
def _tokens_kernel(ranks, token_ids, num_chunks, CHUNKS: tl.constexpr, NONE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(token_ids + row, _token(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE)))


@triton.jit
def _pivots(low, high, is_first, PIVOTS: tl.constexpr):
    """Integers that divide the range above `low` up to `high` evenly; the last is `high`. In the first pass they divide
    the numbers evenly instead, as most integers stand for numbers near 0 or very large, where hardly any token is."""
    steps_P = tl.arange(1, PIVOTS + 1)
    width = high - low
    pivots_P = low + width // PIVOTS * steps_P + width % PIVOTS * steps_P // PIVOTS
    farthest = tl.minimum(high.to(tl.float32, bitcast=True), 32.0)
    even_P = (steps_P.to(tl.float32) * (farthest / PIVOTS)).to(tl.int32, bitcast=True)
    return tl.where(is_first & (steps_P < PIVOTS), even_P, pivots_P)


@triton.jit
def _search(
    row_logits, largest, temperature, vocab_size, wanted, bound,
    BY_MASS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The smallest bound at which the number of tokens reaches `wanted`, or with `BY_MASS` their share of the
    probability of the tokens up to the given bound; or another bound that keeps the same tokens. Never above the given
    bound.

    ::

        tokens by depth      ·  ···  · ··|·    · ·· |·   ·    ·     |
        bounds            -1            low        high           bound
                              not enough             enough

    It ends when all tokens between the two have the same depth: they are kept or masked together.
    """
    low, high = tl.full([], -1, tl.int32), bound
    is_first = tl.full([], True, tl.int1)
    while low < high:
        pivots_P = _pivots(low, high, is_first, PIVOTS)
        counts_NP, masses_NP = tl.zeros([TILE, PIVOTS], tl.int32), tl.zeros([TILE, PIVOTS], tl.float32)
        nearest_N, farthest_N = tl.full([TILE], 0x7FFFFFFF, tl.int32), tl.full([TILE], -1, tl.int32)
        for start in range(0, vocab_size, TILE):
            tokens_N = start + tl.arange(0, TILE)
            inside_N = tokens_N < vocab_size
            logits_N = tl.load(row_logits + tokens_N, mask=inside_N, other=float("-inf")).to(tl.float32)
            depth_N = tl.where(inside_N, _depth(logits_N, largest, temperature), 0x7FFFFFFF)
            between_N = (depth_N > low) & (depth_N <= high)
            nearest_N = tl.minimum(nearest_N, tl.where(between_N, depth_N, 0x7FFFFFFF))
            farthest_N = tl.maximum(farthest_N, tl.where(between_N, depth_N, -1))
            reached_NP = depth_N[:, None] <= pivots_P[None, :]
            if BY_MASS:
                mass_N = tl.exp(-depth_N.to(tl.float32, bitcast=True))
                masses_NP += tl.where(reached_NP, mass_N[:, None], 0.0)
            else:
                counts_NP += reached_NP.to(tl.int32)
        if BY_MASS:
            masses_P = tl.sum(masses_NP, 0)
            wanted = tl.where(is_first, wanted * tl.max(masses_P, 0), wanted)
            enough_P = masses_P >= wanted
        else:
            enough_P = tl.sum(counts_NP, 0) >= wanted
        nearest, farthest = tl.min(nearest_N, 0), tl.max(farthest_N, 0)
        low = tl.maximum(tl.max(tl.where(enough_P, low, pivots_P), 0), tl.minimum(nearest - 1, high))
        high = tl.minimum(tl.min(tl.where(enough_P, pivots_P, high), 0), tl.maximum(farthest, low))
        low = tl.where(nearest >= farthest, high, low)
        is_first = tl.full([], False, tl.int1)
    return high


@triton.jit
def _bounds_kernel(
    logits, ranks, temperature, min_p, top_k, top_p, bounds, logits_stride, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr,
    EVERYTHING: tl.constexpr, LIKELIEST: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest, divisor = _value(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE)), tl.load(temperature + row)
    if (divisor == 0) | (tl.abs(largest) == float("inf")) | (largest != largest):
        tl.store(bounds + row, LIKELIEST)
        return
    bound = tl.full([], EVERYTHING, tl.int32)
    least, number, share = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    row_logits = logits + row * logits_stride
    if least > 0:
        bound = tl.abs(tl.log(least)).to(tl.int32, bitcast=True)
    if number < vocab_size:
        bound = _search(row_logits, largest, divisor, vocab_size, number.to(tl.int32), bound, False, PIVOTS, TILE)
    if share < 1:
        bound = _search(row_logits, largest, divisor, vocab_size, share, bound, True, PIVOTS, TILE)
    tl.store(bounds + row, bound)


@triton.jit
def _gumbel(seed, position, first_token, COUNT: tl.constexpr):
    """The noise of `COUNT` tokens; the first token's id must be a multiple of 4."""
    counters = first_token // 4 + tl.arange(0, COUNT // 4)
    word0, word1, word2, word3 = tl.philox(seed, counters, position.to(tl.uint32), 0, 0)
    words = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    uniform = ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _draws_kernel(
    logits, ranks, temperature, bounds, seeds, positions, draws, logits_stride, vocab_size,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LIKELIEST: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    bound, rank = tl.load(bounds + row), tl.load(ranks + row * num_chunks + chunk)
    if bound != LIKELIEST:
        largest, divisor = _value(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE)), tl.load(temperature + row)
        if _depth(_value(rank), largest, divisor) <= bound:
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = tokens < vocab_size
            values = tl.load(logits + row * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            x = tl.div_rn(values - largest, divisor)
            kept = inside & (tl.abs(x).to(tl.int32, bitcast=True) <= bound)
            scores = x + _gumbel(tl.load(seeds + row), tl.load(positions + row), chunk * CHUNK, CHUNK)
            rank = tl.max(tl.where(kept, _rank(scores, tokens), NONE), 0)
        else:
            rank = tl.full([], NONE, tl.int64)
    tl.store(draws + row * num_chunks + chunk, rank)


@triton.jit
def _noise_kernel(seeds, positions, out, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), chunk * CHUNK, CHUNK)
    tl.store(out + row * vocab_size + tokens, noise, mask=tokens < vocab_size)


def _chunk(vocab_size: int, most: int = CHUNK) -> int:
    power: int = triton.next_power_of_2(vocab_size)
    return min(most, max(16, power))


def _ranks(logits_SV: torch.Tensor) -> torch.Tensor:
    """[S, C] int64: the largest rank of each chunk of each row."""
    rows, vocab_size = logits_SV.shape
    chunk = _chunk(vocab_size)
    ranks_SC = torch.empty(rows, triton.cdiv(vocab_size, chunk), dtype=torch.int64, device=logits_SV.device)
    _maxima_kernel[tuple(ranks_SC.shape)](logits_SV, ranks_SC, logits_SV.stride(0), vocab_size, chunk, NONE)
    return ranks_SC


def _token_ids(ranks_SC: torch.Tensor) -> torch.Tensor:
    rows, num_chunks = ranks_SC.shape
    token_ids_S = ranks_SC.new_empty(rows)
    _tokens_kernel[(rows,)](ranks_SC, token_ids_S, num_chunks, triton.next_power_of_2(num_chunks), NONE, num_warps=1)
    return token_ids_S


def _bounds(
    logits_SV: torch.Tensor,
    ranks_SC: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """[S] int32: the bound of each row."""
    (rows, vocab_size), num_chunks = logits_SV.shape, ranks_SC.shape[1]
    bounds_S = torch.empty(rows, dtype=torch.int32, device=logits_SV.device)
    _bounds_kernel[(rows,)](
        logits_SV, ranks_SC, temperature, min_p, top_k, top_p, bounds_S, logits_SV.stride(0), vocab_size, num_chunks,
        triton.next_power_of_2(num_chunks), PIVOTS, _chunk(vocab_size, TILE), EVERYTHING, LIKELIEST, NONE, num_warps=16,
    )  # fmt: skip
    return bounds_S


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    return _token_ids(_ranks(logits_SV)) if len(logits_SV) else logits_SV.new_empty(0, dtype=torch.int64)


def sample(
    logits_SV: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    rows, vocab_size = logits_SV.shape
    if not rows:
        return logits_SV.new_empty(0, dtype=torch.int64)
    ranks_SC = _ranks(logits_SV)
    bounds_S = _bounds(logits_SV, ranks_SC, temperature, min_p, top_k, top_p)
    draws_SC, num_chunks = torch.empty_like(ranks_SC), ranks_SC.shape[1]
    _draws_kernel[(rows, num_chunks)](
        logits_SV, ranks_SC, temperature, bounds_S, seeds, positions, draws_SC, logits_SV.stride(0), vocab_size,
        _chunk(vocab_size), triton.next_power_of_2(num_chunks), LIKELIEST, NONE, num_warps=8,
    )  # fmt: skip
    return _token_ids(draws_SC)


def kept_logits(
    logits_SV: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """What `sample` adds noise to, [S, V] float32: minus the largest logit, divided by the temperature, and minus
    infinity where masked. The logits are float32 with dense rows; the largest of each is finite, and temperatures are
    above 0."""
    if not len(logits_SV):
        return torch.empty_like(logits_SV)
    bounds_S = _bounds(logits_SV, _ranks(logits_SV), temperature, min_p, top_k, top_p)
    x_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)) / temperature[:, None]
    return x_SV.masked_fill_(x_SV.abs().view(torch.int32) > bounds_S[:, None], float("-inf"))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What `sample` adds to each token's logit, [S, V] float32, finite; for tests."""
    noise_SV = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    if len(seeds):
        chunk = _chunk(vocab_size)
        _noise_kernel[(len(seeds), triton.cdiv(vocab_size, chunk))](
            seeds, positions, noise_SV, vocab_size, chunk, num_warps=8
        )
    return noise_SV
