"""InputProcessor: a prompt in any form → validated token ids and prompt parts. Thread-safe."""

import hashlib
import math
import operator
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from quire_engine.encoders.embeds import ImageEmbeds, float_rows, read_embeds
from quire_engine.encoders.image_encoder import ImageEncoder
from quire_engine.encoders.video import named, read_videos
from quire_engine.errors import RequestError
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.conversation_renderer import ConversationRenderer
from quire_engine.frontend.tokenizer import AnyTokenizer, TokenDecoder
from quire_engine.frontend.tokenizer_limits import LimitedEncoder, characters_per_token
from quire_engine.messages import EngineCoreReady, EngineCoreRequest, PromptPart
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.scheduler.validation import validate_request
from quire_engine.slo import DEFAULT_CLASS, NO_TARGETS, SLOTargets, resolve

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}`, `{"prompt": text, "pair": text}`, `{"prompt_token_ids": ids}` or
`{"prompt_embeds": tensor}`. Beside a text or token ids, `"multi_modal_data": {"image": image or list}` has an image for
each placeholder in it: the bytes of a file, an image of Pillow, an array [height, width, 3] of uint8, or its hidden
states: a tensor of floats [tokens, hidden_size], or `{"image_embeds": tensor}` with what says how large the image is.
`"video"` is the same of videos: a list of such frames, an array [frames, height, width, 3], or the bytes of an
animation; or a tuple of one of these and `{"fps": frames per second}`.

A pair is two texts that are scored or classified together, as the tokenizer encodes pairs.

`prompt_embeds` are hidden states that replace the embeddings of tokens in the first layer: a torch tensor or numpy
array of floats, [tokens, hidden_size], as `get_input_embeddings()` of transformers' model returns them; for Granite,
multiply by `embedding_multiplier`.
"""

MAX_DEADLINE_MS = 365 * 86_400_000.0
"""A year: later deadlines are ignored."""
NOT_SAMPLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""The sampling parameters of requests that are pooled."""


class InputProcessor:
    """Tokenizes and validates.

    Args:
        tokenizer: the checkpoint's.
        ready: the engine core's first message.
        slo_classes: the setting `slo`.
        images: encodes those of prompts; or why they may have none.
    """

    def __init__(
        self,
        tokenizer: "AnyTokenizer",
        ready: EngineCoreReady,
        slo_classes: Mapping[str, SLOTargets] | None = None,
        images: ImageEncoder | str = "this model takes text alone",
    ) -> None:
        self.tokenizer, self.images = tokenizer, None if isinstance(images, str) else images
        self._why_no_images = images if isinstance(images, str) else ""
        self._slo_classes = slo_classes or {DEFAULT_CLASS: NO_TARGETS}
        self._ready = ready
        self._resolve_pooling = lru_cache(maxsize=16)(ready.pooling.resolve)
        eos = tokenizer.eos_token_id
        is_new = eos is not None and eos < ready.vocab_size and eos not in ready.eos_token_ids
        self._eos_token_id = eos if is_new else None
        self._decoder = TokenDecoder(tokenizer)
        self._encoder = LimitedEncoder(tokenizer)
        self._has_segments = "token_type_ids" in getattr(tokenizer, "model_input_names", ())
        self._max_characters = characters_per_token(tokenizer) * ready.max_model_len
        placeholders = {} if self.images is None else self.images.placeholders
        self._conversations = ConversationRenderer(
            tokenizer, placeholders, self._why_no_images, max_model_len=ready.max_model_len,
            max_characters=self._max_characters,
        )  # fmt: skip

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams = NOT_SAMPLED,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        priority: int | None = None,
    ) -> EngineCoreRequest:
        """Turn a prompt into a request.

        Args:
            prompt: see `Prompt`.
            params: sampling parameters; a missing seed is drawn here, so that a replay repeats it. With
                `pooling_params` only their priority matters.
            request_id: unique among live requests; unset: random.
            options: the caller's other options; `pooling_params` that are unset become the checkpoint's own.
            priority: instead of the parameters' own.

        Raises:
            RequestError: the prompt, a parameter or an option is invalid; it names which.
        """
        arrived_at = time.monotonic()
        pooling, resolved = options.pooling_params, None
        if pooling is not None:
            resolved = self._resolve_pooling(pooling)
            priority, params = params.priority if priority is None else priority, NOT_SAMPLED
        if priority is not None and priority != params.priority:
            params = msgspec.structs.replace(params, priority=priority)
        deadline_ms = options.deadline_ms
        if deadline_ms is not None and not 0 < deadline_ms < math.inf:
            raise RequestError.of("deadline_ms", f"is {deadline_ms}; it must be a number above 0")
        if deadline_ms is not None and deadline_ms > MAX_DEADLINE_MS:
            options = msgspec.structs.replace(options, deadline_ms=None)
        slo_targets = resolve(self._slo_classes, options.slo, has_output_tokens=resolved is None)
        images = _images(prompt)
        if images and resolved is not None:
            raise RequestError.of(
                "multi_modal_data", "is given with a request that is pooled; only generation takes images"
            )
        text, token_ids, name = self._split(prompt, allows_pair=resolved is not None)
        max_prompt_tokens = self._max_prompt_tokens(params)
        if resolved is not None:
            text, token_ids, resolved = self._pooled(prompt, text, token_ids, resolved)
            options = msgspec.structs.replace(options, pooling_params=resolved)
        elif text is not None:
            token_ids = self._tokenize(text, name, max_prompt_tokens)
        prompt_parts: list[PromptPart] = []
        encode_seconds = 0.0
        if images:
            token_ids, prompt_parts = self._with_images(token_ids, images, max_prompt_tokens)
            encode_seconds = time.monotonic() - arrived_at
        elif isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            token_ids, prompt_parts = self._embedded(prompt["prompt_embeds"], max_prompt_tokens)
        elif max_prompt_tokens is not None:
            token_ids = token_ids[-max_prompt_tokens:]
        if params.bad_words:
            params = msgspec.structs.replace(params, bad_words_token_ids=self._tokenize_bad_words(params.bad_words))
        if params.seed is None and not params.is_greedy:
            params = msgspec.structs.replace(params, seed=secrets.randbits(64))
        request = EngineCoreRequest(
            request_id or secrets.token_hex(8), token_ids, params, options, prompt_parts,
            arrived_at=arrived_at, slo_targets=slo_targets, prompt=text, encode_seconds=encode_seconds,
            eos_token_id=self._eos_token_id,
        )  # fmt: skip
        validate_request(request, self._ready, name)
        self._check_that_something_is_left(params)
        return request

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, if it has one."""
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError:
            return None
        return template

    def apply_chat_template(self, conversation: Conversation) -> list[int] | dict[str, Any]:
        """The prompt of a conversation: token ids, beside its images if it has any.

        Raises:
            RequestError: as of `ConversationRenderer.render`, or the text is too long.
        """
        text, images = self._conversations.render(conversation)
        token_ids = self._encode(text, "messages", add_special_tokens=False)
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}} if images else token_ids

    def expand_images(self, prompt: dict[str, Any]) -> list[int]:
        """The token ids of a conversation with images, as `apply_chat_template` returns it, those of images included.

        Raises:
            RequestError: an image cannot be used.
        """
        try:
            return self._with_images(prompt["prompt_token_ids"], _images(prompt), None)[0]
        except RequestError as error:
            raise RequestError("messages", "messages" + str(error).removeprefix(error.parameter)) from None

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return self._ready.max_model_len

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: of any length that could be a prompt.
            add_special_tokens: add the tokens of a prompt's beginning.

        Raises:
            RequestError: it is too long.
        """
        if not text:
            return []
        return self._tokenize(text, "prompt", None, add_special_tokens=add_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own names of tokens.

        Raises:
            RequestError: there are none of these ids.
        """
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < self._ready.vocab_size), None)
        if unknown is not None:
            raise RequestError.of(
                "prompt_token_ids", f"holds {unknown}; ids must be from 0 to {self._ready.vocab_size - 1}"
            )
        names = self.tokenizer.convert_ids_to_tokens(list(token_ids))
        return [name or "" for name in names]  # the vocabulary may be larger than the tokenizer's

    def shutdown(self) -> None:
        """End the processes that render conversations and tokenize. Idempotent."""
        self._conversations.shutdown()
        self._encoder.shutdown()
        if self.images is not None:
            self.images.shutdown()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of whole sequences of token ids."""
        return self._decoder.decode(list(token_ids), skip_special_tokens)

    def _pooled(
        self, prompt: Prompt, text: str | None, token_ids: list[int], params: PoolingParams
    ) -> tuple[str | None, list[int], PoolingParams]:
        """The text, token ids and parameters of a request that is pooled; prompts of hidden states have no ids. Raises
        RequestError if the text cannot be tokenized, or the checkpoint has no such prompt."""
        info = self._ready.pooling
        longest, limit = info.longest_prompt(self._ready.max_model_len), params.truncate_prompt_tokens
        if limit is not None and limit > longest:
            raise RequestError.of("truncate_prompt_tokens", f"is {limit}; this model takes at most {longest} tokens")
        limit = longest if limit == -1 else limit
        if text is None:
            if params.prompt_name is not None:
                raise RequestError.of("prompt_name", "is given with a prompt that is no text")
            return None, token_ids[:limit], params
        whole = info.prompt(params.prompt_name) + text
        second = prompt.get("pair") if isinstance(prompt, Mapping) else None
        if not whole or second == "":
            name = "prompt" if not whole else "pair"
            raise RequestError.of(name, "is empty; it must hold at least one character")
        if info.lower_case:
            whole, second = whole.lower(), second and second.lower()
        if limit is None and second is None:
            return text, self._encode(whole, "prompt", add_special_tokens=True), params
        if limit is None and len(whole) + len(second or "") > self._max_characters:
            raise RequestError(
                "prompt",
                f"prompt and pair have {len(whole) + len(second or '')} characters, which cannot fit; with "
                f"max_model_len={self._ready.max_model_len} they must have at most {self._max_characters}",
            )
        most = 2 * self._max_characters  # the cut is far behind the last tokens that are kept
        whole, second = whole[:most], second and second[:most]
        token_ids, start = self._encoder.encode_within(whole, second, "prompt", limit)
        if start is not None and info.has_segments and self._has_segments:
            params = msgspec.structs.replace(params, segment_start=start)
        return text, token_ids, params

    def _split(self, prompt: Prompt, *, allows_pair: bool) -> tuple[str | None, list[int], str]:
        """(text, token ids, name for messages)."""
        if isinstance(prompt, str):
            return prompt, [], "prompt"
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys & {"prompt", "prompt_token_ids"} and not allows_pair:
                keys.discard("multi_modal_data")
            if keys == {"prompt"} and isinstance(prompt["prompt"], str):
                return prompt["prompt"], [], "prompt"
            if keys == {"prompt", "pair"} and isinstance(prompt["prompt"], str) and isinstance(prompt["pair"], str):
                if not allows_pair:
                    raise RequestError.of("pair", "is given; only requests that are pooled take a pair of texts")
                return prompt["prompt"], [], "prompt"
            if keys == {"prompt_token_ids"}:
                return None, _token_ids(prompt["prompt_token_ids"]), "prompt_token_ids"
            if keys == {"prompt_embeds"}:
                return None, [], "prompt_embeds"
            raise RequestError.of(
                "prompt", f"has the keys {sorted(keys)}; it must have prompt or prompt_token_ids or prompt_embeds alone"
            )
        return None, _token_ids(prompt), "prompt_token_ids"

    def _embedded(self, tensor: Any, max_prompt_tokens: int | None) -> tuple[list[int], list[PromptPart]]:
        """Placeholder ids and parts of a prompt of hidden states, the last `max_prompt_tokens` of them. Each KV block
        is a part, so that prompts share the blocks of a common prefix. Raises RequestError if it is not such a tensor.
        """
        name, size, max_model_len = "prompt_embeds", self._ready.hidden_size, self._ready.max_model_len
        shape = tuple(getattr(tensor, "shape", ()))
        if len(shape) == 3 and shape[0] == 1:
            tensor, shape = tensor[0], shape[1:]
        if len(shape) != 2 or shape[0] == 0 or shape[1] != size:
            found = f"has shape {[*shape]}" if hasattr(tensor, "shape") else f"is {type(tensor).__name__}"
            raise RequestError.of(name, f"{found}; it must be a tensor of shape [tokens, {size}]")
        if max_prompt_tokens is not None:
            tensor = tensor[-max_prompt_tokens:]
        if len(tensor) >= max_model_len:
            raise RequestError.of(
                name, f"has {len(tensor)} rows; with max_model_len={max_model_len} it must have fewer than that"
            )
        rows = float_rows(name, tensor)
        block_size = self._ready.block_size
        parts = []
        for start in range(0, len(rows), block_size):
            content = rows[start : start + block_size].tobytes()
            length = min(block_size, len(rows) - start)
            parts.append(PromptPart(start, length, hashlib.sha256(content).digest(), content))
        return [0] * len(rows), parts

    def _with_images(
        self, token_ids: list[int], images: Sequence[Any], max_prompt_tokens: int | None
    ) -> tuple[list[int], list[PromptPart]]:
        """Token ids and parts of a prompt with images. Raises RequestError if they do not fit it or the model."""
        if self.images is None:
            raise RequestError.of("multi_modal_data", f"holds {named(images)}; {self._why_no_images}")
        if max_prompt_tokens is not None:
            raise RequestError.of("truncate_prompt_tokens", f"is given with {named(images)}, which cannot be cut")
        width = self._ready.hidden_size * (1 + self._ready.num_deepstack_layers)
        for image in images:
            if isinstance(image, ImageEmbeds) and image.rows.shape[1] != width:
                raise RequestError.because(
                    "multi_modal_data",
                    f"image_embeds has rows of {image.rows.shape[1]} numbers; those of this model have {width}",
                )
        return self.images.insert(token_ids, images)

    def _max_prompt_tokens(self, params: SamplingParams) -> int | None:
        """The number of tokens to truncate the prompt to; None: do not truncate. Raises RequestError if it is too
        large."""
        number, max_model_len = params.truncate_prompt_tokens, self._ready.max_model_len
        if number == -1:
            return max(1, max_model_len - (params.max_tokens or 1))
        if number is not None and number >= max_model_len:
            raise RequestError.of(
                "truncate_prompt_tokens", f"is {number}; it must be less than max_model_len={max_model_len}"
            )
        return number

    def _check_that_something_is_left(self, params: SamplingParams) -> None:
        """Raise RequestError if `min_tokens` and `bad_words` leave nothing of `allowed_token_ids`."""
        if params.allowed_token_ids is None:
            return
        excluded = {token_ids[0] for token_ids in params.bad_words_token_ids if len(token_ids) == 1}
        if params.min_tokens:
            own = [] if self._eos_token_id is None else [self._eos_token_id]
            ends = [] if params.ignore_eos else [*self._ready.eos_token_ids, *own]
            excluded.update(params.stop_token_ids, ends)
        if excluded.issuperset(params.allowed_token_ids):
            raise RequestError.of(
                "allowed_token_ids",
                "holds no token that bad_words and min_tokens leave (the latter keeps out what ends "
                "the text); allow others, or drop these",
            )

    def _tokenize_bad_words(self, bad_words: list[str]) -> list[list[int]]:
        """Token ids of each word at the beginning of a text and, if they differ, after a space. Raises RequestError if
        a word has no tokens."""
        sequences: list[list[int]] = []
        for word in bad_words:
            plain, spaced = (
                self._encoder.encode(prefix + word.lstrip(), "bad_words", add_special_tokens=False)
                for prefix in ("", " ")
            )
            if not plain:
                raise RequestError.of("bad_words", f"holds {word!r}; words must have at least one token")
            sequences.append(plain)
            # As in vLLM: a different length means that the space became a separate token.
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        return sequences

    def _tokenize(
        self, text: str, name: str, max_prompt_tokens: int | None, *, add_special_tokens: bool = True
    ) -> list[int]:
        if not text:  # a tokenizer may have a token for an empty text
            raise RequestError.of(name, "is empty; it must hold at least one character")
        if max_prompt_tokens is None:
            return self._encode(text, name, add_special_tokens=add_special_tokens)
        if len(text) > self._max_characters:
            text = text[-2 * self._max_characters :]  # the cut is far from the last tokens
        return self._encoder.encode(text, name, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a whole text. One that cannot fit is rejected before it costs seconds. Raises RequestError if it is
        too long, or the tokenizer fails."""
        max_model_len = self._ready.max_model_len
        if len(text) > self._max_characters:
            raise RequestError.of(
                name,
                f"has {len(text)} characters, which cannot fit; with max_model_len={max_model_len} it must have "
                f"at most {self._max_characters}",
            )
        # The beginning of a long text usually decides; its cut may add some tokens.
        many_tokens = max_model_len + 1024
        if len(text) > 32 * many_tokens:
            beginning = self._encoder.encode(text[: 16 * many_tokens], name, add_special_tokens=False)
            if len(beginning) > many_tokens:
                raise RequestError.of(
                    name,
                    f"has more than {max_model_len} tokens; with max_model_len={max_model_len} it must have "
                    "fewer than that",
                )
        return self._encoder.encode(text, name, add_special_tokens=add_special_tokens)


def _images(prompt: Prompt) -> list[Any]:
    """The images and videos of a prompt. Raises RequestError if there are other data."""
    given = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not given:
        return []
    if not isinstance(given, Mapping) or not set(given) <= {"image", "video"}:
        found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise RequestError.of("multi_modal_data", f"holds {found}; it must hold image and video alone")
    images = given.get("image", [])
    if getattr(images, "ndim", 0) == 3 and hasattr(images, "detach"):  # vLLM's form of several images' hidden states
        images = list(images)
    videos = read_videos(given["video"]) if "video" in given else []
    return [*map(_image, images if isinstance(images, list | tuple) else [images]), *videos]


def _image(given: Any) -> Any:
    """The image, whose hidden states may be given in its place. Raises RequestError if these are none."""
    is_rows = getattr(given, "ndim", 0) == 2 and "float" in str(getattr(given, "dtype", ""))
    return read_embeds(given) if is_rows or isinstance(given, Mapping) else given


def _token_ids(values: Any) -> list[int]:
    """Plain ints, also from numpy's integers; nothing is rounded."""
    try:
        return list(map(operator.index, values))
    except TypeError:
        raise RequestError.of("prompt_token_ids", "must be a list of integers") from None
