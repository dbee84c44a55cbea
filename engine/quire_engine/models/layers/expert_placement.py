"""Which rank computes which expert: at the start, in a way that is better for a load, and how to get there.

A placement is a list: by *physical* expert, the *logical* one, the model's own, that it is. Physical experts are
divided evenly among the ranks of a stage, in order::

    rank 0    rank 1    rank 2
    0 1 2 3   4 5 6 7   8 9 0 1      10 logical experts, 2 redundant ones: the placement at the start

`balanced` is the algorithm of DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB; DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 3.4), its global policy; its hierarchical one keeps what a token needs on one
machine, and these ranks are on one. Knows no weights.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire_engine.distributed import ParallelState
from quire_engine.models.layers.experts import experts_of_rank
from quire_engine.models.layers.parallel import stage_layers

FloatArray: TypeAlias = npt.NDArray[np.float64]


def shares_of_ranks(
    shape: tuple[int, int],
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    enable_expert_parallel: bool,
    num_replicas: int = 1,
) -> FloatArray:
    """[layers, experts, ranks], the share of an expert's tokens that a rank computes, or computes a slice of.

    Args:
        shape: layers and experts.
        tensor_parallel_size: ranks of a stage.
        pipeline_parallel_size: stages.
        enable_expert_parallel: an expert is on one rank of its stage; else each has a slice of it.
        num_replicas: engines that share the experts; the ranks are those of all, engine by engine.
    """
    world_size = tensor_parallel_size * pipeline_parallel_size
    shares = np.zeros((*shape, num_replicas * world_size))
    for number in range(num_replicas * world_size):
        replica, rank = divmod(number, world_size)
        state = ParallelState(
            rank=rank,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            expert_replica=replica,
            num_expert_replicas=num_replicas,
        )
        layers, experts = stage_layers(shape[0], state), list(experts_of_rank(shape[1], state))
        shares[layers.start : layers.stop, experts, number] = 1
    return shares


def check_redundancy(num_experts: int, num_redundant_experts: int, num_ranks: int) -> None:
    """Raise ValueError unless all ranks can hold equally many experts, each of them another one at the start."""
    most = num_experts * (num_ranks - 1)
    if (num_experts + num_redundant_experts) % num_ranks or num_redundant_experts > most:
        right = [number for number in range(min(most, 4 * num_ranks) + 1) if (num_experts + number) % num_ranks == 0]
        raise ValueError(
            f"eplb_config: num_redundant_experts is {num_redundant_experts}; together with the model's {num_experts} "
            f"experts it must be a multiple of tensor_parallel_size={num_ranks}, and at most {most}: such as "
            f"{' or '.join(map(str, right[:4]))}"
        )


def first_placement(num_experts: int, num_redundant_experts: int) -> list[int]:
    """Every expert once, and then replicas of the first."""
    return [number % num_experts for number in range(num_experts + num_redundant_experts)]


def rank_shares(placement: Sequence[int], num_experts: int, num_ranks: int) -> FloatArray:
    """[experts, ranks], the share of an expert's tokens that a rank computes: its replicas get equally many."""
    shares = np.zeros((num_experts, num_ranks))
    each, replicas = len(placement) // num_ranks, Counter(placement)
    for physical, logical in enumerate(placement):
        shares[logical, physical // each] += 1 / replicas[logical]
    return shares


def balanced(load_X: Sequence[float], placement: Sequence[int], num_ranks: int) -> list[int]:
    """A placement that divides a load, by logical expert, evenly among the ranks.

    1. Each further replica goes to the expert with the largest load per replica.
    2. Replicas, those with the largest load first, go to the rank with the least load that has room; of several such,
       to one that has no other replica of the expert.
    3. What a rank has already stays where it is; ranks get the contents that they have most of.
    """
    each = len(placement) // num_ranks
    replicas = [1] * len(load_X)
    for _ in range(len(placement) - len(load_X)):
        replicas[max(range(len(load_X)), key=lambda expert: (load_X[expert] / replicas[expert], -expert))] += 1
    items = sorted(
        (expert for expert, number in enumerate(replicas) for _ in range(number)),
        key=lambda expert: -load_X[expert] / replicas[expert],
    )
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in items:
        open_packs = [i for i in range(num_ranks) if len(packs[i]) < each]
        pack = min(open_packs, key=lambda i: (loads[i], expert in packs[i], i))
        packs[pack].append(expert)
        loads[pack] += load_X[expert] / replicas[expert]
    return _like(placement, packs)


def _like(placement: Sequence[int], packs: list[list[int]]) -> list[int]:
    """Physical experts with these contents of the ranks, in any order, that differ little from the present ones."""
    each = len(placement) // len(packs)
    present = [Counter(placement[i : i + each]) for i in range(0, len(placement), each)]
    contents = [Counter(pack) for pack in packs]
    pairs = [
        (-(has & gets).total(), rank, pack) for rank, has in enumerate(present) for pack, gets in enumerate(contents)
    ]
    pack_of: dict[int, int] = {}
    for _, rank, pack in sorted(pairs):
        if rank not in pack_of and pack not in pack_of.values():
            pack_of[rank] = pack
    result = []
    for rank in range(len(packs)):
        left, own = contents[pack_of[rank]], list(placement[rank * each : (rank + 1) * each])
        stays = []
        for logical in own:
            stays.append(left[logical] > 0)
            left[logical] -= stays[-1]
        new = iter(sorted(left.elements()))
        result += [logical if kept else next(new) for logical, kept in zip(own, stays, strict=True)]
    return result


def next_moves(
    placement: Sequence[int], target: Sequence[int], num_ranks: int, limit: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Some steps from a placement to another. After them there still is a replica of every expert.

    Args:
        placement: the present one.
        target: the other.
        num_ranks: that they are divided among.
        limit: of moves, at least 2.

    Returns:
        The placement then, and the moves to it: (physical expert, the one whose weights it gets), all to be made at
            once. As many as the limit allows, and none when the target is reached.
    """
    now, each = list(placement), len(placement) // num_ranks
    changed: set[int] = set()
    while True:
        wrong = [physical for physical, logical in enumerate(target) if now[physical] != logical]
        replicas = Counter(now)
        spare = next((physical for physical in wrong if replicas[now[physical]] > 1), None)
        if not wrong or len(changed) + (1 if spare is not None else 2) > limit:
            break
        if spare is not None:
            now[spare] = target[spare]
            changed.add(spare)
            continue
        # Nothing can be overwritten: two change places, so that one of them is right.
        first = wrong[0]
        other = now.index(target[first])
        now[first], now[other] = now[other], now[first]
        changed |= {first, other}
    moves = []
    for physical in sorted(changed):
        if now[physical] != placement[physical]:
            sources = [source for source, logical in enumerate(placement) if logical == now[physical]]
            moves.append((physical, min(sources, key=lambda source: (source // each != physical // each, source))))
    return now, moves
