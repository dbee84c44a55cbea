"""Router: which replica gets a request. It knows no process and no socket: it counts requests and outputs.

Every count is exact, as all requests and all outputs pass through: a request is *waiting* until its first token, and
*running* until its end. A request goes to the replica of the lowest cost, by the policy (`data_parallel_routing`):

* `prefix`: the prompt tokens that would have to be computed there, `COMPUTING` times (less where others share them),
  and the work that is queued there: such tokens of the requests that wait, and `TOKENS_PER_REQUEST` per request.
* `least_loaded`: vLLM's, four for each waiting request and one for each running one.
* `round_robin`: each in turn.

A replica that has neither loaded the request's LoRA adapter nor is about to costs more, but in turn.

Where costs are equal, the replica with more of the prompt gets it, then the one with fewer requests, then the first.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire_engine.kv_cache.events import FILED, RESET, event_key, read_events
from quire_engine.kv_cache.hashing import extend_block_hashes
from quire_engine.messages import EngineCoreOutputs, PromptPart

COMPUTING = 2
"""How much more a computed token counts than a queued one: it delays all requests there. So requests that come with the
same prompt at the same time go where it is being computed, and it is not computed twice."""
SHARED = 0.5
"""A block that k live requests have in their prompts counts 1 / (1 + k * this): another copy serves the requests that
follow there. Without it, a replica that lacks a prefix which all requests share may stay idle."""
TOKENS_PER_REQUEST = 20
"""The cost of a live request there, in tokens. A larger number balances better, and loses hits of the prefix cache:
`docs/benchmarks/2026-11-24.md` has the simulation."""
ADAPTER_TOKENS = 400
"""The cost of loading a LoRA adapter, in tokens: another one may have to make room for it, and comes back later."""
ADAPTER_REQUESTS = 4
"""The same for `least_loaded`: as much as a waiting request."""
STALLED_SECONDS = 1.0
"""A replica that has work and has sent no message for so long gets no more requests where there is another."""
STALLED_STEPS = 4.0
"""Nor does it count as stalled before so many times its slowest recent step."""
_STEP_DECAY = 0.95


Key = TypeVar("Key", int, str)


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None = None,
    prompt_parts: Sequence[PromptPart] = (),
    adapter: str | None = None,
) -> list[int]:
    """A key for each full block that a prefix cache may hold of these tokens; the last token is always computed."""
    hashes: list[bytes] = []
    num_blocks = (len(token_ids) - 1) // block_size
    extend_block_hashes(hashes, token_ids, block_size, num_blocks, cache_salt, adapter, prompt_parts)
    return [event_key(block_hash) for block_hash in hashes]


def forget(counts: Counter[Key], keys: Sequence[Key]) -> None:
    """Count each key once less; a key with a count of 0 takes no room."""
    for key in keys:
        if counts[key] > 1:
            counts[key] -= 1
        else:
            del counts[key]


class PrefixIndex:
    """Which blocks a replica has cached, as far as the frontend can know. A block counts as cached there when

    * the replica has said so, and has not said since that it was evicted (`CacheEvents`, with every message of its);
    * a live request that was sent there has it in its prompt: it is filed by the time that another request needs it.

    It knows the first 63 bits of a hash. A collision makes a routing decision worse, and no answer wrong.
    """

    def __init__(self) -> None:
        self._filed: set[int] = set()
        self._expected: Counter[int] = Counter()

    def apply(self, packed_events: bytes) -> None:
        """Take in what has changed in the replica's cache."""
        filed = self._filed
        for word in read_events(packed_events):
            if word & FILED:
                filed.add(word)
            elif word == RESET:
                filed.clear()
            else:
                filed.discard(word | FILED)

    def expect(self, keys: Sequence[int]) -> None:
        """Count the blocks of a request that is sent there."""
        self._expected.update(keys)

    def forget(self, keys: Sequence[int]) -> None:
        """Count them no longer: the request has ended, or was moved."""
        forget(self._expected, keys)

    def num_cached(self, keys: Sequence[int]) -> int:
        """Leading blocks that are cached there, or about to be."""
        filed, expected = self._filed, self._expected
        return next((i for i, key in enumerate(keys) if key not in filed and key not in expected), len(keys))

    def clear(self) -> None:
        """Forget what the replica has filed: its engine has died."""
        self._filed.clear()


@dataclass(slots=True)
class _Route:
    replica: int
    keys: list[int]
    num_uncached_tokens: int
    adapter: str | None
    has_token: bool = False


class _Load:
    def __init__(self, now: float) -> None:
        self.index = PrefixIndex()
        self.adapters: set[str] = set()
        """Digests of those that it has loaded."""
        self.expected_adapters: Counter[str] = Counter()
        """Those of its live requests."""
        self.num_waiting = 0
        self.num_running = 0
        self.num_queued_tokens = 0
        """Prompt tokens of the waiting ones that are not cached."""
        self.moved_at = now
        """When it sent its last message, or got a request while it had none."""
        self.slowest_step = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running


