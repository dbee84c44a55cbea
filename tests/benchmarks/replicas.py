"""Replicas: what the death or removal of one costs its streams, and what each way of routing finds in the caches.

    python tests/benchmarks/replicas.py [--kills N] [--model PATH] [--only kills | removals | roles | routing]

Kills: streams of all kinds on two replicas, one of which is killed at random again and again. Each stream has to get
the tokens of an undisturbed engine; a pause is the time from a kill to the next token of a stream that had to move.

Removals: the same, with `scale` to one replica and back to two in the place of each kill.

Roles: one replica for prefill and one for decode, either of which is killed at random moments, while streams with new
prompts of a dozen blocks come one after the other: most deaths meet blocks on their way.

Routing: users have conversations over a few system prompts on four replicas, each turn with all that was said before.
The oracle has one cache for all: every block that was ever computed, or is about to be, on whatever replica, and
forgets none. Of the tokens that it would find, each policy finds a share. Requests per replica are means over the time
in which there are at least twice as many as replicas, so that all could have some.
"""

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire_engine.replicas.router import block_keys
from quire_engine.structured_outputs_params import StructuredOutputsParams
from tqdm import tqdm

TINYPY = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
CACHE_BYTES = 256 << 20
NUM_STREAMS = 32
NUM_TOKENS = 250
ROLES_PROMPT_TOKENS = 200
ROLES_TOKENS = 24
NUM_REPLICAS = 4
NUM_USERS = 48
NUM_CONVERSATIONS = 3
"""Of each user, one after the other."""
NUM_TURNS = 6
SYSTEM_TOKENS = 160
BLOCK_SIZE = 16


