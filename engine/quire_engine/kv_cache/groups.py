"""KVCacheGroups: which layers keep which tokens, so that layers with a sliding window need not keep them all.

A block of the pool serves one group of layers, and has the same bytes whichever it serves: the i-th layers of all
groups use the same memory, as in Jenga (https://arxiv.org/abs/2503.18292, section 4) and vLLM's hybrid KV cache
manager. With two layers that see everything (F) and four with a window (W)::

    layers     W0  W1  F2  W3  W4  F5        group 0   F2  F5       sees everything
                                             group 1   W0  W3       sees its window
                                             group 2   W1  W4       sees its window
    memory     first tensor: F2, W0, W1      second tensor: F5, W3, W4

A kind's layers are dealt out in turn, so that each stage of a pipeline has about as many of each group.

Layers that keep a state are one group, the last. Its blocks have memory of their own: one is as large as keys and
values of `snapshot_blocks` blocks. A request needs the block that it computes in, and the one with the state after its
last full block of tokens; of earlier ones only *snapshots* are kept, for the prefix cache::

    blocks of tokens        0    1    2    3    4    5    6    7        snapshot_blocks = 4
    blocks of states        ∅    ∅    ∅    s3   ∅    ∅    s6   work     s3: a snapshot; s6: the last full block
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.kv_cache.state import STATE

LARGEST_RATIO = 1.25
"""Largest ratio of the sizes of the largest and the smallest kind at which each kind is one group, padded to the
largest: in groups of the smallest size the larger kinds would be padded to twice that. The number is vLLM's."""
STATES_PER_REQUEST = 3
"""Blocks of states that a request may hold: of its last full block, the one after that, and a third while it goes on
to the next."""


@dataclass(frozen=True, slots=True)
class KVCacheGroups:
    """The groups of a whole model: the scheduler and all ranks have the same.

    Attributes:
        windows: of each group, how many of its last tokens a row sees at most; None if all. Groups that see all come
            first, and that of states last.
        layers: of each group, the numbers of its layers.
        snapshot_blocks: from how many blocks on a snapshot follows the last one; only with states.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, ...], ...] = ()
    snapshot_blocks: int = 0

    @classmethod
    def of(
        cls,
        windows: Sequence[int | None],
        max_model_len: int,
        is_hybrid: bool = True,
        snapshot_blocks: int = 0,
    ) -> "KVCacheGroups":
        """Group a model's layers.

        Args:
            windows: by layer.
            max_model_len: a window of as many tokens sees everything.
            is_hybrid: if not, all layers that have keys and values keep all of them, in one group.
            snapshot_blocks: see above.
        """
        states = tuple(number for number, window in enumerate(windows) if window == STATE)
        kinds: dict[int | None, list[int]] = {}
        for number, window in enumerate(windows):
            is_full = not is_hybrid or window is None or window >= max_model_len
            if window != STATE:
                kinds.setdefault(None if is_full else window, []).append(number)
        if not kinds:
            return cls((STATE,), (states,), snapshot_blocks)
        sizes = [len(numbers) for numbers in kinds.values()]
        size = max(sizes) if max(sizes) <= LARGEST_RATIO * min(sizes) else min(sizes)
        groups = [
            (window, tuple(numbers[start :: -(-len(numbers) // size)]))
            for window, numbers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
            for start in range(-(-len(numbers) // size))
        ]
        if states:
            groups.append((STATE, states))
        return cls(tuple(window for window, _ in groups), tuple(numbers for _, numbers in groups), snapshot_blocks)

    @property
    def num_groups(self) -> int:
        """How many there are."""
        return len(self.windows)

    @property
    def keep_everything(self) -> bool:
        """Whether all layers keep all tokens, in one group."""
        return self.windows == (None,)

    @property
    def has_states(self) -> bool:
        """Whether the last group keeps states."""
        return self.windows[-1] == STATE

    def num_states(self, num_blocks: int, max_num_seqs: int) -> int:
        """Blocks of states beside so many blocks of keys and values; without keys and values, all.

        One snapshot for each `snapshot_blocks` blocks, and two for each request that may run. A cached prefix has no
        more snapshots than that but at the ends of prompts and turns, and two are what a request holds in most steps.

        How much memory each kind needs depends on the lengths of requests, which are unknown at the start. A state and
        keys and values of `snapshot_blocks` blocks take about the same memory, so with equal parts no workload has less
        than half of the requests that the best division for it would hold. If that does not suffice for two of each
        request, states get one part more, as a request without a state cannot run and a shorter prefix can.
        """
        if not self.has_states:
            return 0
        if self.windows == (STATE,):
            return num_blocks
        snapshots = num_blocks // self.snapshot_blocks
        return STATES_PER_REQUEST + snapshots + min(2 * max_num_seqs, snapshots)

    def max_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        """The most blocks that a request of so many tokens ever holds: of a group with a window, those that the tokens
        of one step see. Blocks of states do not count beside others.

        Args:
            num_tokens: of the request.
            block_size: tokens per block.
            max_num_batched_tokens: of a step.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.windows == (STATE,):
            return min(num_blocks, STATES_PER_REQUEST)
        return sum(
            num_blocks
            if window is None
            else min(num_blocks, -(-(window - 1 + max_num_batched_tokens) // block_size) + 1)
            for window in self.windows
            if window != STATE
        )

    def max_tokens(self, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Tokens of the longest request that so many blocks suffice for, in whole blocks.

        Args:
            num_blocks: of the cache.
            block_size: see `max_blocks`, like the next one.
            max_num_batched_tokens: likewise.
            max_model_len: where no layer sees everything, any length may fit: the search ends here.
        """
        lengths = range(max(num_blocks, -(-max_model_len // block_size)) + 1)
        needed = bisect_right(
            lengths, num_blocks, key=lambda n: self.max_blocks(n * block_size, block_size, max_num_batched_tokens)
        )
        return (needed - 1) * block_size


ONE_GROUP = KVCacheGroups((None,))
"""All layers keep all tokens; which layers there are does not matter."""
