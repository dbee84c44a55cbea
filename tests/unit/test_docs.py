"""The documentation: its links lead somewhere, its index names every page, and its settings exist."""

import re
from pathlib import Path

import pytest
from quire_engine.config.engine_config import setting_names
from support.serving import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name}: there is no {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target} has no such heading"


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_every_setting_has_a_row() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    table = text[text.index("| setting |") : text.index("An unknown name")]
    rows = {name for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    assert set(setting_names()) - {"disable_log_stats"} <= rows  # that is vLLM's, and in the row of `metrics`
    assert rows <= {*setting_names(), "revision"}


def test_settings_that_the_operators_page_names_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`\"(\w+)\":", text))
    first = re.findall(r"^\| `([a-z_]+)` [^|]*\| [^|]*\|$", text, re.MULTILINE)
    assert first
    assert {*named, *first} - {"slo_class"} <= set(setting_names())
