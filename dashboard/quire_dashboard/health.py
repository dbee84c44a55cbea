"""Health in words: what is wrong, the likely cause, and what to do about it.

A pure function of /metrics and the snapshot. Findings are ordered by how much they explain: an engine that is down
explains every miss, a full KV cache explains preemptions, and those explain a bad time to first token.
"""

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Evidence", "Finding", "Health", "Level", "assess"]

GOOD_ENOUGH = 0.99
"""Below this share of good requests, users count as affected."""
BAD = 0.90


@dataclass(frozen=True, slots=True)
class Limit:
    """From where on something is a finding, and down to where it stays one: around a single limit, findings would come
    and go with every refresh."""

    begins: float
    ends: float

    def is_passed(self, value: float, standing: bool) -> bool:
        """Whether it is a finding, which it was before if `standing`."""
        return value >= (self.ends if standing else self.begins)


FULL = Limit(0.95, 0.85)
"""Share of the blocks that live requests hold."""
SLOW_RANK = Limit(1.5, 1.3)
"""How many times slower than the median rank."""
LONG_PREFILL = Limit(0.5, 0.4)
"""Share of the time to first token spent in prefill."""
LONG_PROMPT = Limit(0.5, 0.4)
"""Mean length of the prompts, as a share of the tokens that a step may compute."""
CROWDED = Limit(1.0, 0.5)
"""Requests that wait, per request that runs."""
SLO_EXAMPLE = '"slo": {"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}}'
"""For `model.json`."""


class Level(IntEnum):
    """Severity."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Evidence on one model over about the last minute. None or empty: unknown."""

    server_error: str = ""
    """Why /metrics could not be read; empty if it could."""
    has_model: bool = True
    engine_up: bool | None = None
    """False when all of the model's engines are down."""
    one_down: bool = False
    """Whether any of them is."""
    server_restarts: float = 0.0
    """Of the server itself, in ten minutes."""
    recent_server_restarts: float = 0.0
    """Of these, in the last minute."""
    restarts: float = 0.0
    """Of the engine, in five minutes."""
    recent_restarts: float = 0.0
    """Of these, in the last minute."""
    running: float = 0.0
    waiting: float = 0.0
    """For capacity, in the mean of some seconds."""
    waiting_for_grammar: float = 0.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    has_slo: bool | None = None
    """Whether any class has a target."""
    kv_usage: float | None = None
    kv_usage_peak: float | None = None
    """The highest in the window."""
    preemptions: float = 0.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Share of good requests by SLO class, of those that ended in the window."""
    misses: Mapping[str, float] = field(default_factory=dict)
    """Missed requests by cause, in the window."""
    ttft_p95: float | None = None
    queue_p95: float | None = None
    prefill_p95: float | None = None
    mean_prompt_tokens: float | None = None
    workers_down: tuple[str, ...] = ()
    rank_seconds: Mapping[str, float] = field(default_factory=dict)
    """Median step time by rank."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Median by phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem."""

    level: Level
    cause: str
    """A short name, such as `kv_cache_full`."""
    title: str
    detail: str
    """The figures behind it, and what helps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The verdict."""

    level: Level
    headline: str
    findings: tuple[Finding, ...] = ()
    """The likely cause first; empty if all is well."""


def assess(evidence: Evidence, standing: Collection[str] = ()) -> Health:
    """Judge one model.

    Args:
        evidence: on it.
        standing: the causes that were found the last time; they stay until they are clearly over.
    """
    if evidence.server_error:
        finding = Finding(
            level=Level.CRITICAL, cause="server_away", title="The server does not answer",
            detail=f"{evidence.server_error}. Look at the output of quire serve, or of tritonserver.",
        )  # fmt: skip
        return Health(level=Level.CRITICAL, headline="The server does not answer.", findings=(finding,))
    if not evidence.has_model:
        finding = Finding(
            level=Level.WARNING, cause="no_model", title="No model of Quire is loaded",
            detail="/metrics is there, but holds no series of Quire. A model that does not load says why in the log.",
        )  # fmt: skip
        return Health(
            level=Level.WARNING, headline="The server runs, but serves no model of Quire.", findings=(finding,)
        )
    findings = tuple(found for look in _LOOKS if (found := look(evidence, standing)) is not None)
    served = _goodput_level(evidence)
    level = max([served, *(finding.level for finding in findings)])
    return Health(level=level, headline=_headline(evidence, served, findings), findings=findings)


def _goodput_level(evidence: Evidence) -> Level:
    worst = min(evidence.goodput.values(), default=1.0)
    return Level.OK if worst >= GOOD_ENOUGH else Level.WARNING if worst >= BAD else Level.CRITICAL


