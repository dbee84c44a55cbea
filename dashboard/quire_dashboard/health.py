"""Health in words: whether users are served within their SLO, and if not, the likely cause.

A pure function of /metrics and the snapshot.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from quire_dashboard.findings import SLO_EXAMPLE, find, find_away
from quire_dashboard.symptoms import Evidence, Finding, Level, Window

__all__ = ["SLO_EXAMPLE", "Evidence", "Finding", "Health", "Level", "Window", "assess"]

OBJECTIVE = 0.99
"""Of a class that says none: below this share of good requests, users count as affected."""
MANY = 10.0
"""So many times more misses than the objective allows are critical."""
ONE_OF_MANY = 0.9
"""A single miss is chance, if so large a share was good."""


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
        away = find_away(evidence)
        return Health(level=away.level, headline=f"{away.title}.", findings=(away,))
    if not evidence.has_model:
        finding = Finding(
            level=Level.WARNING, cause="no_model", title="No model of Quire is loaded",
            detail="/metrics is there, but holds no series of Quire. A model that does not load says why in the log.",
        )  # fmt: skip
        return Health(
            level=Level.WARNING, headline="The server runs, but serves no model of Quire.", findings=(finding,)
        )
    findings = find(evidence, standing)
    served = _goodput_level(evidence)
    level = max([served, *(finding.level for finding in findings)])
    return Health(level=level, headline=_headline(evidence, served, findings), findings=findings)


def _goodput_level(evidence: Evidence) -> Level:
    return max((_level_of(evidence, slo) for slo in evidence.goodput), default=Level.OK)


def _level_of(evidence: Evidence, slo: str) -> Level:
    burn = _burn(evidence, slo)
    return Level.OK if burn <= 1 else Level.WARNING if burn <= MANY else Level.CRITICAL


def _burn(evidence: Evidence, slo: str) -> float:
    """How many times more misses a class has than its objective allows, to the accuracy of shares: in the last minute
    and still (Site Reliability Workbook, chapter 5: a long window says that it matters, a short one that it goes on).
    """
    share, lately = evidence.goodput[slo], evidence.lately.goodput
    if evidence.missed.get(slo) == 1 and share >= ONE_OF_MANY:
        return 0.0
    if lately or evidence.running + evidence.waiting == 0:  # else none has ended, so whatever was may go on
        share = max(share, lately.get(slo, 1.0))
    return round((1 - share) / (1 - evidence.objectives.get(slo, OBJECTIVE)), 6)


def _headline(evidence: Evidence, served: Level, findings: tuple[Finding, ...]) -> str:
    findings = tuple(finding for finding in findings if finding.cause != "no_slo")  # which causes nothing
    cause = f" Likely cause: {findings[0].title[0].lower()}{findings[0].title[1:]}." if findings else ""
    if evidence.engine_up is False:
        return "Nobody is being served: the engine is down."
    if served is not Level.OK:
        slo = max(evidence.goodput, key=lambda name: _burn(evidence, name))
        worst = evidence.goodput[slo]
        if evidence.has_slo is False:
            return f"Users are affected: only {_share(worst)} of the requests end without an error.{cause}"
        cause = cause or f" {_first_cause(evidence)}"
        return f"Users are affected: only {_share(worst)} of the requests of class {slo} meet their SLO.{cause}"
    if findings and not evidence.goodput:
        return f"No request has ended in the last minute, and: {findings[0].title[0].lower()}{findings[0].title[1:]}."
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