def params_of(number: int, **changes: Any) -> SamplingParams:
    """Greedy, sampled, with penalties, of several sequences, with a grammar."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.8, "n": 2},
        {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex=f"[a-z]{{{150 + number}}}")},
    ]
    kind = kinds[number % len(kinds)]
    return SamplingParams(
        **{
            "max_tokens": NUM_TOKENS, "seed": number, "ignore_eos": "structured_outputs" not in kind,
            "output_kind": RequestOutputKind.DELTA, **kind, **changes,
        }
    )  # fmt: skip


def make(model: Path, **settings: Any) -> AsyncLLM:
    values = {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": CACHE_BYTES, **settings}
    return AsyncLLM(EngineConfig.from_settings(values))


# -- kills and removals ------------------------------------------------------------------------------------------------


class Streams:
    """Streams that go on for ever; each answer is compared with that of an undisturbed engine."""

    def __init__(self, llm: AsyncLLM, prompts: list[list[int]], expected: list[dict[int, list[int]]]) -> None:
        self._llm, self._prompts, self._expected = llm, prompts, expected
        self.last_token_at = [0.0] * NUM_STREAMS
        self.request_ids = [""] * NUM_STREAMS
        self.num_ended = self.num_lost = self.num_different = 0

    async def follow(self, number: int, **changes: Any) -> None:
        """One stream after the other, each with blocks of its own."""
        turn = 0
        while True:
            turn += 1
            request_id = self.request_ids[number] = f"{number}-{turn}"
            tokens: defaultdict[int, list[int]] = defaultdict(list)
            params = params_of(number, cache_salt=request_id, **changes)
            try:
                async for output in self._llm.generate(self._prompts[number], params, request_id):
                    self.last_token_at[number] = time.monotonic()
                    for one in output.outputs:
                        tokens[one.index] += one.token_ids
            except Exception as error:
                print(f"stream {number} was lost: {error}")
                self.num_lost += 1
                continue
            self.num_ended += 1
            self.num_different += tokens != self._expected[number]

    @asynccontextmanager
    async def going_on(self, **changes: Any) -> AsyncIterator[None]:
        """All of them are followed meanwhile."""
        tasks = [asyncio.ensure_future(self.follow(number, **changes)) for number in range(NUM_STREAMS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def of_engine(self, engine: int) -> list[int]:
        """The streams that an engine has."""
        names = {request_id: str(number) for number, request_id in enumerate(self.request_ids)}
        snapshot = await self._llm.snapshot(names)
        return sorted({int(one.label) for one in snapshot.requests if one.engine == engine and one.label})


@asynccontextmanager
async def killed(llm: AsyncLLM, victim: int) -> AsyncIterator[None]:
    """Is entered when its death is seen, and left when it is up again."""
    os.kill(llm.engine_pids[victim], signal.SIGKILL)
    while llm.is_engine_up(victim):
        await asyncio.sleep(0.001)
    yield
    while not llm.is_engine_up(victim):
        await asyncio.sleep(0.01)


@asynccontextmanager
async def removed(llm: AsyncLLM, victim: int) -> AsyncIterator[None]:
    """Is entered when the last one has given up its requests, and left when there is another one."""
    scaling = asyncio.ensure_future(llm.scale(victim))
    while llm.num_replicas > victim:
        await asyncio.sleep(0)
    yield
    await scaling
    await llm.scale(victim + 1)


def undisturbed(model: Path, prompts: list[list[int]], **changes: Any) -> list[dict[int, list[int]]]:
    """The tokens that each stream has to get."""
    offline = LLM(model, dtype="float32", kv_cache_memory_bytes=CACHE_BYTES)
    all_params = [params_of(number, **changes) for number in range(len(prompts))]
    outputs = offline.generate(prompts, all_params, use_tqdm=False)
    offline.shutdown()
    return [{one.index: one.token_ids for one in output.outputs} for output in outputs]


async def strikes(
    model: Path, number: int, strike: Callable[[AsyncLLM, int], AbstractAsyncContextManager[None]], victims: list[int]
) -> None:
    prompts = [[5 + i, 6, 7] for i in range(NUM_STREAMS)]
    expected = undisturbed(model, prompts)
    llm, random = make(model, data_parallel_size=2), Random(1)
    pauses: list[float] = []
    try:
        await llm.start()
        streams = Streams(llm, prompts, expected)
        async with streams.going_on():
            for turn in range(number):
                await asyncio.sleep(random.uniform(0.5, 2.0))
                victim = random.choice(victims)
                while (
                    len(moved := await streams.of_engine(victim)) < NUM_STREAMS // 4
                ):  # one that is new has none at first
                    await asyncio.sleep(0.05)
                struck_at = time.monotonic()
                async with strike(llm, victim):
                    noticed_at, left, own = time.monotonic(), set(moved), []
                    while left:
                        await asyncio.sleep(0.001)
                        for stream in [stream for stream in left if streams.last_token_at[stream] > noticed_at]:
                            left.remove(stream)
                            own.append(streams.last_token_at[stream] - struck_at)
                    is_away = llm.num_replicas < 2 or not llm.is_engine_up(victim)
                pauses += own
                print(
                    f"{turn + 1}: engine {victim} was {strike.__name__}: {len(moved)} streams moved, pause "
                    f"median {statistics.median(own or [0]):.3f} s, longest {max(own, default=0):.3f} s"
                    f"{', before another one was up' if is_away else ''}",
                    flush=True,
                )
    finally:
        llm.shutdown()
    print(
        f"{strike.__name__} {number} times, {streams.num_ended} streams ended: {streams.num_lost} lost, "
        f"{streams.num_different} with "
        f"other tokens; pause median {statistics.median(pauses):.3f} s, "
        f"95% {sorted(pauses)[int(0.95 * len(pauses))]:.3f} s, longest {max(pauses):.3f} s"
    )


# -- roles -------------------------------------------------------------------------------------------------------------


async def roles(model: Path, number: int) -> None:
    """Kill the replica of either role, again and again."""
    random = Random(2)
    prompts = [[random.randrange(5, 4000) for _ in range(ROLES_PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]
    expected = undisturbed(model, prompts, max_tokens=ROLES_TOKENS)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quire-kv-") as folder:
        extra = {"shared_storage_path": folder, "max_bytes": 1 << 30}
        transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
        llm = make(model, disaggregation={"prefill": 1, "decode": 1}, kv_transfer_config=transfer)
        num_killed = Counter[str]()
        try:
            await llm.start()
            streams = Streams(llm, prompts, expected)
            async with streams.going_on(max_tokens=ROLES_TOKENS):
                for _ in tqdm(range(number), unit="kill"):
                    await asyncio.sleep(random.uniform(0.05, 0.5))
                    victim = random.randrange(2)
                    num_killed["decode" if victim else "prefill"] += 1
                    async with killed(llm, victim):
                        pass
        finally:
            llm.shutdown()
    print(
        f"{num_killed['prefill']} kills of the prefill and {num_killed['decode']} of the decode replica, "
        f"{streams.num_ended} streams ended: {streams.num_lost} lost, {streams.num_different} with other tokens"
    )


# -- routing -----------------------------------------------------------------------------------------------------------


class Talks:
    """Conversations with one engine, and what the oracle knows."""

    def __init__(self, llm: AsyncLLM, vocabulary: int) -> None:
        self._llm, self._vocabulary = llm, vocabulary
        self.seen: set[int] = set()
        """Keys of all blocks that any replica has computed, or is about to."""
        self.num_cached = self.num_oracle = self.num_prompt_tokens = 0
        self.time_to_first_token: list[float] = []

    async def use(self, number: int) -> None:
        """All conversations of one user."""
        random = Random(number)
        await asyncio.sleep(random.uniform(0, 2))
        for _ in range(NUM_CONVERSATIONS):
            await self._hold(random.randrange(4), random)

    async def _hold(self, number: int, random: Random) -> None:
        """All turns of one, with this system prompt."""
        system = Random(f"system {number}")
        tokens = [system.randrange(10, self._vocabulary) for _ in range(SYSTEM_TOKENS)]
        for _ in range(NUM_TURNS):
            tokens += [random.randrange(10, self._vocabulary) for _ in range(random.randint(10, 60))]
            keys = block_keys(tokens, BLOCK_SIZE)
            self.num_oracle += BLOCK_SIZE * next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))
            self.seen.update(keys)
            self.num_prompt_tokens += len(tokens)
            params = SamplingParams(max_tokens=random.randint(20, 60), ignore_eos=True, temperature=0.0)
            output = [one async for one in self._llm.generate(list(tokens), params)][-1]
            self.num_cached += output.num_cached_tokens or 0
            if output.metrics is not None and output.metrics.time_to_first_token_seconds is not None:
                self.time_to_first_token.append(output.metrics.time_to_first_token_seconds)
            tokens += output.outputs[0].token_ids
            self.seen.update(block_keys(tokens, BLOCK_SIZE))
            await asyncio.sleep(random.expovariate(2.0))


class Balance:
    """Requests of each replica, by time."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._request_seconds = [0.0] * num_replicas
        self._loaded_seconds = self._seconds = 0.0
        self._uneven_seconds = 0.0
        self._looked_at = time.monotonic()

    def note(self, num_requests: list[int]) -> None:
        """They were so many since the last time."""
        now = time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        self._seconds += seconds
        if sum(num_requests) < 2 * self._num_replicas:
            return
        self._loaded_seconds += seconds
        self._uneven_seconds += seconds * (max(num_requests) * self._num_replicas / sum(num_requests) - 1)
        for index, number in enumerate(num_requests):
            self._request_seconds[index] += number * seconds

    def __str__(self) -> str:
        mean = sum(self._request_seconds) / self._num_replicas
        return (
            f"requests of the busiest replica {max(self._request_seconds) / mean - 1:+.0%} of the mean, of the idlest "
            f"{min(self._request_seconds) / mean - 1:+.0%}, of the busiest of each moment "
            f"{self._uneven_seconds / self._loaded_seconds:+.0%}, {mean / self._loaded_seconds:.1f} on average, in "
            f"{self._loaded_seconds:.1f} of {self._seconds:.1f} s"
        )


