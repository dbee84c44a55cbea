"""Whether a request can be served at all by this model and its KV cache."""

import math
from collections.abc import Iterable, Sequence

from quire_engine.errors import RequestError
from quire_engine.messages import EngineCoreReady, EngineCoreRequest, PromptPart
from quire_engine.sampling_params import SamplingParams

MAX_PROMPT_LOGPROBS_ENTRIES = 500_000
"""Upper bound on the prompt log-probabilities of one request: each becomes an object in the caller's process."""


def max_output_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """How many tokens may be generated: `max_tokens`, or fewer if the context ends first."""
    room = max_model_len - num_prompt_tokens
    return room if params.max_tokens is None else min(params.max_tokens, room)


def validate_request(request: EngineCoreRequest, ready: EngineCoreReady, prompt_name: str = "input_ids") -> None:
    """Check what depends on the model; both the frontend and the engine core call this.

    Args:
        request: its parameters are already valid in themselves; `PoolingInfo.resolve` has checked those of pooling.
        ready: the model and its limits.
        prompt_name: the caller's name for the prompt, for the message.

    Raises:
        RequestError: the request could never be served.
    """
    prompt_token_ids, params, pooling_params = (
        request.prompt_token_ids, request.sampling_params, request.options.pooling_params,
    )  # fmt: skip
    pooling, vocab_size, max_model_len = ready.pooling, ready.vocab_size, ready.max_model_len
    if pooling_params is None and not pooling.can_generate:
        raise RequestError("task", f"this model does not generate; it offers {', '.join(pooling.tasks)}")
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError.of(prompt_name, "is empty; it must hold at least one token")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError.of(
            prompt_name, f"holds token id {bad}, which is out of vocabulary; ids must be in [0, {vocab_size})"
        )
    if pooling_params is not None:
        longest = pooling.longest_prompt(max_model_len)
        if num_prompt > longest:
            raise RequestError.of(
                prompt_name,
                f"has {num_prompt} tokens; this model takes at most {longest}: shorten it, or set "
                "truncate_prompt_tokens to -1",
            )
    elif num_prompt >= max_model_len:
        raise RequestError.of(
            prompt_name, f"has {num_prompt} tokens; with max_model_len={max_model_len} it must have fewer than that"
        )
    if params.min_tokens > max_model_len - num_prompt:
        raise RequestError.of(
            "min_tokens",
            f"is {params.min_tokens}; after a prompt of {num_prompt} tokens max_model_len={max_model_len} "
            f"leaves room for {max_model_len - num_prompt}",
        )
    _check_params(params, num_prompt, vocab_size)
    _check_parts(request.prompt_parts, params, num_prompt, ready)
    if params.priority != 0 and ready.scheduling_policy != "priority":
        raise RequestError.of(
            "priority", f"is {params.priority}; it must be 0 unless the engine runs with scheduling_policy 'priority'"
        )
    # The last token's keys and values are never needed, so one token less has to fit.
    num_tokens = num_prompt
    if pooling_params is None:
        num_tokens += max_output_tokens(num_prompt, params, max_model_len) - 1
    if num_tokens > ready.num_kv_cache_tokens:
        name = prompt_name if num_prompt > ready.num_kv_cache_tokens else "max_tokens"
        raise RequestError.because(
            name,
            f"a prompt of {num_prompt} tokens with {num_tokens + 1 - num_prompt} to generate can never fit the "
            f"KV cache of {ready.num_kv_cache_tokens} tokens; shorten it, lower max_tokens, or raise "
            "kv_cache_memory_bytes",
        )


def _check_params(params: SamplingParams, num_prompt: int, vocab_size: int) -> None:
    """Check the size of the prompt's log-probabilities, and that all token ids exist."""
    num_entries = num_prompt * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if num_entries > MAX_PROMPT_LOGPROBS_ENTRIES:
        raise RequestError.of(
            "prompt_logprobs",
            f"is {params.prompt_logprobs}; for a prompt of {num_prompt} tokens these are {num_entries} "
            f"log-probabilities, and it must be at most {MAX_PROMPT_LOGPROBS_ENTRIES}",
        )
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for token_ids in params.bad_words_token_ids:
        _check_token_ids("bad_words", token_ids, vocab_size)


def _check_parts(parts: Sequence[PromptPart], params: SamplingParams, num_prompt: int, ready: EngineCoreReady) -> None:
    """Check that the parts are within the prompt, in order, of the model's sizes, and no longer than a step allows."""
    if parts and params.prompt_logprobs is not None:
        raise RequestError.of(
            "prompt_logprobs", "is given with prompt_embeds or images, whose positions have no token ids"
        )
    end = 0
    for part in parts:
        if part.start < end or part.length < 1 or part.end > num_prompt:
            raise RequestError.because("prompt_embeds", f"rows {part.start} to {part.end} are out of place")
        if part.grid and (len(part.grid) != 3 or min(part.grid) < 1 or math.prod(part.grid) != part.length):
            raise RequestError.because("multi_modal_data", f"a grid of {part.grid} has no {part.length} places")
        if part.grid and not (0 <= part.frame_interval < math.inf and part.position_shift <= 0):
            raise RequestError.because(
                "multi_modal_data",
                f"frames of a video with {part.length} tokens are {part.frame_interval:g} positions "
                "apart, so that its positions would exceed those of its tokens; state a higher fps",
            )
        width = ready.hidden_size * (1 + ready.num_deepstack_layers) if part.grid else ready.hidden_size
        if len(part.tensor) != 4 * part.length * width:
            raise RequestError.because(
                "prompt_embeds", f"{part.length} rows of {width} numbers are expected, not "
                f"{len(part.tensor)} bytes"
            )  # fmt: skip
        if part.is_bidirectional and part.length > ready.max_num_batched_tokens:
            raise RequestError.because(
                "multi_modal_data",
                f"an image has {part.length} tokens, which one step has to compute; with "
                f"max_num_batched_tokens={ready.max_num_batched_tokens} it cannot: use a smaller one, or raise the "
                "setting",
            )
        end = part.end


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError.of(name, f"holds {token_id}; ids must be in [0, {vocab_size})")
