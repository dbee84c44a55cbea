"""What a dashboard of Grafana's is made of here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart: queries with their legends."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """Each a PromQL expression and the legend of its series."""
    description: str
    unit: str = "short"
    kind: str = "timeseries"
    """`timeseries`, `stat` or `heatmap`."""
    maximum: float | None = None
    is_stacked: bool = False
    red_below: float | None = None
    """A stat is red below this value; a chart has a line there."""
    red_above: float | None = None
    """The same, the other way round."""
    page: str | None = None
    """The page of Quire's own dashboard that shows more of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels side by side, sharing the whole width."""

    panels: tuple[Panel, ...]
    height: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    rows: tuple[Row, ...]
