"""From logits to token ids in the Triton language, without a sort; see `quire_kernels/sampling.py` for the algorithm.

Six launches for any sampling parameters, with no transfer to the host between them::

    _maxima      program (row, chunk)   the chunk's largest logit and its token        ─► ranks [S, C]
    _histograms  program (row, chunk)   how many of the chunk's tokens are how deep    ─► counts [S, C, BINS]
    _candidates  program (row, chunk)   the depths of those that top-k or top-p can keep  ─► depths [S, V], dense
    _bounds      program (row)          which tokens min-p, top-k and top-p keep       ─► bounds [S]
    _draws       program (row, chunk)   the largest logit + noise of kept tokens       ─► ranks [S, C]
    _tokens      program (row)          the largest of the row's ranks, as a token

The kernels use x = (logit - largest logit of the row) / temperature. As x is never above 0, the bits of |x|, a token's
*depth*, order the tokens as integers, the likeliest first. A row's *bound* is a depth: tokens up to it are kept. It is
the smallest at which the number of tokens reaches k, or their probability reaches p. A search narrows it down by
counting at several pivots in one pass, as in a search tree (the pivots of FlashInfer's sampling kernels,
https://flashinfer.ai/2025/03/10/sampling.html, without their rejected draws). One program searches a row; of a
vocabulary of 128k it looks only at the candidates, which the histogram tells from the rest by whole bins.

A row's chunks and passes are the same in any batch, and so is its token.
"""

import functools

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Upper bound on tokens per program: a row of 128k has 32 programs."""
PIVOTS = 8
"""Pivots per pass of a search."""
TILE = 2048
"""Upper bound on the tokens that a pass loads at a time: with 8 pivots and 16 warps, 32 counters per thread."""
BINS = 256
"""Of a histogram, `BINS_EACH` for every 1 of |x|; the last one takes all that are deeper."""
BINS_EACH = 8
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
    depths, num_depths, wanted, bound, BY_MASS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The smallest bound at which the number of tokens reaches `wanted`, or with `BY_MASS` their sum of exponentials;
    or another bound that keeps the same tokens. Never above the given bound.

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
        for start in range(0, num_depths, TILE):
            places_N = start + tl.arange(0, TILE)
            depth_N = tl.load(depths + places_N, mask=places_N < num_depths, other=0x7FFFFFFF)
            between_N = (depth_N > low) & (depth_N <= high)
            nearest_N = tl.minimum(nearest_N, tl.where(between_N, depth_N, 0x7FFFFFFF))
            farthest_N = tl.maximum(farthest_N, tl.where(between_N, depth_N, -1))
            reached_NP = depth_N[:, None] <= pivots_P[None, :]
            if BY_MASS:
                mass_N = _mass(depth_N)
                masses_NP += tl.where(reached_NP, mass_N[:, None], 0.0)
            else:
                counts_NP += reached_NP.to(tl.int32)
        enough_P = tl.sum(masses_NP, 0) >= wanted if BY_MASS else tl.sum(counts_NP, 0) >= wanted
        nearest, farthest = tl.min(nearest_N, 0), tl.max(farthest_N, 0)
        low = tl.maximum(tl.max(tl.where(enough_P, low, pivots_P), 0), tl.minimum(nearest - 1, high))
        high = tl.minimum(tl.min(tl.where(enough_P, pivots_P, high), 0), tl.maximum(farthest, low))
        low = tl.where(nearest >= farthest, high, low)
        is_first = tl.full([], False, tl.int1)
    return high


@triton.jit
def _total_mass(depths, num_depths, bound, TILE: tl.constexpr):
    """The sum of exponentials of the tokens up to a bound."""
    masses_N = tl.zeros([TILE], tl.float32)
    for start in range(0, num_depths, TILE):
        places_N = start + tl.arange(0, TILE)
        depth_N = tl.load(depths + places_N, mask=places_N < num_depths, other=0x7FFFFFFF)
        masses_N += tl.where(depth_N <= bound, _mass(depth_N), 0.0)
    return tl.sum(masses_N, 0)


@triton.jit
def _mass(depth):
    return tl.exp(-depth.to(tl.float32, bitcast=True))


@triton.jit
def _is_certain(largest, temperature):
    """Whether the row's token is the one with the largest logit, whatever the other parameters are."""
    return (temperature == 0) | (tl.abs(largest) == float("inf")) | (largest != largest)


