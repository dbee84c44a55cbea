"""What can be wrong with a model, each by its evidence: the cause, and what to do about it.

Those that explain the most come first: an engine that is down explains every miss, a full KV cache explains
preemptions, and those explain a bad time to first token.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from quire_dashboard.symptoms import NOW_S, UNTIL_OVER, Evidence, Finding, Level

SHORT_LIFE_S = 60.0
"""A server that dies so soon after it was started again dies again and again."""


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
WAITING = Limit(1.0, 0.5)
"""Requests that wait, in the mean of some seconds."""
TAKEN = Limit(1.0, 0.8)
"""Share of the places of `max_num_seqs`."""
HOST_BOUND = Limit(1.0, 0.8)
"""Scheduling's time per the model's."""
INVALID = Limit(0.1, 0.05)
"""Share of the requests that are rejected for what they ask."""
FEW_INVALID = 5.0
"""Fewer are a client that is being tried out."""
CPU_PRESSURE = Limit(0.5, 0.4)
"""Share of the time in which some task waits for one of the host's CPUs."""
OTHERS = Limit(0.4, 0.3)
"""Share of the host's CPUs that processes other than the server's use."""
MEMORY_PRESSURE = Limit(0.1, 0.05)
"""Share of the time in which some task waits for memory."""
SLO_EXAMPLE = '"slo": {"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}}'
"""For `model.json`."""


def find(evidence: Evidence, standing: Collection[str]) -> tuple[Finding, ...]:
    """All that is wrong, the likely cause first.

    Args:
        evidence: on a model whose /metrics could be read.
        standing: the causes that were found the last time; they stay until they are clearly over.
    """
    return tuple(found for look in _LOOKS if (found := look(evidence, standing)) is not None)


def find_away(evidence: Evidence) -> Finding:
    """Why there are no figures of now."""
    if evidence.only_metrics_away:
        return Finding(
            level=Level.WARNING, cause="metrics_away", title="The server answers, but its metrics cannot be read",
            detail=f"{evidence.server_error}. Requests may be served as ever, unseen. Look at the address, at "
            "what is in between, and whether metrics were switched off (--allow-metrics).",
        )  # fmt: skip
    known = filter(None, (evidence.server_death, *evidence.problems))
    died = "".join(f" {_sentence(one)}" for one in known)
    if evidence.server_restarts and evidence.server_restarts[0] < SHORT_LIFE_S:
        return Finding(
            level=Level.CRITICAL, cause="server_restarts", title="The server dies again and again",
            detail=f"It does not answer: {evidence.server_error}.{died} It had been started again "
            f"{len(evidence.server_restarts)} time(s) in ten minutes, the last time {evidence.server_restarts[0]:.0f} "
            "s before. The output of quire serve says how it ended each time.",
        )  # fmt: skip
    return Finding(
        level=Level.CRITICAL, cause="server_away", title="The server does not answer",
        detail=f"{evidence.server_error}.{died} Look at the output of quire serve, or of tritonserver.",
    )  # fmt: skip


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _cause(death: str) -> str:
    """A sentence and a space; empty if nothing is known."""
    return f"{_sentence(death)} " if death else ""


def _engine_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if evidence.engine_up is not False:
        return None
    return Finding(
        level=Level.CRITICAL, cause="engine_down", title="The engine is down",
        detail=f"{_cause(evidence.engine_death)}It is started again by itself, and live requests go on then. If it "
        "stays down, its log says why.",
    )  # fmt: skip


def _one_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not (evidence.one_down and evidence.engine_up):
        return None
    return Finding(
        level=Level.WARNING, cause="one_down", title=f"{_which(evidence.engines_down) or _ONE_OF_SEVERAL} is down",
        detail=f"{_cause(evidence.engine_death)}The others serve. It is started again by itself; if it is a replica "
        "(data_parallel_size), its live requests have gone on on the others. If it stays down, its log says why.",
    )  # fmt: skip


_ONE_OF_SEVERAL = "One of the model's engines"


def _which(engines: Sequence[str]) -> str:
    """`Engine 1`; empty of a single one, or if it is not known."""
    return f"Engine {', '.join(engines)}" if engines else ""


