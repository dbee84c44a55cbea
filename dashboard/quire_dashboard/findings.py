"""What can be wrong with a model, each by its evidence: the cause, and what to do about it.

Titles, levels and limits are those of `quire_client.symptoms`. The symptoms that explain the most come first: an engine
that is down explains every miss, a full KV cache explains preemptions, and those explain a bad time to first token.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from quire_client.symptoms import SYMPTOMS, Level

from quire_dashboard.evidence import NOW_S, UNTIL_OVER, Evidence

SLO_EXAMPLE = '"slo": {"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}}'
"""For `model.json`."""
_LAST = ("host_memory", "host_cpu", "grammar", "no_slo")
"""While requests miss no target of time: the pressure on a host makes nothing fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem."""

    level: Level
    cause: str
    """The symptom's name, such as `kv_cache_full`."""
    title: str
    detail: str
    """The figures behind it, and what helps."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the evidence for one symptom."""

    evidence: Evidence
    cause: str
    standing: Collection[str] = ()
    """Causes that were found the last time."""

    def limit(self, name: str) -> float:
        return SYMPTOMS[self.cause].limits[name].begins

    def passes(self, name: str, value: float) -> bool:
        return value >= SYMPTOMS[self.cause].limits[name].at(self.cause in self.standing)

    def find(self, detail: str, title: str = "", level: Level | None = None) -> Finding:
        symptom = SYMPTOMS[self.cause]
        return Finding(
            level=symptom.level if level is None else level, cause=self.cause, title=title or symptom.title,
            detail=detail,
        )  # fmt: skip


def find(evidence: Evidence, standing: Collection[str]) -> tuple[Finding, ...]:
    """All that is wrong, the likely cause first.

    Args:
        evidence: on a model whose /metrics could be read.
        standing: the causes that were found the last time; they stay until they are clearly over.
    """
    looks = ((function, _Look(evidence, cause, standing)) for cause, function in _LOOKS)
    found = [finding for function, look in looks if (finding := function(look)) is not None]
    if not any(evidence.lately.misses.get(target) for target in ("ttft", "tpot", "e2e")):
        found.sort(key=lambda finding: finding.cause in _LAST)
    return tuple(found)


def find_away(evidence: Evidence) -> Finding:
    """Why there are no figures of now."""
    if not evidence.server_error:
        return _Look(evidence, "no_model").find(
            "/metrics is there, but holds no series of Quire. A model that does not load says why in the log."
        )
    if evidence.only_metrics_away:
        return _Look(evidence, "metrics_away").find(
            f"{evidence.server_error}. Requests may be served as ever, unseen. Look at the address, at "
            "what is in between, and whether metrics were switched off (--allow-metrics)."
        )
    known = filter(None, (evidence.server_death, *evidence.problems))
    died = "".join(f" {_sentence(one)}" for one in known)
    loop, restarts = _Look(evidence, "server_restarts"), evidence.server_restarts
    if restarts and restarts[0] < loop.limit("life"):
        return loop.find(
            f"It does not answer: {evidence.server_error}.{died} It had been started again {len(restarts)} time(s) in "
            f"{_minutes(loop)}, the last time {restarts[0]:.0f} s before. The output of quire serve says how it ended "
            "each time."
        )
    return _Look(evidence, "server_away").find(
        f"{evidence.server_error}.{died} Look at the output of quire serve, or of tritonserver."
    )


def _minutes(loop: _Look) -> str:
    return f"{loop.limit('window') / 60:.0f} minutes"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _cause(death: str) -> str:
    """A sentence and a space; empty if nothing is known."""
    return f"{_sentence(death)} " if death else ""


def _engine_down(look: _Look) -> Finding | None:
    detail = (
        f"{_cause(look.evidence.engine_death)}It is started again by itself, and live requests go on then. If it "
        "stays down, its log says why."
    )
    return look.find(detail) if look.evidence.engine_up is False else None


def _asleep(look: _Look) -> Finding | None:
    detail = (
        "An operator has freed its memory. Requests are rejected, or wake it up if wake_on_request is set; "
        "quire model wake NAME wakes it up."
    )
    return look.find(detail) if look.evidence.is_sleeping else None


def _one_down(look: _Look) -> Finding | None:
    evidence = look.evidence
    if not (evidence.one_down and evidence.engine_up):
        return None
    which = _which(evidence.engines_down)
    return look.find(
        f"{_cause(evidence.engine_death)}The others serve. It is started again by itself; if it is a replica "
        "(data_parallel_size), its live requests have gone on on the others. If it stays down, its log says why.",
        title=which and f"{which} is down",
    )


def _which(engines: Sequence[str]) -> str:
    """`Engine 1`; empty of a single one, or if it is not known."""
    return f"Engine {', '.join(engines)}" if engines else ""


def _not_served(look: _Look) -> Finding | None:
    evidence = look.evidence
    if not evidence.problems or evidence.engine_up is False or evidence.one_down:
        return None
    known = " ".join(map(_sentence, evidence.problems))
    return look.find(f"{known} That is what quire serve reports; it starts again what does not move.")


