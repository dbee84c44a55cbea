"""A snapshot read, and what is drawn of it."""

import base64
import io
import json
import math
import re
from collections import Counter
from datetime import datetime, timezone

import msgspec
import pytest
from PIL import Image, ImageColor
from quire_client.snapshot import Blocks, RequestState, Segment, Snapshot
from quire_dashboard.block_map import BLOCK_COLOURS, MOST_CELLS, blocks_by_state, colours_of, draw, lay_out
from quire_dashboard.charts import PHASE_COLOURS, SERIES_COLOURS, line_spec, points_table, timeline_table
from quire_dashboard.events import ENGINE_RESTARTED, EVENT_COLOURS, Event
from quire_dashboard.history import Point
from quire_dashboard.words import per_second, percent, seconds
from support.fake_triton import make_request, make_snapshot


def snapshot() -> Snapshot:
    return msgspec.json.decode(json.dumps(make_snapshot()), type=Snapshot)


def test_a_snapshot_is_read() -> None:
    seen = snapshot()
    assert (seen.model, seen.engine.ranks[0].step_seconds_p50, seen.requests[0].label) == ("tinypy", 0.021, "report")


def test_one_of_another_version_is_read_too() -> None:
    said = {"engine": {"up": True, "news": 1}, "requests": [{"id": "a", "max_tokens": None}], "more": 2}
    seen = msgspec.convert(said, Snapshot)
    assert seen.engine.up
    assert seen.requests[0].max_tokens is None
    assert seen.blocks.num_blocks == 0


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], []),
        ([("queue", 10.0)], [("queue", 10, 0)]),
        ([("queue", 10.0), ("prefill", 6.0)], [("queue", 10, 6), ("prefill", 6, 0)]),
        ([("held", 10.0), ("queue", 8.0), ("decode", 8.0), ("held", 3.0), ("replayed", 1.0)],
         [("held", 10, 8), ("decode", 8, 3), ("held", 3, 1), ("replayed", 1, 0)]),
    ],
)  # fmt: skip
def test_a_requests_life_is_cut_where_its_phase_changed(
    phases: list[tuple[str, float]], expected: list[tuple[str, float, float]]
) -> None:
    said = make_request("x", age_seconds=10.0, phases=phases)
    (seen,) = msgspec.convert({"engine": {}, "requests": [said]}, Snapshot).requests
    assert seen.segments() == [Segment(*segment) for segment in expected]


def test_the_timeline_ends_now() -> None:
    columns = timeline_table(snapshot().requests, {item.id: item.label for item in snapshot().requests}).to_pydict()
    assert columns["start"][0] == -5.0
    assert columns["end"][-1] == 0.0
    assert set(columns["request"]) == {"report", "chat"}


# -- the block map ----------------------------------------------------------------------------------------------------


def picture_of(html: str) -> Image.Image:
    found = re.search(r"image/png;base64,([^\"]+)\"", html)
    assert found is not None
    return Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGBA")


def colours(seen: Snapshot) -> dict[str, str]:
    return colours_of([item.id for item in seen.requests], {})


def test_no_two_requests_share_a_colour_while_there_are_others_and_each_keeps_its_own() -> None:
    ids = [f"{number}" for number in range(len(BLOCK_COLOURS))]
    first = colours_of(ids, {})
    assert len(set(first.values())) == len(ids)
    later = colours_of(["new", *ids[3:]], first)
    assert {id_: later[id_] for id_ in ids[3:]} == {id_: first[id_] for id_ in ids[3:]}
    assert len(set(later.values())) == len(later)
    assert max(Counter(colours_of([*ids, *"abc"], first).values()).values()) == 2


@pytest.mark.parametrize("background", ["#ffffff", "#171614"])
def test_every_colour_is_seen_on_a_light_and_on_a_dark_page(background: str) -> None:
    """WCAG 2.2, 1.4.11: what must be seen to understand a picture has a contrast of 3 to 1."""

    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in {*SERIES_COLOURS, *PHASE_COLOURS.values(), *EVENT_COLOURS.values(), *BLOCK_COLOURS}:
        dark, light = sorted((luminance(colour), luminance(background)))
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_blocks_are_counted_by_state() -> None:
    assert blocks_by_state(snapshot().blocks) == {"used": 8, "cached": 16, "free": 40, "shared": 2}