def _not_served(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not evidence.problems or evidence.engine_up is False or evidence.one_down:
        return None
    return Finding(
        level=Level.CRITICAL, cause="not_served", title="Requests are not served",
        detail=f"{' '.join(map(_sentence, evidence.problems))} That is what quire serve sees; it starts again what "
        "does not move for ten seconds.",
    )  # fmt: skip


def _worker_down(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not evidence.workers_down:
        return None
    return Finding(
        level=Level.CRITICAL, cause="worker_down", title=f"Rank {', '.join(evidence.workers_down)} is down",
        detail="No step can be computed without all ranks. The engine is started again with all of them.",
    )  # fmt: skip


def _goes_on(restarts: Sequence[float], least: int) -> bool:
    """Whether so many restarts are a loop, and the last of them is not long enough ago to have ended it.

    ::

        restarts       |      |      |             at least as many, and no longer since the last one
        now                             ▲          than `UNTIL_OVER` times what was between the last two
    """
    if len(restarts) < max(least, 2):
        return False
    return restarts[0] <= max(NOW_S, UNTIL_OVER * (restarts[1] - restarts[0]))


def _is_recent(restarts: Sequence[float]) -> bool:
    return bool(restarts) and restarts[0] <= NOW_S


def _server_restarts(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    often = _goes_on(evidence.server_restarts, 2)
    if not often and not _is_recent(evidence.server_restarts):
        return None
    return Finding(
        level=Level.CRITICAL if often else Level.WARNING, cause="server_restarts",
        title="The server dies again and again" if often else "The server was started again",
        detail=f"{len(evidence.server_restarts)} start(s) in the last ten minutes, the latest "
        f"{evidence.server_restarts[0]:.0f} s ago. {_cause(evidence.server_death)}Whatever ran then was lost. The "
        "output of quire serve says how it ended each time.",
    )  # fmt: skip


def _crash_loop(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    often = _goes_on(evidence.restarts, 3)
    if not often and not _is_recent(evidence.restarts):  # one that is over explains nothing of now
        return None
    return Finding(
        level=Level.CRITICAL if often else Level.WARNING, cause="engine_restarts",
        title=f"{_which(evidence.engines_restarted) or 'The engine'} "
        f"{'crashes again and again' if often else 'was restarted'}",
        detail=f"{len(evidence.restarts)} restart(s) in the last five minutes, the latest {evidence.restarts[0]:.0f} s "
        f"ago. {_cause(evidence.engine_death)}Live requests were replayed and saw a pause; the log of the server names "
        "the cause.",
    )  # fmt: skip


def _host(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    return _pressure(evidence, standing) if _is_late(evidence) else None


def _host_unfelt(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    """It comes last, as it explains none of the others."""
    is_served = evidence.ended + evidence.running + evidence.waiting + evidence.held > 0
    return _pressure(evidence, standing) if is_served and not _is_late(evidence) else None


def _is_late(evidence: Evidence) -> bool:
    """Whether requests miss a target of time: pressure makes nothing fail."""
    return any(evidence.lately.misses.get(target) for target in ("ttft", "tpot", "e2e"))


def _pressure(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    host = evidence.host
    if MEMORY_PRESSURE.is_passed(host.memory_pressure, "host_memory" in standing):
        return Finding(
            level=Level.WARNING, cause="host_memory", title="The host is short of memory",
            detail=f"Some task waited for memory in {host.memory_pressure:.0%} of the last seconds. Look at what else "
            "runs there, and give the server less (kv_cache_memory_bytes) or the host more.",
        )  # fmt: skip
    stands = "host_cpu" in standing
    others = OTHERS.is_passed(host.cpus_of_others / max(host.cpus, 1.0), stands)
    if not others or not CPU_PRESSURE.is_passed(host.cpu_pressure, stands):
        return None
    most = f", {host.busiest} the most," if host.busiest else ""
    return Finding(
        level=Level.WARNING, cause="host_cpu", title="Other processes take the host's CPUs",
        detail=f"They{most} use {host.cpus_of_others:.1f} of {host.cpus:.0f} CPUs, and some task waited for a CPU in "
        f"{host.cpu_pressure:.0%} of the last seconds. Move them to another host, or give the server CPUs of its own.",
    )  # fmt: skip


def _kv_cache_full(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    lately, stands = evidence.lately, "kv_cache_full" in standing
    usage, preempts = evidence.kv_usage or 0.0, lately.preemptions >= 1
    is_full = FULL.is_passed(usage, stands)
    if not preempts and (not is_full or not WAITING.is_passed(evidence.waiting, stands)):
        return None
    peak = max(usage, evidence.kv_usage_peak or 0.0)
    preempted = f"; {lately.preemptions:.0f} preemption(s) in {lately.within}, whose tokens were computed twice"
    title = "The KV cache is full"
    if preempts:
        title = f"{title} and requests are preempted" if is_full else "Requests are preempted for want of blocks"
    return Finding(
        level=Level.CRITICAL if preempts and is_full else Level.WARNING, cause="kv_cache_full", title=title,
        detail=f"Live requests hold {usage:.0%} of the KV cache's blocks, {peak:.0%} at most in {evidence.within}"
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
    lately = evidence.lately
    if lately.misses.get("rejected", 0.0) < 1:
        return None
    return Finding(
        level=Level.WARNING, cause="rejections", title="Requests are rejected",
        detail=f"{lately.misses['rejected']:.0f} in {lately.within}, for want of room: the queue is full "
        "(max_queued_requests), or they would have waited for too long (max_queue_delay_ms).",
    )  # fmt: skip


def _errors(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    lately = evidence.lately
    if lately.misses.get("error", 0.0) < 1:
        return None
    return Finding(
        level=Level.WARNING, cause="errors", title="Requests fail",
        detail=f"{lately.misses['error']:.0f} in {lately.within}; the log of the server names each.",
    )  # fmt: skip


def _invalid(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    lately = evidence.recent_invalid or evidence.lately
    if lately.invalid < FEW_INVALID or not INVALID.is_passed(lately.invalid / lately.ended, "invalid" in standing):
        return None
    return Finding(
        level=Level.WARNING, cause="invalid", title="A client sends invalid requests",
        detail=f"{lately.invalid:.0f} of {lately.ended:.0f} in {lately.within} were rejected for what they asked, "
        "which costs the others nothing and misses no objective. The page Slow & failed says what is wrong with each.",
    )  # fmt: skip


def _queue(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    stands = "queue" in standing
    if not WAITING.is_passed(evidence.waiting, stands):
        return None
    full = evidence.max_num_seqs is not None and TAKEN.is_passed(evidence.running / evidence.max_num_seqs, stands)
    queued = (evidence.lately.queue_p95 or 0.0) > 0.5 * (evidence.lately.ttft_p95 or float("inf"))
    crowded = CROWDED.is_passed(evidence.waiting / (evidence.running + 1), stands)
    if not full and not queued and not crowded:
        return None
    why = f"the {evidence.max_num_seqs} places of max_num_seqs are taken" if full else "more arrives than is served"
    advice = "Raise max_num_seqs if memory allows, add a replica, or send less load."
    if _kv_cache_full(evidence, standing) is not None:  # which wants fewer at once, not more
        why, advice = "there is no room in the KV cache for more", "See to the KV cache first."
    return Finding(
        level=Level.WARNING, cause="queue", title="Requests wait in the queue",
        detail=f"{evidence.waiting:.0f} wait while {evidence.running:.0f} run: {why}. {advice}",
    )  # fmt: skip


def _long_prompts(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    lately = evidence.lately
    prefill, ttft = lately.prefill_p95, lately.ttft_p95
    is_missed = lately.misses.get("ttft", 0.0) >= 1 or lately.misses.get("tpot", 0.0) >= 1
    length, most = lately.mean_prompt_tokens, evidence.max_num_batched_tokens
    if not is_missed or not prefill or not ttft or not length or not most:
        return None
    stands = "long_prompts" in standing
    if _has_room(evidence):  # then it is for the tokens of a step that requests wait
        prefill += lately.queue_p95 or 0.0
    if not LONG_PREFILL.is_passed(prefill / ttft, stands) or not LONG_PROMPT.is_passed(length / most, stands):
        return None
    return Finding(
        level=Level.WARNING, cause="long_prompts", title="Long prompts hold up the batch",
        detail=f"Of a time to first token of {ttft:.2f} s (p95), prefill takes {lately.prefill_p95:.2f} s and the "
        f"queue {lately.queue_p95 or 0.0:.2f} s. Prompts have {length:.0f} tokens on average, and a step has room for "
        f"{most}. Set long_prefill_token_threshold, or lower max_num_batched_tokens.",
    )  # fmt: skip


def _has_room(evidence: Evidence) -> bool:
    """Whether there are places and blocks for more requests."""
    places = evidence.max_num_seqs
    return places is not None and evidence.running < places and _kv_cache_full(evidence, ()) is None


def _grammar(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    if not WAITING.is_passed(evidence.waiting_for_grammar, "grammar" in standing):
        return None
    return Finding(
        level=Level.OK, cause="grammar", title="Requests wait for their grammar",
        detail=f"{evidence.waiting_for_grammar:.0f} wait for theirs to be compiled, which is done once per grammar.",
    )  # fmt: skip


def _scheduling(evidence: Evidence, standing: Collection[str]) -> Finding | None:
    host = evidence.step_seconds.get("schedule", 0.0) + evidence.step_seconds.get("update", 0.0)
    execute = evidence.step_seconds.get("execute", 0.0)
    if not any(evidence.lately.misses.values()) or host == 0:
        return None
    if not HOST_BOUND.is_passed(host / execute if execute else math.inf, "host_bound" in standing):
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
    _server_restarts, _engine_down, _one_down, _not_served, _worker_down, _crash_loop, _host, _kv_cache_full,
    _slow_rank, _long_prompts, _queue, _rejections, _errors, _invalid, _scheduling, _host_unfelt,
    _grammar, _no_slo,
)  # fmt: skip
