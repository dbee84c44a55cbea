"""A model's answer to `introspect` of the kind `ended`: its last requests that have ended.

Fields missing in an answer get their defaults, and unknown ones are ignored, as in a snapshot.
"""

from typing import Any

import msgspec

LOST = "lost"
"""`error_code` of a request whose server died."""
PHASES = ("encode", "held", "queue", "prefill", "decode", "preempted", "replayed")
"""What a request's time can go to."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended; `quire_engine.snapshot.EndedRequest` says what the fields are."""

    number: int = 0
    time_unix: float = 0.0
    finish_reason: str = ""
    """`stop`, `length`, `abort`, `error`, or `rejected` before it reached the engine."""
    id: str = ""
    label: str = ""
    slo_class: str = ""
    slo_verdict: str = ""
    slo_cause: str = ""
    error: str = ""
    error_code: str = ""
    aborted_by: str = ""
    e2e_seconds: float = 0.0
    encode_seconds: float = 0.0
    held_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preempted_seconds: float = 0.0
    replayed_seconds: float = 0.0
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_sequences: int = 1
    num_preemptions: int = 0
    num_replays: int = 0
    num_running_before: int = 0
    num_waiting_before: int = 0
    traceparent: str = ""
    adapter: str = ""
    """The name of its LoRA adapter; empty: none."""
    task: str = ""
    """What it returned instead of tokens, such as `embed`; empty: it generated."""
    parameters: dict[str, Any] = {}
    prompt: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether its client did not get what it asked for."""
        return self.finish_reason not in ("stop", "length")

    @property
    def is_slow(self) -> bool:
        """Whether it missed an objective, and has not failed."""
        return not self.has_failed and self.slo_verdict == "miss"

    @property
    def trace_id(self) -> str:
        """The caller's trace; empty without one."""
        parts = self.traceparent.split("-")
        return parts[1] if len(parts) >= 4 else ""

    @property
    def phases(self) -> list[tuple[str, float]]:
        """(phase, seconds) of what its time went to; the sum is `e2e_seconds`. Empty if it never reached the engine."""
        if self.finish_reason == "rejected" or self.error_code == LOST:
            return []
        parts = [(phase, float(getattr(self, f"{phase}_seconds"))) for phase in PHASES]
        return [(phase, length) for phase, length in parts if length > 0]


class EndedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says: those that have ended since the cursor that it was shown."""

    cursor: str
    num_ended: int = 0
    capacity: int = 0
    since_unix: float = 0.0
    slo: dict[str, dict[str, float]] = {}
    requests: list[EndedRequest] = []

    @property
    def ring(self) -> str:
        """The name of what the model keeps: another one after it was loaded again."""
        return self.cursor.partition(":")[0]

    @property
    def has_slo(self) -> bool:
        """Whether any class has a target."""
        return any(self.slo.values())