def _headline(evidence: Evidence, served: Level, findings: tuple[Finding, ...]) -> str:
    findings = tuple(finding for finding in findings if finding.cause != "no_slo")  # which causes nothing
    cause = f" Likely cause: {findings[0].title[0].lower()}{findings[0].title[1:]}." if findings else ""
    if evidence.engine_up is False:
        return "Nobody is being served: the engine is down."
    if served is not Level.OK:
        slo, worst = min(evidence.goodput.items(), key=lambda item: item[1])
        if evidence.has_slo is False:
            return f"Users are affected: only {worst:.0%} of the requests end without an error.{cause}"
        cause = cause or f" {_first_cause(evidence)}"
        return f"Users are affected: only {worst:.0%} of the requests of class {slo} meet their SLO.{cause}"
    if findings and evidence.has_slo is not False:
        return f"Users are served within their SLO, but: {findings[0].title[0].lower()}{findings[0].title[1:]}."
    if findings:
        return f"No SLO is set, and: {findings[0].title[0].lower()}{findings[0].title[1:]}."
    if not evidence.goodput and evidence.running + evidence.waiting == 0:
        return "The server is up and idle."
    if not evidence.goodput:
        return "The server is up; no request has ended in the last minute."
    if evidence.has_slo is False:
        return "No SLO is set: nothing says what would be good enough. No request has failed in the last minute."
    return "Users are served within their SLO."


def _first_cause(evidence: Evidence) -> str:
    if not evidence.misses:
        return "The cause is not known."
    cause = max(evidence.misses, key=lambda name: evidence.misses[name])
    return f"Most of them miss {_TARGETS.get(cause, cause)}."


_TARGETS = {
    "ttft": "the time to first token", "tpot": "the time per output token", "e2e": "the end-to-end latency",
    "rejected": "because they are rejected", "error": "because they fail",
}  # fmt: skip


# -- possible problems, those that explain the most first --------------------------------------------------------------


def _engine_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if evidence.engine_up is not False:
        return None
    return Finding(
        level=Level.CRITICAL, cause="engine_down", title="The engine is down",
        detail="It is started again by itself, and live requests go on then. If it stays down, its log says why.",
    )  # fmt: skip


def _one_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not (evidence.one_down and evidence.engine_up):
        return None
    return Finding(
        level=Level.WARNING, cause="one_down", title="One of the model's engines is down",
        detail="The others serve. It is started again by itself; if it is a replica (data_parallel_size), its live "
        "requests have gone on on the others. If it stays down, its log says why.",
    )  # fmt: skip


def _worker_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not evidence.workers_down:
        return None
    return Finding(
        level=Level.CRITICAL, cause="worker_down", title=f"Rank {', '.join(evidence.workers_down)} is down",
        detail="No step can be computed without all ranks. The engine is started again with all of them.",
    )  # fmt: skip


