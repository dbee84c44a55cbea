"""The KV cache page: the blocks that each request holds, and what the prefix cache saves."""

import streamlit as st
from quire_client.snapshot import Snapshot

from quire_dashboard import choice, frame, watchers, words
from quire_dashboard.block_map import blocks_by_state, colours_of, draw
from quire_dashboard.charts import SHARES
from quire_dashboard.frame import Line, chart
from quire_dashboard.queries import Gauge, Rate, Ratio

_COLOURS = "block_colours"
"""In the visitor's session: each request's colour, so that it stays the same while others come and go."""
_HITS = Ratio(part=Rate(name="quire_prefix_cache_hits_total"), whole=Rate(name="quire_prefix_cache_queries_total"))


def show() -> None:
    """Draw the page."""
    st.title("KV cache")
    frame.live(_now)
    frame.live(_charts, frame.CHARTS_S)


def _now() -> None:
    if frame.server_away():
        return
    picked = choice.selection()
    snapshot = frame.snapshot_or_reason(picked.model)
    _figures(snapshot)
    if snapshot is None:
        return
    st.subheader("Blocks")
    if not snapshot.blocks.num_blocks:
        st.caption("The engine has no blocks at the moment.")
        return
    requests = snapshot.requests
    owners = sorted({owner for owner in snapshot.blocks.owner if 0 <= owner < len(requests)})
    before = st.session_state.get(_COLOURS, {})
    colours = st.session_state[_COLOURS] = colours_of([requests[owner].id for owner in owners], before)
    st.html(draw(snapshot.blocks, requests, frame.request_names(requests), colours))
    left, right = st.columns(2)
    with left:
        st.subheader("Usage by request")
        _usage(snapshot)
    with right:
        st.subheader("Prefix cache")
        _prefixes(snapshot)


def _figures(snapshot: Snapshot | None) -> None:
    states = frame.values(Gauge(name="quire_kv_blocks", by="state"))
    # A cache that has been in use is full of cached blocks: the few empty ones alone would look like a shortage.
    available = states.get("free", 0.0) + states.get("cached", 0.0) if states else None
    hits = frame.value(_HITS)
    preemptions = frame.value(Rate(name="quire_preemptions_total"))
    evictions = frame.value(Rate(name="quire_kv_block_evictions_total"))
    shown = [
        ("Used", words.count(states.get("used")), "Blocks that live requests hold."),
        ("Available", words.count(available), "Blocks that a request can have: empty ones, and cached ones."),
        ("Cached", words.count(states.get("cached")), "Of the available blocks, those that an equal prefix can reuse."),
        ("Prefix hits", words.percent(hits), "Share of the prompt tokens found in the cache, of the last minute."),
        ("Preemptions", words.per_second(preemptions), "Mean of the last minute."),
        ("Evictions", words.per_second(evictions), "Cached blocks given to others, mean of the last minute."),
    ]
    states_of_layers = frame.values(Gauge(name="quire_state_blocks", by="state"))
    if sum(states_of_layers.values()):
        number = f"{words.count(states_of_layers.get('used'))} / {words.count(sum(states_of_layers.values()))}"
        shown.insert(
            3, ("States", number, "Blocks of recurrent layers' states that live requests hold, and all of them.")
        )
    if snapshot is not None:
        shared = blocks_by_state(snapshot.blocks)["shared"]
        shown.insert(3, ("Shared", words.count(shared), "Used blocks that more than one request holds."))
    frame.figures(shown)


def _usage(snapshot: Snapshot) -> None:
    held = sorted(
        zip(snapshot.requests, frame.request_names(snapshot.requests), strict=True),
        key=lambda item: -item[0].num_blocks,
    )
    rows = [
        {
            "request": name,
            "blocks": request.num_blocks,
            "share": request.num_blocks / snapshot.blocks.num_blocks,
            "from cache": request.num_cached_tokens,
        }
        for request, name in held
        if request.num_blocks
    ]
    if not rows:
        st.caption("No request holds a block.")
        return
    share = st.column_config.ProgressColumn("share", width="small", format="percent", min_value=0.0, max_value=1.0)
    cached = st.column_config.NumberColumn(
        format=frame.TOKENS, help="Tokens of its prompt that were found in the prefix cache."
    )
    frame.table(rows, columns={"share": share, "from cache": cached}, key="usage_by_request")


def _prefixes(snapshot: Snapshot) -> None:
    tree = snapshot.prefix_tree
    st.markdown(
        f"{words.count(tree.num_cached_blocks)} blocks can be found by their prefix: {words.count(tree.num_roots)} "
        f"different beginnings, the longest {words.count(tree.depth)} blocks "
        f"({words.count(tree.depth * snapshot.blocks.block_size)} tokens)."
    )
    if tree.hottest:
        rows = [
            {"prefix": f"no. {place}", "blocks": hot.num_blocks, "references": hot.num_references}
            for place, hot in enumerate(tree.hottest, 1)
        ]
        frame.table(rows, key="hottest")


def _charts() -> None:
    if watchers.monitor().seconds_since_success is None:
        return
    frame.say_events()
    left, right = st.columns(2)
    with left:
        chart("Blocks by state", "blocks", [Line(query=Gauge(name="quire_kv_blocks", by="state"), by="state")],
              key="blocks", say=words.count)  # fmt: skip
    with right:
        chart("Prefix hits", "share of prompt tokens", [Line(query=_HITS, name="found")], key="hits", axis=SHARES,
              top=1.0, say=words.percent)  # fmt: skip
    left, right = st.columns(2)
    with left:
        chart("Prompt tokens", "tokens per second", [
            Line(query=Rate(name="quire_prompt_tokens_total"), name="all"),
            Line(query=Rate(name="quire_prompt_tokens_cached_total"), name="from cache"),
        ], key="prompt_tokens", say=words.per_second)  # fmt: skip
    with right:
        chart("Evictions and preemptions", "per second", [
            Line(query=Rate(name="quire_kv_block_evictions_total"), name="evicted blocks"),
            Line(query=Rate(name="quire_preemptions_total"), name="preempted requests"),
        ], key="evictions", say=words.per_second)  # fmt: skip