class Router:
    """Chooses, and counts.

    Args:
        policy: as in the setting `data_parallel_routing`.
        num_replicas: how many there are.
        block_size: of the KV cache; 0 if nothing is cached.
        clock: seconds, monotonic.
    """

    def __init__(
        self, policy: str, num_replicas: int, block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._block_size = block_size if policy == "prefix" else 0
        self._clock = clock
        self._loads = [_Load(clock()) for _ in range(num_replicas)]
        self._routes: dict[str, _Route] = {}
        self._next = 0
        self._num_users: Counter[int] = Counter()
        """By the key of a block, how many live requests have it in their prompts."""

    def resize(self, num_replicas: int) -> None:
        """Replicas were added, which are empty, or removed from the end, whose requests are elsewhere or have ended."""
        del self._loads[num_replicas:]
        self._loads += [_Load(self._clock()) for _ in range(num_replicas - len(self._loads))]

    def replica_left(self, replica: int) -> None:
        """Keep the rank; mark it empty. The requests of the replica are elsewhere, or have ended."""
        for request_id in [one for one, route in self._routes.items() if route.replica == replica]:
            self.remove(request_id)
        self._loads[replica] = _Load(self._clock())

    def replica_of(self, request_id: str) -> int | None:
        """Where a live request is."""
        route = self._routes.get(request_id)
        return None if route is None else route.replica

    def num_requests(self, replica: int) -> int:
        """Live requests there."""
        return self._loads[replica].num_requests

    def route(
        self,
        request_id: str,
        token_ids: Sequence[int],
        candidates: Sequence[int],
        *,
        cache_salt: str | None = None,
        reads_cache: bool = True,
        prompt_parts: Sequence[PromptPart] = (),
        adapter: str | None = None,
    ) -> int:
        """Choose a replica for a request, and count it there; one that another replica has is moved.

        Args:
            request_id: its id.
            token_ids: what has to be computed or cached before its next token.
            candidates: the replicas that may get it, in order.
            cache_salt: of its sampling parameters.
            reads_cache: whether it uses cached blocks.
            prompt_parts: of its prompt.
            adapter: the digest of its LoRA adapter.
        """
        self.remove(request_id)
        keys = block_keys(token_ids, self._block_size, cache_salt, prompt_parts, adapter) if self._block_size else []
        weights = [1 / (1 + SHARED * self._num_users[key]) for key in keys]
        costs = []
        for replica in candidates:
            load = self._loads[replica]
            num_blocks = load.index.num_cached(keys) if reads_cache else 0
            num_uncached = len(token_ids) - num_blocks * self._block_size
            weighted = self._block_size * sum(weights[num_blocks:]) + len(token_ids) - len(keys) * self._block_size
            has_adapter = adapter is None or adapter in load.adapters or adapter in load.expected_adapters
            costs.append((self._cost(replica, weighted, has_adapter), num_uncached, load.num_requests, replica))
        _, num_uncached, _, chosen = min(costs)
        self._num_users.update(keys)
        self._next = chosen + 1
        load = self._loads[chosen]
        if not load.num_requests:
            load.moved_at = self._clock()
        load.num_waiting += 1
        load.num_queued_tokens += num_uncached
        load.index.expect(keys)
        if adapter is not None:
            load.expected_adapters[adapter] += 1
        self._routes[request_id] = _Route(chosen, keys, num_uncached, adapter)
        return chosen

    def remove(self, request_id: str) -> int | None:
        """Count a request no longer: it has ended. Returns where it was; None if it is unknown."""
        route = self._routes.pop(request_id, None)
        if route is None:
            return None
        load = self._loads[route.replica]
        if route.has_token:
            load.num_running -= 1
        else:
            load.num_waiting -= 1
            load.num_queued_tokens -= route.num_uncached_tokens
        load.index.forget(route.keys)
        if route.adapter is not None:
            forget(load.expected_adapters, [route.adapter])
        forget(self._num_users, route.keys)
        return route.replica

    def note_outputs(self, replica: int, outputs: EngineCoreOutputs) -> None:
        """Count the outputs of a replica."""
        load = self._loads[replica]
        load.moved_at = self._clock()
        if outputs.cache_events:
            load.index.apply(outputs.cache_events)
        if outputs.scheduler_stats is not None and outputs.scheduler_stats.adapters is not None:
            load.adapters = set(outputs.scheduler_stats.adapters.ready)
        if (step := outputs.step_stats) is not None:
            seconds = step.schedule_seconds + step.execute_seconds + step.update_seconds
            load.slowest_step = max(seconds, load.slowest_step * _STEP_DECAY)
        for output in outputs.outputs:
            route = self._routes.get(output.request_id)
            if route is None or route.replica != replica:
                continue
            if not route.has_token and output.new_token_ids:
                route.has_token = True
                load.num_waiting -= 1
                load.num_running += 1
                load.num_queued_tokens -= route.num_uncached_tokens
            if output.finish_reason is not None:
                self.remove(output.request_id)

    def replica_died(self, replica: int) -> None:
        """Forget what a replica had cached and loaded."""
        self._loads[replica].index.clear()
        self._loads[replica].adapters.clear()

    def is_stalled(self, replica: int) -> bool:
        """Whether a replica has work, and has sent nothing for a while."""
        load = self._loads[replica]
        limit = max(STALLED_SECONDS, STALLED_STEPS * load.slowest_step)
        return load.num_requests > 0 and self._clock() - load.moved_at > limit

    def _cost(self, replica: int, num_uncached_tokens: float, has_adapter: bool) -> float:
        load = self._loads[replica]
        if self._policy == "prefix":
            work = COMPUTING * num_uncached_tokens + load.num_queued_tokens + TOKENS_PER_REQUEST * load.num_requests
            return work + (0 if has_adapter else ADAPTER_TOKENS)
        if self._policy == "least_loaded":
            return 4 * load.num_waiting + load.num_running + (0 if has_adapter else ADAPTER_REQUESTS)
        return (replica - self._next) % len(self._loads)
