"""CacheLayout: where the layers of a stage keep their keys and values, if they are of several groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_engine.kv_cache import KVCacheGroups
from quire_engine.models.step_context import AttentionSpec

__all__ = ["CacheLayout"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The tensors of a stage's KV cache; see `kv_cache/groups.py`.

    Attributes:
        group_ids: by layer, its group.
        tensor_ids: by layer, the tensors that it uses. No two layers of a group use the same ones.
        tensor_specs: by tensor, the kind of its layers, but for their windows.
    """

    group_ids: list[int]
    tensor_ids: list[int]
    tensor_specs: list[AttentionSpec]

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec], layer_numbers: Sequence[int], groups: KVCacheGroups) -> "CacheLayout":
        """Lay out a stage.

        Args:
            specs: by layer of the stage.
            layer_numbers: of these layers.
            groups: of the whole model.
        """
        group_of = {number: group for group, numbers in enumerate(groups.layers) for number in numbers}
        layout = cls([group_of[number] for number in layer_numbers], [], [])
        shared: dict[tuple[AttentionSpec, int], int] = {}
        num_before: Counter[tuple[AttentionSpec, int]] = Counter()
        for spec, group in zip(specs, layout.group_ids, strict=True):
            shape = replace(spec, window=None)
            place = num_before[shape, group]
            num_before[shape, group] += 1
            if (shape, place) not in shared:
                shared[shape, place] = len(layout.tensor_specs)
                layout.tensor_specs.append(shape)
            layout.tensor_ids.append(shared[shape, place])
        return layout