def test_every_block_is_drawn_once() -> None:
    seen = snapshot()
    picture = picture_of(draw(seen.blocks, seen.requests, ["report", "chat"], colours(seen)))
    corners = [picture.getpixel((20 * (block % 16), 20 * (block // 16))) for block in range(64)]
    assert picture.size == (20 * 16, 20 * 4)
    expected = [ImageColor.getcolor(colours(seen)[one.id], "RGBA") for one in seen.requests]
    grey = 128, 128, 128
    assert Counter(corners) == {expected[0]: 4, expected[1]: 4, (*grey, 140): 16, (*grey, 41): 40}
    dots = [picture.getpixel((20 * block + 8, 8)) == (255, 255, 255, 255) for block in range(16)]
    assert dots == [True] * 2 + [False] * 14, "two blocks are shared"


def test_names_of_clients_are_escaped() -> None:
    seen = snapshot()
    html = draw(seen.blocks, seen.requests, ["<script>alert(1)</script>", '"><img src=x>'], colours(seen))
    assert "<script" not in html
    assert '"><img src=x' not in html


def large(num_used: int, num_blocks: int) -> Blocks:
    """Every second block of the first ones is used."""
    owner = [0, -1] * num_used + [-1] * (num_blocks - 2 * num_used)
    return Blocks(block_size=16, num_blocks=num_blocks, owner=owner, ref_count=[1, 0] * num_used, cached=[])


def test_twenty_thousand_blocks_are_each_seen() -> None:
    assert lay_out(large(5_000, 20_000)).blocks_per_cell == 1
    html = draw(large(5_000, 20_000), [RequestState(id="a")], ["a"], {"a": "#000"})
    assert "Each square" not in html
    assert len(html) < 100_000
    picture = picture_of(html)
    size = picture.width // 256
    cells = [picture.getpixel((size * (block % 256), size * (block // 256))) for block in range(20_000)]
    assert cells.count((0, 0, 0, 255)) == 5_000


def test_of_a_very_large_cache_several_blocks_share_a_square() -> None:
    blocks = large(25_000, 100_001)
    picture = lay_out(blocks)
    assert picture.blocks_per_cell == 4
    assert len(picture.owner) <= MOST_CELLS
    assert picture.owner.tolist().count(0) == 12_500, "a used block is not hidden by a free one"
    assert "Each square is 4 blocks" in draw(blocks, [RequestState(id="a")], ["a"], {"a": "#000"})
    assert len(draw(blocks, [RequestState(id="a")], ["a"], {"a": "#000"})) < 100_000


def test_an_empty_cache_can_be_drawn() -> None:
    assert "0 used" in draw(Blocks(), [], [], {})


# -- charts, chats and words ------------------------------------------------------------------------------------------


def test_a_charts_specification_holds_no_data() -> None:
    assert line_spec("seconds", rules={"SLO": 0.5}) == line_spec("seconds", rules={"SLO": 0.5})
    assert '"values"' not in json.dumps(line_spec("seconds", rules={"SLO": 0.5}))
    drawn = points_table([Point(1.5, "a", 1.0), Point(2.0, "a", math.nan)], (0.5, 3.0), [Event(1.0, ENGINE_RESTARTED)])
    drawn = drawn.to_pylist()
    assert drawn == [
        {"time": datetime.fromtimestamp(time, timezone.utc), "series": series, "value": value, "event": event}
        for time, series, value, event in (
            (1.5, "a", 1.0, None),
            (2.0, "a", None, None),
            (0.5, None, None, None),
            (3.0, None, None, None),
            (1.0, None, None, "engine restarted"),
        )
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0 ms"), (0.00012, "120 µs"), (0.0012, "1.2 ms"), (0.0996, "100 ms"), (0.9996, "1.0 s"),
     (12.34, "12.3 s"), (83, "1 min 23 s"),
     (7260, "2 h 1 min"), (-2.0, "-2.0 s")],
)  # fmt: skip
def test_seconds_in_words(value: float, text: str) -> None:
    assert seconds(value) == text


def test_other_figures_in_words() -> None:
    assert [percent(1.0), percent(0.98765), percent(None)] == ["100%", "98.8%", "—"]
    assert [per_second(1234.5), per_second(0.25), per_second(0.0)] == ["1,234/s", "0.25/s", "0/s"]
