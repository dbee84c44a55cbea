"""A run as an SVG picture: how times are distributed, and time to first token over the run. Needs no library."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from quire_load.load import RequestRecord
from quire_load.report import METRICS, Report
from quire_load.server_figures import ServerFigures

PANEL_WIDTH, PANEL_HEIGHT, MARGIN, HEAD = 440, 250, 56, 54
MOST_POINTS = 400
"""Of a line; a picture of a million gaps between tokens would be no better for more."""
INK, GREY, LINE, OURS, SERVERS, BAD = "#1a1d21", "#6a737d", "#d8dde3", "#0f766e", "#c2410c", "#b91c1c"


def draw(report: Report, records: Sequence[RequestRecord], title: str, server: ServerFigures | None = None) -> str:
    """The picture.

    Args:
        report: of the records.
        records: of the run's requests.
        title: of the picture.
        server: the server's own figures, drawn as dots: one for each bucket.
    """
    panels = [_distribution(name, report.times_ms[name], server) for name in report.times_ms]
    panels.append(_over_time(records))
    rows = (len(panels) + 1) // 2
    width, height = 2 * (PANEL_WIDTH + MARGIN) + MARGIN, HEAD + rows * (PANEL_HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>', _text(MARGIN, 30, title, 17, INK),
    ]  # fmt: skip
    for number, panel in enumerate(panels):
        left = MARGIN + number % 2 * (PANEL_WIDTH + MARGIN)
        top = HEAD + MARGIN // 2 + number // 2 * (PANEL_HEIGHT + 2 * MARGIN)
        parts.append(f'<g transform="translate({left},{top})">{panel}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _distribution(name: str, times: Sequence[float], server: ServerFigures | None) -> str:
    """Share of the requests, or gaps, that took at most so long."""
    histogram = server.histograms[name] if server is not None else None
    dots = [] if histogram is None else [(1000 * bound, count) for bound, count in histogram.buckets]
    most = times[-1] if times else 0.0
    dots = [
        (bound, count / histogram.count) for bound, count in dots if histogram and histogram.count and bound <= most
    ]
    x, y = _scale(most), _flipped(1.0)
    stride = max(1, len(times) // MOST_POINTS)
    points = [(x(time), y((i + 1) / len(times))) for i, time in enumerate(times) if i % stride == 0 or time == most]
    body = [_axes(f"{METRICS[name]} (ms), share at most that", most, 1.0)]
    if points:
        body.append(_line(points))
    body += [f'<circle cx="{x(bound):.1f}" cy="{y(share):.1f}" r="3" fill="{SERVERS}"/>' for bound, share in dots]
    if dots:
        body.append(_text(PANEL_WIDTH - 150, PANEL_HEIGHT - 12, "● the server's buckets", 11, SERVERS))
    return "".join(body)


def _over_time(records: Sequence[RequestRecord]) -> str:
    """Each request's time to first token, or to its vector, at the time when it was due."""
    gives_vectors = any(record.is_vector for record in records)
    shown = sorted(records, key=lambda record: record.scheduled_s)
    shown = shown[:: max(1, len(shown) // (5 * MOST_POINTS))]
    last = max((record.scheduled_s for record in shown), default=0.0)
    times = [(record.e2el_s if gives_vectors else record.ttft_s) or 0.0 for record in shown]
    most = max(times, default=0.0)
    x, y = _scale(last), _flipped(most)
    name = METRICS["e2el" if gives_vectors else "ttft"]
    body = [_axes(f"{name} (s) by when the request was due (s)", last, most)]
    for record, time in zip(shown, times, strict=True):
        colour = BAD if record.error_kind else OURS
        body.append(f'<circle cx="{x(record.scheduled_s):.1f}" cy="{y(time):.1f}" r="2" fill="{colour}"/>')
    if any(record.error_kind for record in shown):
        body.append(_text(PANEL_WIDTH - 60, 14, "● failed", 11, BAD))
    return "".join(body)


def _scale(most: float) -> Callable[[float], float]:
    return lambda value: PANEL_WIDTH * value / (most or 1.0)


def _flipped(most: float) -> Callable[[float], float]:
    return lambda value: PANEL_HEIGHT * (1 - value / (most or 1.0))


def _axes(title: str, most_x: float, most_y: float) -> str:
    ticks: Mapping[float, str] = {share: f"{share * most_x:.3g}" for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    parts = [_text(0, -10, title, 12, INK)]
    for share, label in ticks.items():
        down = PANEL_HEIGHT * (1 - share)
        parts.append(f'<path d="M0 {down:.1f}H{PANEL_WIDTH}" stroke="{LINE}"/>')
        parts.append(_text(-6, down + 4, f"{share * most_y:.3g}", 10, GREY, "end"))
        parts.append(_text(PANEL_WIDTH * share, PANEL_HEIGHT + 16, label, 10, GREY, "middle"))
    return "".join(parts)


def _line(points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{OURS}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, size: int, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
