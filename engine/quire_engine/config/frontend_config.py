"""FrontendConfig: the settings of the process that serves clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from quire_engine.config.checks import POSITIVE_SECONDS, SHARE, between, check, check_fields, filled, one_of, within
from quire_engine.slo import DEFAULT_CLASS, NO_TARGETS, SLOTargets, parse_classes

MAX_ENDED_REQUESTS = 20_000
"""A request takes about 1 KB, and one response to an operator holds all of them."""
MIN_TOKEN_CHARACTERS = 16
DEFAULT_MM_LIMITS = {"image": 16, "video": 4}
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "openai")
REASONING_PARSERS = ("deepseek_r1", "qwen3", "openai_gptoss")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendConfig:
    """Settings of the process that serves clients; the engine core and its ranks do not have them."""

    generation_config: Annotated[str, filled("'auto', 'vllm', or the path of a folder")] = "auto"
    """The source of sampling parameters that a request leaves out: `auto` the checkpoint's `generation_config.json`, a
    folder's path that folder's, `vllm` none: then the neutral values hold."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace fields of that file: `{"temperature": 0.6}`; null removes one."""
    stream_interval: Annotated[int, between(1)] = 1
    """Tokens per streamed response after the first, at least."""
    stream_interval_ms: Annotated[float, within(0, 1000)] = 20.0
    """Time between two responses of one stream, at least; tokens that come faster travel together. 0: no limit."""
    replay_on_crash: bool = True
    """Whether live requests continue after a crash or a hang of the engine; else they end with an error."""
    wake_on_request: bool = False
    """Whether a request that comes while the engine sleeps wakes it up, and waits for that; else it is rejected."""
    step_timeout_s: Annotated[float, POSITIVE_SECONDS] = 300.0
    """The timeout of a step: an engine that exceeds it counts as hung, and is started again."""
    slo: dict[str, SLOTargets] = field(default_factory=lambda: {DEFAULT_CLASS: NO_TARGETS})
    """Classes of service level objectives, by name: `{"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}}`."""
    metric_aliases: Annotated[str, one_of("vllm", "none")] = "vllm"
    """Other names that the metrics also have: `vllm`, or `none`."""
    expert_metrics: bool = False
    """Whether each expert of each layer has a counter, thousands of them. The busiest expert's load is always a
    metric."""
    otlp_endpoint: Annotated[str, filled("an address, such as http://localhost:4317")] | None = None
    """Where metrics and traces go by OTLP over gRPC, as `http://host:4317`; unset: nowhere. Needs the extra `otel`. In
    the server, a `model.json` that does not name it takes that of OTEL_EXPORTER_OTLP_ENDPOINT."""
    otlp_trace_sample_ratio: Annotated[float, SHARE] = 1.0
    """Share of the requests that have a trace, 0 to 1, unless the caller's trace context decides it."""
    metrics: bool = True
    """Whether statistics are kept at all; goodput needs them."""
    disable_log_stats: bool = False
    """vLLM's name for the opposite."""
    report_cached_tokens: bool = True
    """Whether a request's performance metrics say how many of its prompt's tokens came from the cache, and how many
    drafts were accepted. They tell a client what others have sent."""

    ended_requests: Annotated[int, between(0, MAX_ENDED_REQUESTS)] = 2000
    """How many ended requests are kept for operators: their times and sizes, and why they ended."""
    ended_requests_text: bool = False
    """Whether the prompts of these, and those of their parameters that hold text, are kept as well."""
    limit_mm_per_prompt: dict[str, int] = field(default_factory=DEFAULT_MM_LIMITS.copy)
    """How many images and videos a prompt may have, `{"image": 16, "video": 4}`; 0 images: the model is served as text,
    and its encoder of images is not loaded."""
    tool_call_parser: Annotated[str, one_of("auto", *TOOL_CALL_PARSERS)] | None = "auto"
    """The form in which the model calls functions, by the name of vLLM's parser: `hermes` (Qwen's too), `llama3_json`,
    `mistral`, `openai` (gpt-oss). `auto`: what the chat template shows; unset: calls are left in the text."""
    reasoning_parser: Annotated[str, one_of("auto", *REASONING_PARSERS)] | None = "auto"
    """The form of its reasoning: `qwen3` (`<think>…</think>`), `deepseek_r1` (the prompt itself ends with `<think>`),
    `openai_gptoss`. `auto`: what the chat template shows; unset: it has none."""

    introspection_token: str | None = field(default=None, repr=False)
    """The token that lets a caller see and cancel requests. Unset: no caller may."""

    def __post_init__(self) -> None:
        _check_token(self.introspection_token)
        check(isinstance(self.override_generation_config, Mapping), "override_generation_config",
              self.override_generation_config, "an object of fields of generation_config.json")  # fmt: skip
        check_fields(self)
        object.__setattr__(self, "slo", parse_classes(self.slo))
        limits = DEFAULT_MM_LIMITS if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt
        check(isinstance(limits, Mapping) and set(limits) <= set(DEFAULT_MM_LIMITS)
              and all(type(number) is int and 0 <= number <= 999 for number in limits.values()),
              "limit_mm_per_prompt", limits, '{"image": n, "video": n}, n from 0 to 999')  # fmt: skip
        object.__setattr__(self, "limit_mm_per_prompt", {**DEFAULT_MM_LIMITS, **limits})
        _check_parsers(self.tool_call_parser, self.reasoning_parser)


def _check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    is_harmony = [tool_call_parser == "openai", reasoning_parser == "openai_gptoss"]
    if any(is_harmony) and not all(is_harmony):
        raise ValueError(
            f"tool_call_parser is {tool_call_parser!r} with reasoning_parser={reasoning_parser!r}; 'openai' and "
            "'openai_gptoss' are two halves of one format, and must be set together"
        )


def _check_token(value: object) -> None:
    """No message quotes it: messages end up in logs."""
    if value is not None and not (isinstance(value, str) and value.isascii() and value.isprintable() and value.strip()):
        raise ValueError("introspection_token must be a string of printable ASCII characters, and not empty")
    if isinstance(value, str) and len(value) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"introspection_token has {len(value)} characters; it must have at least {MIN_TOKEN_CHARACTERS}, such as "
            "openssl rand -hex 16 makes"
        )
