"""The engine page: ranks, the phases of a step, the composition of batches, and waiting messages."""

import time
from collections import Counter

import msgspec
import streamlit as st
from quire_client.snapshot import Snapshot

from quire_dashboard import choice, frame, watchers, words
from quire_dashboard.charts import SECONDS, chart_table, stacked_spec
from quire_dashboard.figures import ADAPTER_REQUESTS, ADAPTER_TOKENS, ADAPTERS
from quire_dashboard.frame import Line, chart
from quire_dashboard.monitor import StepState
from quire_dashboard.queries import GAP_S, Gauge, Quantile, Rate, Ratio

_DRAFTED = Rate(name="quire_spec_decode_draft_tokens_total")
_ACCEPTED = Rate(name="quire_spec_decode_accepted_tokens_total")
_BY_PLACE = Rate(name="quire_spec_decode_accepted_tokens_per_pos_total", by="position")
"""Only of models with speculative decoding."""
_ACCEPTANCE_LENGTH = Ratio(part=_ACCEPTED, whole=Rate(name="quire_spec_decode_drafts_total"), plus=1.0)
_IMBALANCE = Gauge(name="quire_expert_imbalance_ratio", by="over", labels=(("layers", "mean"),), how="max")
"""Only of mixtures of experts."""

_MILLISECONDS = st.column_config.NumberColumn(format="%.1f ms")
_REQUESTS = st.column_config.NumberColumn(format="%d requests")
_TRANSFERRED = "quire_kv_connector_blocks_total"


def show() -> None:
    """Draw the page."""
    st.title("Engine")
    frame.live(_now)
    frame.live(_charts, frame.CHARTS_S)


def _now() -> None:
    if frame.server_away():
        return
    snapshot = frame.snapshot_or_reason(choice.selection().model)
    if snapshot is None:
        return
    engine, step = snapshot.engine, snapshot.engine.last_step
    state = "up" if engine.up else "down"
    if engine.engines:
        state = f"{sum(one.up for one in engine.engines)} of {len(engine.engines)} up"
    shown = (
        ("Engine", state, "" if engine.engines else f"Process {engine.pid}"),
        ("Steps", words.count(engine.step), "Since the engine was started."),
        ("Restarts", words.count(engine.restarts), "Since the server was started."),
        ("Batch", f"{step.num_requests} of {engine.max_num_seqs}", "In the last step, and max_num_seqs."),
        ("Batch tokens", f"{step.num_tokens} of {engine.max_num_batched_tokens}",
         "Tokens of the last step, and max_num_batched_tokens."),
        ("In flight", words.count(engine.batches_in_flight), "Batches that the ranks are computing."),
    )  # fmt: skip
    frame.figures(shown)
    if engine.engines:
        _replicas(snapshot)
    left, right = st.columns(2)
    with left:
        _ranks(snapshot)
    with right:
        _step(snapshot)
    if snapshot.adapters:
        _adapters(snapshot)


def _adapters(snapshot: Snapshot) -> None:
    st.subheader("LoRA adapters")
    requests, tokens = frame.values(ADAPTER_REQUESTS), frame.values(ADAPTER_TOKENS)
    rows = [
        {
            "adapter": words.printable(one.name, 64),
            "state": f"{one.state}, pinned" if one.is_pinned else "on disk" if one.state == "disk" else one.state,
            "running": one.num_running,
            "waiting": one.num_waiting,
            "requests/s": requests.get(one.name, 0.0),
            "tokens/s": tokens.get(one.name, 0.0),
            "loads": one.num_loads,
            "rank": one.rank,
            "MB": one.num_bytes / 1e6,
            "folder": words.printable(one.folder, 256),
        }
        for one in snapshot.adapters
    ]
    decimal = st.column_config.NumberColumn(format="%.1f", help="Of those that have ended in the last minute.")
    columns = {"requests/s": decimal, "tokens/s": decimal, "MB": st.column_config.NumberColumn(format="%.1f")}
    frame.table(rows, key="adapters", columns=columns)


def _replicas(snapshot: Snapshot) -> None:
    """Each by itself; with `disaggregation` the first ones compute prompts, and the others all that follows."""
    st.subheader("Replicas")
    roles = snapshot.settings.get("disaggregation")
    num_prefill = roles.get("prefill") if isinstance(roles, dict) else None
    running = Counter(request.engine for request in snapshot.requests if request.phase in ("prefill", "decode"))
    present = Counter(request.engine for request in snapshot.requests)
    rows = [
        {
            "replica": one.index,
            "role": "any" if num_prefill is None else "prefill" if one.index < num_prefill else "decode",
            "state": "up" if one.up else "down",
            "host": words.printable(one.host or "this one", 64),
            "process": one.pid,
            "running": running[one.index],
            "not running": present[one.index] - running[one.index],
            "steps": one.step,
            "restarts": one.restarts,
        }
        for one in snapshot.engine.engines
    ]
    frame.table(rows, key="replicas", columns=dict.fromkeys(("running", "not running"), _REQUESTS))


def _ranks(snapshot: Snapshot) -> None:
    st.subheader("Ranks")
    rows = [
        {
            "rank": rank.rank,
            "state": "up" if rank.up else "down",
            "process": rank.pid,
            "step (median)": None if rank.step_seconds_p50 is None else 1000 * rank.step_seconds_p50,
        }
        for rank in snapshot.engine.ranks
    ]
    if rows:
        frame.table(rows, key="ranks", columns={"step (median)": _MILLISECONDS})
    else:
        st.caption("The engine has no ranks at the moment.")