@triton.jit
def _bound_of_min_p(least, EVERYTHING: tl.constexpr):
    bound = tl.abs(tl.log(tl.where(least > 0, least, 1.0))).to(tl.int32, bitcast=True)
    return tl.where(least > 0, bound, EVERYTHING)


@triton.jit
def _bin(depth, BINS: tl.constexpr, BINS_EACH: tl.constexpr):
    return tl.minimum(depth.to(tl.float32, bitcast=True) * BINS_EACH, BINS - 1).to(tl.int32)


@triton.jit
def _depths_of_chunk(logits, largest, temperature, logits_stride, vocab_size, CHUNK: tl.constexpr):
    """Which of the program's tokens there are, and their depths."""
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row_logits = logits + tl.program_id(0).to(tl.int64) * logits_stride
    values = tl.load(row_logits + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    return tokens < vocab_size, _depth(values, largest, temperature)


@triton.jit
def _histograms_kernel(
    logits, ranks, temperature, top_k, top_p, counts, logits_stride, vocab_size,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, BINS_EACH: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if (tl.load(top_k + row) >= vocab_size) & (tl.load(top_p + row) >= 1):
        return
    largest, divisor = _value(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE)), tl.load(temperature + row)
    if _is_certain(largest, divisor):
        return
    inside, depth = _depths_of_chunk(logits, largest, divisor, logits_stride, vocab_size, CHUNK)
    counts_B = tl.histogram(_bin(depth, BINS, BINS_EACH), BINS, mask=inside)
    tl.store(counts + (row * num_chunks + chunk) * BINS + tl.arange(0, BINS), counts_B)


@triton.jit
def _last_bin(counts_B, least, number, share, vocab_size, BINS: tl.constexpr, BINS_EACH: tl.constexpr):
    """The bin of the deepest token that may be kept, or a later one.

    Top-k ends where the count reaches k. Top-p ends at the latest where, with all tokens before it as deep as their
    bins allow and all after it as shallow, (1 - p) · mass before >= p · mass after. Top-p takes its share of what top-k
    keeps, so beside top-k it may end earlier, but its whole has to be known: then top-k alone counts.
    """
    bins_B = tl.arange(0, BINS)
    if number < vocab_size:
        last = tl.sum((tl.cumsum(counts_B, 0) < number).to(tl.int32), 0)
    else:
        most_B = counts_B * tl.exp(bins_B * (-1.0 / BINS_EACH))
        least_B = tl.where(bins_B < BINS - 1, counts_B * tl.exp((bins_B + 1) * (-1.0 / BINS_EACH)), 0.0)
        after_B = tl.sum(most_B, 0) * (1 + 1e-6) - tl.cumsum(most_B, 0)
        last = tl.sum((tl.cumsum(least_B, 0) * (1 - share) < after_B * share).to(tl.int32), 0)
    depth = _bound_of_min_p(least, 0x7F800000)
    return tl.minimum(tl.minimum(last, BINS - 1), _bin(depth, BINS, BINS_EACH))


@triton.jit
def _candidates_kernel(
    logits, ranks, temperature, min_p, top_k, top_p, counts, depths, sizes, edges, masses, logits_stride, vocab_size,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, BINS_EACH: tl.constexpr,
    EVERYTHING: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Also, for `_bounds_kernel`: how many candidates there are, the depth where they end, and the sum of exponentials
    of all of the chunk's tokens that min-p keeps."""
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    least, number, share = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    if (number >= vocab_size) & (share >= 1):
        return
    largest, divisor = _value(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE)), tl.load(temperature + row)
    if _is_certain(largest, divisor):
        return
    chunks_C, bins_B = tl.arange(0, CHUNKS), tl.arange(0, BINS)
    counts_CB = tl.load(
        counts + (row * num_chunks + chunks_C[:, None]) * BINS + bins_B[None, :],
        mask=chunks_C[:, None] < num_chunks, other=0,
    )  # fmt: skip
    last = _last_bin(tl.sum(counts_CB, 0), least, number, share, vocab_size, BINS, BINS_EACH)
    sizes_C = tl.sum(tl.where(bins_B[None, :] <= last, counts_CB, 0), 1)
    if chunk == 0:
        edge = ((last + 1).to(tl.float32) / BINS_EACH).to(tl.int32, bitcast=True)
        tl.store(edges + row, tl.where(last < BINS - 1, edge, EVERYTHING))
        tl.store(sizes + row, tl.sum(sizes_C, 0))
    inside, depth = _depths_of_chunk(logits, largest, divisor, logits_stride, vocab_size, CHUNK)
    is_candidate = inside & (_bin(depth, BINS, BINS_EACH) <= last)
    places = tl.sum(tl.where(chunks_C < chunk, sizes_C, 0), 0) + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    tl.store(depths + row * vocab_size + places, depth, mask=is_candidate)
    kept = inside & (depth <= _bound_of_min_p(least, EVERYTHING))
    tl.store(masses + row * num_chunks + chunk, tl.sum(tl.where(kept, _mass(depth), 0.0), 0))


@triton.jit
def _bounds_kernel(
    ranks, temperature, min_p, top_k, top_p, depths, sizes, edges, masses, bounds, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr,
    EVERYTHING: tl.constexpr, LIKELIEST: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = _value(_largest_rank(ranks, row, num_chunks, CHUNKS, NONE))
    if _is_certain(largest, tl.load(temperature + row)):
        tl.store(bounds + row, LIKELIEST)
        return
    number, share = tl.load(top_k + row), tl.load(top_p + row)
    bound = _bound_of_min_p(tl.load(min_p + row), EVERYTHING)
    if (number < vocab_size) | (share < 1):
        depths += row * vocab_size
        num_depths, bound = tl.load(sizes + row), tl.minimum(bound, tl.load(edges + row))
        chunks_C = tl.arange(0, CHUNKS)
        mass = tl.sum(tl.load(masses + row * num_chunks + chunks_C, mask=chunks_C < num_chunks, other=0.0), 0)
        if number < vocab_size:
            bound = _search(depths, num_depths, number.to(tl.int32), bound, False, PIVOTS, TILE)
            mass = _total_mass(depths, num_depths, bound, TILE)
        if share < 1:
            bound = _search(depths, num_depths, share * mass, bound, True, PIVOTS, TILE)
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
    chunk, chunks = _chunk(vocab_size), triton.next_power_of_2(num_chunks)
    integers = functools.partial(torch.empty, dtype=torch.int32, device=logits_SV.device)
    counts_SCB, depths_SV = integers(rows, num_chunks, BINS), integers(rows, vocab_size)
    sizes_S, edges_S, bounds_S = integers(rows), integers(rows), integers(rows)
    masses_SC = torch.empty_like(ranks_SC, dtype=torch.float32)
    of_rows = (logits_SV, ranks_SC, temperature)
    bins = (logits_SV.stride(0), vocab_size, chunk, chunks, BINS, BINS_EACH)
    _histograms_kernel[(rows, num_chunks)](*of_rows, top_k, top_p, counts_SCB, *bins, NONE, num_warps=8)
    found = (depths_SV, sizes_S, edges_S, masses_SC)
    _candidates_kernel[(rows, num_chunks)](
        *of_rows, min_p, top_k, top_p, counts_SCB, *found, *bins, EVERYTHING, NONE, num_warps=8
    )
    _bounds_kernel[(rows,)](
        ranks_SC, temperature, min_p, top_k, top_p, *found, bounds_S, vocab_size, num_chunks,
        chunks, PIVOTS, _chunk(vocab_size, TILE), EVERYTHING, LIKELIEST, NONE, num_warps=16,
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
