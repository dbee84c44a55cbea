"""CacheLayout: where the layers of a stage keep what they keep, and how many blocks of it a number of bytes holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.kv_cache import KVCacheGroups, StateSpec, StateTensor


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The tensors of a stage's KV cache; see `kv_cache/groups.py`.

    Attributes:
        group_ids: by layer, its group.
        tensor_ids: by layer, the index of the tensors that it uses. No two layers of a group use the same ones.
        tensor_specs: by tensor, one of its layers, which all keep the same in it.
    """

    group_ids: list[int]
    tensor_ids: list[int]
    tensor_specs: list[StateSpec]

    @classmethod
    def of(cls, specs: Sequence[StateSpec], layer_numbers: Sequence[int], groups: KVCacheGroups) -> "CacheLayout":
        """Lay out a stage.

        Args:
            specs: by layer of the stage.
            layer_numbers: of these layers.
            groups: of the whole model.
        """
        group_of = {number: group for group, numbers in enumerate(groups.layers) for number in numbers}
        layout = cls([group_of[number] for number in layer_numbers], [], [])
        shared: dict[tuple[tuple[StateTensor, ...], int], int] = {}
        num_before: Counter[tuple[tuple[StateTensor, ...], int]] = Counter()
        for spec, group in zip(specs, layout.group_ids, strict=True):
            tensors = spec.tensors
            place = num_before[tensors, group]
            num_before[tensors, group] += 1
            if (tensors, place) not in shared:
                shared[tensors, place] = len(layout.tensor_specs)
                layout.tensor_specs.append(spec)
            layout.tensor_ids.append(shared[tensors, place])
        return layout


def num_blocks_for(
    *,
    available_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    groups: KVCacheGroups,
) -> int:
    """Blocks that fit, and no more than `max_num_seqs` requests of full length could ever use.

    With several groups of layers a block is one of any of them, so a request needs more of them, which are smaller.

    Raises:
        ValueError: not even one block fits.
    """
    per_request = groups.max_blocks(max_model_len, block_size, max_num_batched_tokens)
    num_blocks = min(available_bytes // bytes_per_block, per_request * max_num_seqs)
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory_bytes: one block of {block_size} tokens takes {bytes_per_block} bytes and only "
            f"{available_bytes} are available; one request of max_model_len={max_model_len} takes "
            f"{per_request * bytes_per_block}"
        )
    return num_blocks