async def routing(model: Path, policy: str) -> None:
    llm = make(model, data_parallel_size=NUM_REPLICAS, data_parallel_routing=policy, kv_cache_memory_bytes=64 << 20)
    try:
        await llm.start()
        talks = Talks(llm, 2000)
        balance = Balance(NUM_REPLICAS)
        tasks = [asyncio.ensure_future(talks.use(number)) for number in range(NUM_USERS)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            balance.note([replica.num_live for replica in llm._client.replicas])
        await asyncio.gather(*tasks)
    finally:
        llm.shutdown()
    print(
        f"{policy}: {talks.num_cached} of {talks.num_prompt_tokens} prompt tokens cached, "
        f"{talks.num_cached / talks.num_oracle:.1%} of the oracle's; {balance}; "
        f"time to first token median {1000 * statistics.median(talks.time_to_first_token):.0f} ms",
        flush=True,
    )


def main() -> None:
    """Print it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often an engine is killed, or removed")
    parser.add_argument("--model", type=Path, default=TINYPY, help="a checkpoint folder")
    parser.add_argument("--only", choices=["kills", "removals", "roles", "routing"], help="one of the parts")
    arguments = parser.parse_args()
    if arguments.only in (None, "kills"):
        asyncio.run(strikes(arguments.model, arguments.kills, killed, [0, 1]))
    if arguments.only in (None, "removals"):
        asyncio.run(strikes(arguments.model, arguments.kills, removed, [1]))
    if arguments.only in (None, "roles"):
        asyncio.run(roles(arguments.model, arguments.kills))
    if arguments.only in (None, "routing"):
        for policy in ("prefix", "least_loaded", "round_robin"):
            asyncio.run(routing(arguments.model, policy))


if __name__ == "__main__":
    main()
