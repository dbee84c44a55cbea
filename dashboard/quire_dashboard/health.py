"""Health in words: whether users are served within their SLO, and if not, the likely cause.

A pure function of /metrics and the snapshot.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from quire_client.symptoms import OBJECTIVE, SYMPTOMS, Level

from quire_dashboard.evidence import Evidence
from quire_dashboard.findings import Finding, find, find_away

_BURNS = ("slo_slowest", "slo")
"""Symptoms by whose burn users are affected, and critically."""
STICKS = 1.5
"""Another class is the worst one once it has so many times the misses of the one that was."""
ONE_OF_MANY = 0.9
"""A single miss is chance, if so large a share was good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The verdict."""

    level: Level
    headline: str
    findings: tuple[Finding, ...] = ()
    """The likely cause first; empty if all is well."""
    standing: tuple[str, ...] = ()
    """What the next verdict on the same model has to know of this one, so that words do not change to and fro."""


def assess(evidence: Evidence, standing: Collection[str] = ()) -> Health:
    """Judge one model.

    Args:
        evidence: on it.
        standing: of the last verdict: what was found stays until it is clearly over.
    """
    if evidence.server_error or not evidence.has_model:
        away = find_away(evidence)
        headline = f"{away.title}." if evidence.server_error else "The server runs, but serves no model of Quire."
        return Health(level=away.level, headline=headline, findings=(away,))
    findings = find(evidence, standing)
    sticks = {slo: STICKS if f"slo {slo}" in standing else 1.0 for slo in evidence.goodput}
    worst = max(sticks, key=lambda slo: _burn(evidence, slo) * sticks[slo], default="")
    burn = _burn(evidence, worst)
    served = max(
        symptom.level if burn > symptom.limits["burn"].at(symptom.level.name in standing) else Level.OK
        for symptom in map(SYMPTOMS.__getitem__, _BURNS)
    )
    affected = (f"slo {worst}", Level.WARNING.name, served.name) if served > Level.OK else ()
    return Health(
        level=max([served, *(finding.level for finding in findings)]),
        headline=_headline(evidence, served, worst, findings),
        findings=findings,
        standing=(*(finding.cause for finding in findings), *affected),
    )


def _burn(evidence: Evidence, slo: str) -> float:
    """How many times more misses a class has than its objective allows, to the accuracy of shares: in the last minute
    and still (Site Reliability Workbook, chapter 5: a long window says that it matters, a short one that it goes on).
    """
    lately = evidence.lately.goodput
    burn = _burn_of_minute(evidence, slo)
    if lately or evidence.running + evidence.waiting == 0:  # else none has ended, so whatever was may go on
        burn = min(burn, _missed_per_allowed(evidence, slo, lately.get(slo, 1.0)))
    return burn


def _burn_of_minute(evidence: Evidence, slo: str) -> float:
    share = evidence.goodput.get(slo, 1.0)
    is_chance = evidence.missed.get(slo) == 1 and share >= ONE_OF_MANY
    return 0.0 if is_chance else _missed_per_allowed(evidence, slo, share)


def _missed_per_allowed(evidence: Evidence, slo: str, share: float) -> float:
    return round((1 - share) / (1 - evidence.objectives.get(slo, OBJECTIVE)), 6)


def _headline(evidence: Evidence, served: Level, worst: str, findings: tuple[Finding, ...]) -> str:
    """The share that it names is that of the figure of the same class: of the last minute, even when that is over."""
    findings = tuple(finding for finding in findings if finding.cause != "no_slo")  # which causes nothing
    first = f"{findings[0].title[0].lower()}{findings[0].title[1:]}." if findings else ""
    within = evidence.within
    if evidence.engine_up is False:
        return "Nobody is being served: the engine is down."
    if evidence.is_sleeping:
        return "The engine sleeps: an operator has freed its memory."
    if served is not Level.OK:
        cause = f"Likely cause: {first}" if findings else ""
        share = _share(evidence.goodput[worst])
        if evidence.has_slo is False:
            return f"Users are affected: only {share} of the requests end without an error. {cause}".strip()
        cause = cause or _first_cause(evidence)
        return f"Users are affected: only {share} of the requests of class {worst} meet their SLO. {cause}"
    if not evidence.goodput:
        if findings:
            return f"No request has ended in {within}, and: {first}"
        if evidence.running + evidence.waiting == 0:
            return "The server is up and idle."
        return f"The server is up; no request has ended in {within}."
    if evidence.has_slo is False:
        if findings:
            return f"No SLO is set, and: {first}"
        return f"No SLO is set: nothing says what would be good enough. No request has failed in {within}."
    if findings:
        return f"Users are served within their SLO, but: {first}"
    over = max(evidence.goodput, key=lambda slo: _burn_of_minute(evidence, slo))
    if _burn_of_minute(evidence, over) > SYMPTOMS["slo_slowest"].limits["burn"].begins:
        return (
            f"Users are served within their SLO again; of the requests of class {over} in {within} only "
            f"{_share(evidence.goodput[over])} were."
        )
    return "Users are served within their SLO."


def _share(value: float) -> str:
    """Rounded down, so that a little less than all is not said to be all."""
    return f"{math.floor(100 * value)}%" if value < 0.99 else f"{math.floor(1000 * value) / 10}%"


def _first_cause(evidence: Evidence) -> str:
    if not evidence.misses:
        return "The cause is not known."
    cause = max(evidence.misses, key=lambda name: evidence.misses[name])
    return f"Most of them miss {_TARGETS.get(cause, cause)}."


_TARGETS = {
    "ttft": "the time to first token", "tpot": "the time per output token", "e2e": "the end-to-end latency",
    "rejected": "because they are rejected", "error": "because they fail",
}  # fmt: skip