def _server_restarts(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    often = evidence.server_restarts >= 2
    if not often and evidence.recent_server_restarts < 1:
        return None
    return Finding(
        level=Level.CRITICAL if often else Level.WARNING, cause="server_restarts",
        title="The server dies again and again" if often else "The server was started again",
        detail=f"{evidence.server_restarts:.0f} start(s) in the last ten minutes, "
        f"{evidence.recent_server_restarts:.0f} in the last minute. Whatever ran then was lost. The output of quire "
        "serve says how it ended each time.",
    )  # fmt: skip


def _crash_loop(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    often = evidence.restarts >= 3
    if not often and evidence.recent_restarts < 1:  # one that is over explains nothing of the last minute
        return None
    return Finding(
        level=Level.CRITICAL if often else Level.WARNING, cause="engine_restarts",
        title="The engine crashes again and again" if often else "The engine was restarted",
        detail=f"{evidence.restarts:.0f} restart(s) in the last five minutes. Live requests were replayed and saw a "
        "pause; the log of the server names the cause.",
    )  # fmt: skip


def _kv_cache_full(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    usage, preempts = evidence.kv_usage or 0.0, evidence.preemptions >= 1
    is_full = FULL.is_passed(usage, "kv_cache_full" in standing)
    if not preempts and (not is_full or evidence.waiting < 1):
        return None
    peak = max(usage, evidence.kv_usage_peak or 0.0)
    preempted = f"; {evidence.preemptions:.0f} preemption(s) in the last minute, whose tokens were computed twice"
    title = "The KV cache is full" if usage >= FULL.begins else "The KV cache is nearly full"
    if preempts:
        title = f"{title} and requests are preempted" if is_full else "Requests are preempted for want of blocks"
    return Finding(
        level=Level.CRITICAL if preempts and is_full else Level.WARNING, cause="kv_cache_full", title=title,
        detail=f"Live requests hold {usage:.0%} of the KV cache's blocks, {peak:.0%} at most in the last minute"
        f"{preempted * preempts}; {evidence.waiting:.0f} requests wait. Raise kv_cache_memory_bytes, lower "
        "max_num_seqs, or send less load.",
    )  # fmt: skip


def _slow_rank(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if len(evidence.rank_seconds) < 2:
        return None
    rank, slowest = max(evidence.rank_seconds.items(), key=lambda item: item[1])
    others = statistics.median(seconds for name, seconds in evidence.rank_seconds.items() if name != rank)
    if others <= 0 or not SLOW_RANK.is_passed(slowest / others, "slow_rank" in standing):
        return None
    return Finding(
        level=Level.WARNING, cause="slow_rank", title=f"Rank {rank} is slow",
        detail=f"Its steps take {1000 * slowest:.1f} ms, those of the others {1000 * others:.1f} ms; every step "
        "waits for the slowest rank. Look at what else runs on its cores or device.",
    )  # fmt: skip


def _rejections(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    rejected = evidence.misses.get("rejected", 0.0)
    if rejected < 1:
        return None
    return Finding(
        level=Level.WARNING, cause="rejections", title="Requests are rejected",
        detail=f"{rejected:.0f} in the last minute. The queue is full (max_queued_requests, max_queue_delay_ms), or "
        "the requests are bad.",
    )  # fmt: skip


def _errors(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    failed = evidence.misses.get("error", 0.0)
    if failed < 1:
        return None
    return Finding(
        level=Level.WARNING, cause="errors", title="Requests fail",
        detail=f"{failed:.0f} in the last minute; the log of the server names each.",
    )  # fmt: skip


def _queue(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if evidence.waiting < 1:
        return None
    full = evidence.max_num_seqs is not None and evidence.running >= evidence.max_num_seqs
    queued = (evidence.queue_p95 or 0.0) > 0.5 * (evidence.ttft_p95 or float("inf"))
    crowded = CROWDED.is_passed(evidence.waiting / (evidence.running + 1), "queue" in standing)
    if not full and not queued and not crowded:
        return None
    why = f"all {evidence.max_num_seqs} places of max_num_seqs are taken" if full else "more arrives than is served"
    advice = "Raise max_num_seqs if memory allows, add a replica, or send less load."
    if _kv_cache_full(evidence, standing) is not None:  # which wants fewer at once, not more
        why, advice = "there is no room in the KV cache for more", "See to the KV cache first."
    return Finding(
        level=Level.WARNING, cause="queue", title="Requests wait in the queue",
        detail=f"{evidence.waiting:.0f} wait while {evidence.running:.0f} run: {why}. {advice}",
    )  # fmt: skip


def _long_prompts(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    prefill, ttft = evidence.prefill_p95, evidence.ttft_p95
    is_missed = evidence.misses.get("ttft", 0.0) >= 1 or evidence.misses.get("tpot", 0.0) >= 1
    length, most = evidence.mean_prompt_tokens, evidence.max_num_batched_tokens
    if not is_missed or not prefill or not ttft or not length or not most:
        return None
    stands = "long_prompts" in standing
    if not LONG_PREFILL.is_passed(prefill / ttft, stands) or not LONG_PROMPT.is_passed(length / most, stands):
        return None
    return Finding(
        level=Level.WARNING, cause="long_prompts", title="Long prompts hold up the batch",
        detail=f"Of a time to first token of {ttft:.2f} s (p95), prefill takes {prefill:.2f} s (p95). Prompts have "
        f"{length:.0f} tokens on average, and a step has room for {most}. Set long_prefill_token_threshold, or lower "
        "max_num_batched_tokens.",
    )  # fmt: skip


def _grammar(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if evidence.waiting_for_grammar < 1:
        return None
    return Finding(
        level=Level.OK, cause="grammar", title="Requests wait for their grammar",
        detail=f"{evidence.waiting_for_grammar:.0f} wait for theirs to be compiled, which is done once per grammar.",
    )  # fmt: skip


def _scheduling(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    host = evidence.step_seconds.get("schedule", 0.0) + evidence.step_seconds.get("update", 0.0)
    execute = evidence.step_seconds.get("execute", 0.0)
    if not any(evidence.misses.values()) or host <= execute or host == 0:
        return None
    return Finding(
        level=Level.WARNING, cause="host_bound", title="The engine spends more time on scheduling than on the model",
        detail=f"Schedule and update take {1000 * host:.1f} ms of a step, the model {1000 * execute:.1f} ms.",
    )  # fmt: skip


def _no_slo(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if evidence.has_slo is not False:
        return None
    return Finding(
        level=Level.OK, cause="no_slo", title="No SLO is set",
        detail="Every request that ends without an error counts as good, however slow. Set targets in the model's "
        f"model.json, such as {SLO_EXAMPLE}",
    )  # fmt: skip


_LOOKS: tuple[Callable[[Evidence, Collection[str]], Finding | None], ...] = (
    _server_restarts, _engine_down, _one_down, _worker_down, _crash_loop, _kv_cache_full, _slow_rank, _queue,
    _long_prompts, _rejections, _errors, _scheduling, _grammar, _no_slo,
)  # fmt: skip