def _worker_down(look: _Look) -> Finding | None:
    detail = "No step can be computed without all ranks. The engine is started again with all of them."
    ranks = ", ".join(look.evidence.workers_down)
    return look.find(detail, title=f"Rank {ranks} is down") if ranks else None


def _level(look: _Look, restarts: Sequence[float]) -> Level | None:
    """Critical if so many restarts are a loop, and the last of them is not long enough ago to have ended it; a warning
    of one that has just been; one that is over explains nothing of now.

    ::

        restarts       |      |      |             at least as many, and no longer since the last one
        now                             ▲          than `UNTIL_OVER` times what was between the last two
    """
    if not restarts:
        return None
    is_loop = len(restarts) >= max(look.limit("times"), 2)
    if is_loop and restarts[0] <= max(NOW_S, UNTIL_OVER * (restarts[1] - restarts[0])):
        return Level.CRITICAL
    return Level.WARNING if restarts[0] <= NOW_S else None


def _server_restarts(look: _Look) -> Finding | None:
    restarts = look.evidence.server_restarts
    if (level := _level(look, restarts)) is None:
        return None
    return look.find(
        f"{len(restarts)} start(s) in the last {_minutes(look)}, the latest {restarts[0]:.0f} s ago. "
        f"{_cause(look.evidence.server_death)}Requests that ran then were lost. The output of quire serve says "
        "how it ended each time.",
        level=level, title="" if level is Level.CRITICAL else "The server was started again",
    )  # fmt: skip


def _engine_restarts(look: _Look) -> Finding | None:
    restarts, which = look.evidence.restarts, _which(look.evidence.engines_restarted) or "The engine"
    if (level := _level(look, restarts)) is None:
        return None
    return look.find(
        f"{len(restarts)} restart(s) in the last {_minutes(look)}, the latest {restarts[0]:.0f} s ago. "
        f"{_cause(look.evidence.engine_death)}Live requests were replayed and saw a pause; the log of the server names "
        "the cause.",
        level=level, title=f"{which} {'crashes again and again' if level is Level.CRITICAL else 'was restarted'}",
    )  # fmt: skip


def _is_served(evidence: Evidence) -> bool:
    return evidence.ended + evidence.running + evidence.waiting + evidence.held > 0


def _host_memory(look: _Look) -> Finding | None:
    pressure = look.evidence.host.memory_pressure or 0.0
    if not _is_served(look.evidence) or not look.passes("pressure", pressure):
        return None
    return look.find(
        f"Some task waited for memory in {pressure:.0%} of the last seconds. Look at what else runs there, and give "
        "the server less (kv_cache_memory_bytes) or the host more."
    )


def _host_cpu(look: _Look) -> Finding | None:
    host = look.evidence.host
    cpus, others, pressure = max(host.cpus or 0.0, 1.0), host.cpus_of_others or 0.0, host.cpu_pressure or 0.0
    is_taken = look.passes("others", others / cpus) and look.passes("pressure", pressure)
    if not is_taken or not _is_served(look.evidence):
        return None
    most = f", {host.busiest} the most," if host.busiest else ""
    return look.find(
        f"They{most} use {others:.1f} of {cpus:.0f} CPUs, and some task waited for a CPU in {pressure:.0%} of the last "
        "seconds. Move them to another host, or give the server CPUs of its own."
    )


def _kv_cache_full(look: _Look) -> Finding | None:
    evidence, lately = look.evidence, look.evidence.lately
    usage, preempts = evidence.kv_usage or 0.0, look.passes("preemptions", lately.preemptions)
    is_full = look.passes("usage", usage)
    if not preempts and (not is_full or not look.passes("waiting", evidence.waiting)):
        return None
    peak = max(usage, evidence.kv_usage_peak or 0.0)
    preempted = f"; {lately.preemptions:.0f} preemption(s) in {lately.within}, whose tokens were computed twice"
    title = "Requests are preempted for want of blocks" if preempts else ""
    if preempts and is_full:
        title = "The KV cache is full and requests are preempted"
    return look.find(
        f"Live requests hold {usage:.0%} of the KV cache's blocks, {peak:.0%} at most in {evidence.within}"
        f"{preempted * preempts}; {evidence.waiting:.0f} requests wait. Raise kv_cache_memory_bytes, lower "
        "max_num_seqs, or send less load.",
        title=title, level=Level.CRITICAL if preempts and is_full else None,
    )  # fmt: skip


def _is_cache_full(look: _Look, standing: Collection[str] = ()) -> bool:
    return _kv_cache_full(replace(look, cause="kv_cache_full", standing=standing)) is not None


def _slow_rank(look: _Look) -> Finding | None:
    seconds = look.evidence.rank_seconds
    if len(seconds) < 2:
        return None
    rank = max(seconds, key=lambda name: seconds[name])
    others = statistics.median(own for name, own in seconds.items() if name != rank)
    if others <= 0 or not look.passes("ratio", seconds[rank] / others):
        return None
    return look.find(
        f"Its steps take {1000 * seconds[rank]:.1f} ms, those of the others {1000 * others:.1f} ms; every step "
        "waits for the slowest rank. Look at what else runs on its cores or device.",
        title=f"Rank {rank} is slow",
    )


