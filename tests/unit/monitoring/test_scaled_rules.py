"""Rules with less patience, for tests of alerts with a real server: what is divided, and what is not."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.prometheus import FILES, scale_durations
from support.promql import run_tool

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("rate(x_total[5m]) / quire:y:rate5m > 14.4", "rate(x_total[5000ms]) / quire:y:rate5m > 14.4"),
        ("max_over_time(x[1h30m:1m] offset 2m)", "max_over_time(x[90000ms:1000ms] offset 2000ms)"),
        ("        for: 30s\n", "        for: 500ms\n"),
        ("  scrape_interval: 5s  # often\n", "  scrape_interval: 83ms  # often\n"),
        ("  - group_wait: 30s", "  - group_wait: 500ms"),
        ('description: "waits for: 5m at a time, for five minutes"', None),
        ('x{phase="5m"}[2h]', 'x{phase="5m"}[120000ms]'),
        ("values: '1x8 0x20'", None),
        ('queries: ["5m", [5]]', None),
    ],
)
def test_durations_are_divided_and_nothing_else_is(text: str, scaled: str | None) -> None:
    assert scale_durations(text, 60) == (text if scaled is None else scaled)


def test_what_would_become_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="30s / 60000"):
        scale_durations("for: 30s", 60_000)


def test_the_repository_s_rules_differ_in_nothing_but_durations(tmp_path: Path) -> None:
    def seconds(value: str) -> float:
        return float(value[:-2]) / 1000 if value.endswith("ms") else float(value[:-1]) * _UNITS[value[-1]]

    def strip(rule: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in rule.items() if key not in ("expr", "for")}

    num_durations = 0
    for file in ("recording_rules.yml", "alerts.yml"):
        text = (FILES / file).read_text(encoding="utf-8")
        (tmp_path / file).write_text(scale_durations(text, 60), encoding="utf-8")
        before = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
        after = [rule for group in yaml.safe_load((tmp_path / file).read_text())["groups"] for rule in group["rules"]]
        for rule, scaled in zip(before, after, strict=True):
            assert strip(rule) == strip(scaled)
            if "for" in rule:
                assert seconds(scaled["for"]) == pytest.approx(seconds(rule["for"]) / 60)
                num_durations += 1
            was, now = rule["expr"].split("["), scaled["expr"].split("[")
            assert was[0] == now[0]
            for old, new in zip(was[1:], now[1:], strict=True):
                (old_range, old_rest), (new_range, new_rest) = old.split("]", 1), new.split("]", 1)
                assert old_rest == new_rest
                assert seconds(new_range) == pytest.approx(seconds(old_range) / 60)
                num_durations += 1
        run_tool("promtool", "check", "rules", file, cwd=tmp_path)
    assert num_durations > 40
