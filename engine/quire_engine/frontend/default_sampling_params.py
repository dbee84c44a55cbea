"""Default sampling parameters of a model: `generation_config.json`, and the settings that name or override it.

The semantics are those of vLLM's server: `do_sample` is not read, and null stands for a missing field.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire_engine.errors import CheckpointError, RequestError
from quire_engine.models.checkpoints.files import read_json
from quire_engine.sampling_params import SamplingParams

FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_new_tokens", "skip_special_tokens",
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultSamplingParams:
    """The values of sampling parameters that a request leaves out."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """By name of `SamplingParams`."""
    max_tokens_limit: int | None = None
    """The most tokens that any request of a server may generate."""

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return SamplingParams(**self.values)

    def complete(self, given: Mapping[str, Any], *, is_chat: bool = False) -> SamplingParams:
        """The parameters of a request to a server.

        Args:
            given: the request's own parameters, each of its field's type.
            is_chat: the default of `max_tokens` holds for conversations alone; a prompt has that of `SamplingParams`.

        Raises:
            RequestError: a value is out of its range.
        """
        values = dict(self.values)
        if is_chat:
            values.setdefault("max_tokens", None)  # up to the context's end
        else:
            values.pop("max_tokens", None)
        params = SamplingParams(**{**values, **given})
        limit = self.max_tokens_limit
        if limit is None or (params.max_tokens is not None and params.max_tokens <= limit):
            return params
        return msgspec.structs.replace(params, max_tokens=limit)


NO_DEFAULTS = DefaultSamplingParams()


def read_default_sampling_params(folder: str, source: str, override: Mapping[str, Any]) -> DefaultSamplingParams:
    """Read the defaults that the settings `generation_config` and `override_generation_config` select.

    `max_new_tokens` limits every request if it comes from the override or from a folder named in `generation_config`.
    In the checkpoint's own file it is a default.

    Args:
        folder: the checkpoint.
        source: the setting `generation_config`.
        override: the other setting.

    Raises:
        CheckpointError: the file cannot be read, or a value is out of its range.
        ValueError: an overriding field is not known, or its value is out of its range.
    """
    unknown = [name for name in override if name not in FIELDS]
    if unknown:
        raise ValueError(f"override_generation_config holds {unknown[0]!r}; known are {', '.join(FIELDS)}")
    path = Path(folder if source == "auto" else source) / "generation_config.json"
    is_read = source != "vllm" and (source != "auto" or path.exists() or path.is_symlink())
    stored = read_json(path) if is_read else {}
    _values(stored, CheckpointError, f"{path}: ", "; mend it, or set generation_config to 'vllm' to do without it")
    values = _values({**stored, **override}, ValueError, "override_generation_config: ", "")
    if values:
        sources = [str(path)] * is_read + ["override_generation_config"] * bool(override)
        said = ", ".join(f"{name} {value}" for name, value in values.items())
        logger.info("default sampling parameters, from %s: %s", " and ".join(sources), said)
    limiting = override if source in ("auto", "vllm") else {**stored, **override}
    has_limit = limiting.get("max_new_tokens") is not None
    return DefaultSamplingParams(values=values, max_tokens_limit=values["max_tokens"] if has_limit else None)


def _values(stored: Mapping[str, Any], error: type[Exception], where: str, mend: str) -> dict[str, Any]:
    """The default sampling parameters among the fields of a generation configuration, under our names. Raises `error`
    if a value is out of its range."""
    values = {
        "max_tokens" if name == "max_new_tokens" else name: stored[name]
        for name in FIELDS
        if stored.get(name) is not None
    }
    try:
        SamplingParams(**values)
    except RequestError as reason:
        said = str(reason).replace("max_tokens", "max_new_tokens")
        raise error(f"{where}{said}{mend}") from None
    return values
