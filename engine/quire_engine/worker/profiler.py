"""Profiler: runs the largest possible step, to measure its memory and to warm up every op."""

import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.errors import EngineError
from quire_engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from quire_engine.models.step_context import ContextBuilder
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.cache_allocator import CacheAllocator
from quire_engine.worker.model_runner import ModelRunner

TRIAL_TOKENS = 64
"""Tokens of a step that only shows that the model can be computed."""
SUFFIX_TOKENS = 64
"""Tokens of a suffix after a cached prefix: about the most for which attention keeps partial results in memory."""


class Profiler:
    """Computes steps on a cache of their own, with one layer of each kind: that needs as much memory as all layers in a
    fraction of the time. Kernels in the Triton language are compiled when they are first used (`compiles`)."""

    def __init__(
        self,
        config: EngineCoreConfig,
        runner: ModelRunner,
        caches: CacheAllocator,
        max_model_len: int,
        compiles: bool,
        runs_ahead: bool,
    ) -> None:
        self._config, self._runner, self._caches, self._max_model_len = config, runner, caches, max_model_len
        self._compiles, self._runs_ahead = compiles, runs_ahead
        self.recorded_bytes = 0
        """Memory that recordings of steps take in addition; known after `run`."""

    def run(self) -> None:
        """Compute the steps; nothing is left of their requests and caches.

        Where the size of the cache is set, no kernels are compiled and no checkpoint drafts, nothing depends on their
        memory, and a small step has to do: of a large model's largest one, one layer takes a second.

        If kernels are compiled, the requests also decode, and there is another step of one prompt: the prompts of many
        requests may be so short that they are computed like decodes.
        """
        scheduler, block_size, runner = self._config.scheduler, self._config.cache.block_size, self._runner
        most_tokens = scheduler.max_num_batched_tokens
        if self._config.cache.kv_cache_memory_bytes and not self._compiles and scheduler.draft_checkpoint is None:
            most_tokens = min(most_tokens, TRIAL_TOKENS)
        num_seqs = min(scheduler.max_num_seqs, most_tokens)
        # The same on all ranks, of which one drafts: they compute the same steps.
        max_wanted = 0
        if scheduler.draft_checkpoint is not None:
            max_wanted = min(scheduler.max_draft_tokens, self._max_model_len - 2)
        # The last token that fits into the context is never computed.
        longest = max(self._max_model_len - 1 - max_wanted, 1)
        recordable = runner.model.recordable
        if not (self._compiles or recordable is None or recordable.has_head):
            num_seqs = min(num_seqs, max(most_tokens // longest, 1))  # short prompts are computed in parts
        num_tokens = min(most_tokens // num_seqs, longest)
        num_drafts = min(scheduler.max_num_sampled_rows // num_seqs, num_tokens) - 1
        num_wanted = max(min(max_wanted, self._max_model_len - num_tokens - 1), 0)
        blocks_each = -(-min(num_tokens + 1 + num_wanted, self._max_model_len) // block_size)
        many = [
            self._request(num_tokens, range(i * blocks_each, (i + 1) * blocks_each), f"profile-{i}")
            for i in range(num_seqs)
        ]
        batches, model = [many], runner.model
        if self._compiles:
            num_tokens = min(num_seqs * num_tokens, longest)
            blocks = range(-(-min(num_tokens + 1, self._max_model_len) // block_size))
            batches.append([self._request(num_tokens, blocks)])
        with model.one_layer_of_each_kind():
            # Without attention all requests use one block of states, each as large as thousands of tokens elsewhere.
            is_state_alone = runner.batch.has_states and len(runner.batch.block_tables) == 1
            self._caches.allocate(1 if is_state_alone else num_seqs * blocks_each)
            # For the longest sequences attention keeps partial results in memory; these short ones have none.
            parts = self._plan_longest(num_seqs) if self._compiles else None
            for requests in batches:
                self._compute(requests, *((num_drafts, num_wanted) if requests is many else (0, 0)))
            del parts
        self.recorded_bytes = runner.recorded_bytes
        if runner.drafting is not None:
            self.recorded_bytes += runner.drafting.method.recorded_bytes
        self._caches.allocate(0)

    def _plan_longest(self, num_seqs: int) -> object:
        """Plans of the longest possible sequences, which hold their memory: decodes, and a short suffix."""
        query_lens = torch.ones(num_seqs + 1, dtype=torch.int64)
        query_lens[-1] = min(SUFFIX_TOKENS, self._max_model_len)
        query_start_loc = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0)))
        seq_lens = torch.full_like(query_lens, self._max_model_len)
        table, runner = torch.zeros(num_seqs + 1, 1, dtype=torch.int64), self._runner
        contexts = ContextBuilder(
            runner.model.state_specs, runner.kv_caches, runner.batch.block_tables[:1], runner.batch.block_size
        )
        return contexts.plan([table], query_start_loc, seq_lens)

    def _compute(self, requests: list[NewRequestData], num_drafts: int, num_wanted: int) -> None:
        """Compute the requests' prompts in one step, and if kernels are compiled, one more token in another.

        Each prompt's last `num_drafts` tokens are given as drafts, for more sampled rows, and `num_wanted` are drafted.
        """
        runner = self._runner
        lengths = {request.request_id: request.num_prompt_tokens for request in requests}
        drafts = {}
        if num_drafts:
            drafts = {request_id: [0] * num_drafts for request_id in lengths}
            for request in requests:
                request.num_prompt_tokens -= num_drafts
                del request.token_ids[request.num_prompt_tokens :]
        wanted = dict.fromkeys(lengths, num_wanted) if num_wanted else {}
        output = runner.submit(
            SchedulerOutput(lengths, new_requests=requests, draft_token_ids=drafts, num_drafts_wanted=wanted)
        ).result()
        if wanted and runner.drafting is not None and not output.drafts:
            raise EngineError("no tokens could be drafted in the largest step; the log above says why")
        if self._compiles:
            # For ranks that do not sample; if they run ahead, they have the tokens of requests without drafts.
            token_ids = [] if self._runs_ahead and not drafts else [[0] for _ in requests]
            known = [request.num_prompt_tokens for request in requests]
            columns = CachedRequestData(list(lengths), [[] for _ in requests], known, token_ids)
            runner.submit(SchedulerOutput(dict.fromkeys(lengths, 1), cached_requests=columns)).result()
        for request_id in lengths:
            runner.batch.remove(request_id)

    def _request(self, num_tokens: int, blocks: range, request_id: str = "profile") -> NewRequestData:
        """A prompt in these blocks. All groups of layers use the same ones, and all states one: the results do not
        matter."""
        batch = self._runner.batch
        block_ids = [block for block in blocks for _ in batch.block_tables]
        if batch.has_states:
            num_groups = len(batch.block_tables)
            block_ids[num_groups - 1 :: num_groups] = [0] * len(blocks)
        return NewRequestData(
            request_id=request_id, token_ids=[0] * num_tokens, num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(temperature=1.0, top_p=0.9, seed=0), stop_token_ids=[],
            block_ids=block_ids, num_computed_tokens=0,
        )  # fmt: skip