def _step(snapshot: Snapshot) -> None:
    st.subheader("Step and queues")
    phases = msgspec.structs.asdict(snapshot.engine.step_seconds)
    whole = sum(phases.values())
    rows = [
        {"phase": phase, "median": 1000 * value, "share": value / whole if whole else 0.0}
        for phase, value in phases.items()
    ]
    share = st.column_config.ProgressColumn("share", format="percent", min_value=0.0, max_value=1.0)
    frame.table(rows, columns={"share": share, "median": _MILLISECONDS}, key="phases")
    if _drafts_tokens():
        length = words.decimal(frame.value(_ACCEPTANCE_LENGTH))
        st.markdown(
            f"Acceptance length: **{length}** tokens of a step for a request with drafts, in the mean "
            "of the last minute."
        )
    queues = snapshot.engine.queues
    st.markdown(
        f"Messages that wait: **{queues.to_engine}** to the engine, **{queues.responses}** responses to clients."
    )


def _charts() -> None:
    if watchers.monitor().seconds_since_success is None:
        return
    frame.say_events()
    left, right = st.columns(2)
    with left:
        chart("Step time by phase (median)", "seconds", [
            Line(query=Quantile(name="quire_step_seconds", q=0.5, by="phase"), by="phase"),
        ], key="step_time", say=words.seconds, axis=SECONDS)  # fmt: skip
        _composition(watchers.monitor().steps(choice.selection().model))
    with right:
        chart("Ranks that are up", "ranks", [Line(query=Gauge(name="quire_worker_up"), name="ranks")], key="ranks_up",
              say=words.count)  # fmt: skip
        chart("Tokens per step", "tokens", [
            Line(query=Quantile(name="quire_iteration_tokens", q=0.5), name="p50"),
            Line(query=Quantile(name="quire_iteration_tokens", q=0.95), name="p95"),
        ], key="iteration_tokens", say=words.count)  # fmt: skip
        chart("Restarts and replays", "per second", [
            Line(query=Rate(name="quire_engine_restarts_total"), name="restarts"),
            Line(query=Rate(name="quire_requests_replayed_total"), name="replayed requests"),
        ], key="restarts", say=words.per_second)  # fmt: skip

        if _drafts_tokens():
            chart("Drafts", "tokens per second", [
                Line(query=_DRAFTED, name="drafted"),
                Line(query=_ACCEPTED, name="accepted"),
            ], key="drafts", say=words.per_second)  # fmt: skip
            chart("Acceptance length", "tokens", [Line(query=_ACCEPTANCE_LENGTH, name="per step with drafts")],
                  key="acceptance_length", say=words.decimal)  # fmt: skip
        if frame.values(ADAPTERS):
            chart("Tokens by adapter", "tokens per second", [Line(query=ADAPTER_TOKENS, by="adapter")],
                  key="adapter_tokens", say=words.per_second)  # fmt: skip
            chart("Adapters in memory", "adapters", [Line(query=ADAPTERS, by="state")], key="adapters_ready",
                  say=words.count)  # fmt: skip
        if _transfers():
            chart("KV transfer", "blocks per second", [Line(query=Rate(name=_TRANSFERRED, by="outcome"), by="outcome")],
                  key="kv_transfer", say=words.per_second)  # fmt: skip
            chart("KV transfer in bytes", "bytes per second", [
                Line(query=Rate(name="quire_kv_connector_bytes_total", by="direction"), by="direction"),
            ], key="kv_bytes", say=words.bytes_per_second)  # fmt: skip
        if frame.values(_IMBALANCE):
            chart("Busiest expert and rank", "times the average", [Line(query=_IMBALANCE, by="over")], key="imbalance",
                  say=words.decimal)  # fmt: skip


def _drafts_tokens() -> bool:
    """Whether the model has speculative decoding."""
    return bool(frame.values(_BY_PLACE))


def _transfers() -> bool:
    """Whether blocks go through a KV connector, or would."""
    snapshot = watchers.monitor().last_snapshot(choice.selection().model)
    settings = {} if snapshot is None else snapshot.settings
    is_set = bool(settings.get("kv_transfer_config") or settings.get("disaggregation"))
    return is_set or bool(frame.value(Gauge(name=_TRANSFERRED)))


def _composition(steps: list[StepState]) -> None:
    st.markdown("**Batch composition** &nbsp; :gray[since this page was first opened]")
    now = time.time()
    start = now - choice.selection().range_s
    # Without visitors there are no snapshots: what was computed then is not known, and is not drawn.
    shown: list[tuple[float, int, int]] = []
    for step in steps:
        if step.time <= start:
            continue
        if shown and step.time - shown[-1][0] > GAP_S:
            shown.append((shown[-1][0] + GAP_S, 0, 0))
        shown.append((step.time, step.num_decode_tokens, step.num_prefill_tokens))
    if not any(decode or prefill for _, decode, prefill in shown):
        st.caption("Nothing in this time range.")
        return
    times, decode, prefill = zip(*shown, strict=True)
    data = chart_table(
        [*times, *times], ["decode"] * len(shown) + ["prefill"] * len(shown), [*decode, *prefill], (start, now),
        frame.events(),
    )  # fmt: skip
    frame.draw(
        data, stacked_spec("tokens of a step", ("decode", "prefill")), key="composition", alt="Batch composition"
    )