def _rejections(look: _Look) -> Finding | None:
    lately, number = look.evidence.lately, look.evidence.lately.misses.get("rejected", 0.0)
    detail = (
        f"{number:.0f} in {lately.within}, for want of room: the queue is full (max_queued_requests), or they would "
        "have waited for too long (max_queue_delay_ms)."
    )
    return look.find(detail) if number >= 1 else None


def _errors(look: _Look) -> Finding | None:
    lately, number = look.evidence.lately, look.evidence.lately.misses.get("error", 0.0)
    return look.find(f"{number:.0f} in {lately.within}; the log of the server names each.") if number >= 1 else None


def _invalid(look: _Look) -> Finding | None:
    lately = look.evidence.recent_invalid or look.evidence.lately
    if look.evidence.is_sleeping:  # which rejects all
        return None
    if lately.invalid < look.limit("requests") or not look.passes("share", lately.invalid / lately.ended):
        return None
    return look.find(
        f"{lately.invalid:.0f} of {lately.ended:.0f} in {lately.within} were rejected for what they asked, "
        "which costs the others nothing and misses no objective. The page Slow & failed says what is wrong with each."
    )


def _queue(look: _Look) -> Finding | None:
    evidence, lately, places = look.evidence, look.evidence.lately, look.evidence.max_num_seqs
    if not look.passes("waiting", evidence.waiting):
        return None
    full = places is not None and look.passes("taken", evidence.running / places)
    queued = look.passes("queued", (lately.queue_p95 or 0.0) / (lately.ttft_p95 or math.inf))
    if not full and not queued and not look.passes("crowded", evidence.waiting / (evidence.running + 1)):
        return None
    why = f"the {places} places of max_num_seqs are taken" if full else "more arrives than is served"
    advice = "Raise max_num_seqs if memory allows, add a replica, or send less load."
    if _is_cache_full(look, look.standing):  # which wants fewer at once, not more
        why, advice = "there is no room in the KV cache for more", "See to the KV cache first."
    return look.find(f"{evidence.waiting:.0f} wait while {evidence.running:.0f} run: {why}. {advice}")


def _long_prompts(look: _Look) -> Finding | None:
    evidence, lately = look.evidence, look.evidence.lately
    prefill, ttft = lately.prefill_p95, lately.ttft_p95
    is_missed = lately.misses.get("ttft", 0.0) >= 1 or lately.misses.get("tpot", 0.0) >= 1
    length, most, places = lately.mean_prompt_tokens, evidence.max_num_batched_tokens, evidence.max_num_seqs
    if not is_missed or not prefill or not ttft or not length or not most:
        return None
    has_room = places is not None and evidence.running < places and not _is_cache_full(look)
    if has_room:  # then requests wait for the tokens of a step
        prefill += lately.queue_p95 or 0.0
    if not look.passes("prefill", prefill / ttft) or not look.passes("length", length / most):
        return None
    return look.find(
        f"Of a time to first token of {ttft:.2f} s (p95), prefill takes {lately.prefill_p95:.2f} s and the "
        f"queue {lately.queue_p95 or 0.0:.2f} s. Prompts have {length:.0f} tokens on average, and a step has room for "
        f"{most}. Set long_prefill_token_threshold, or lower max_num_batched_tokens."
    )


def _grammar(look: _Look) -> Finding | None:
    waiting = look.evidence.waiting_for_grammar
    detail = f"{waiting:.0f} wait for theirs to be compiled, which is done once per grammar."
    return look.find(detail) if look.passes("waiting", waiting) else None


def _host_bound(look: _Look) -> Finding | None:
    seconds = look.evidence.step_seconds
    host, execute = seconds.get("schedule", 0.0) + seconds.get("update", 0.0), seconds.get("execute", 0.0)
    if not any(look.evidence.lately.misses.values()) or host == 0:
        return None
    if not look.passes("ratio", host / execute if execute else math.inf):
        return None
    return look.find(f"Schedule and update take {1000 * host:.1f} ms of a step, the model {1000 * execute:.1f} ms.")


def _no_slo(look: _Look) -> Finding | None:
    detail = (
        "Every request that ends without an error counts as good, however slow. Set targets in the model's "
        f"model.json, such as {SLO_EXAMPLE}"
    )
    return look.find(detail) if look.evidence.has_slo is False else None


_LOOKS: tuple[tuple[str, Callable[[_Look], Finding | None]], ...] = (
    ("server_restarts", _server_restarts), ("engine_down", _engine_down), ("asleep", _asleep), ("one_down", _one_down),
    ("not_served", _not_served), ("worker_down", _worker_down), ("engine_restarts", _engine_restarts),
    ("host_memory", _host_memory), ("host_cpu", _host_cpu), ("kv_cache_full", _kv_cache_full),
    ("slow_rank", _slow_rank), ("long_prompts", _long_prompts), ("queue", _queue), ("rejections", _rejections),
    ("errors", _errors), ("invalid", _invalid), ("host_bound", _host_bound), ("grammar", _grammar),
    ("no_slo", _no_slo),
)  # fmt: skip
