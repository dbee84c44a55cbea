"""What Grafana's dashboards show.

Queries follow the pickers of job, instance, model and class. Series of recording rules have no job, and those of
objectives no instance either: they are of all instances.
"""

from quire_client.symptoms import OBJECTIVE, SYMPTOMS

from quire_monitoring.grafana.render import Dashboard, Panel, Row

SERVER = 'job=~"$job", instance=~"$instance", model=~"$model"'
RECORDED = 'instance=~"$instance", model=~"$model"'
SLO = SERVER + ', slo=~"$slo"'
RECORDED_SLO = 'model=~"$model", slo=~"$slo"'
RATE = "[$__rate_interval]"
TOKENS = "count:tok/s"
BURN = SYMPTOMS["slo"].limits["burn"].begins
ENGINE_NAME = "{{instance}} {{model}} {{engine}}"


_BY_CLASS = {
    "quire_time_to_first_token_seconds", "quire_time_per_output_token_seconds", "quire_e2e_request_latency_seconds",
}  # fmt: skip
"""Those that say which class of objectives a request was of."""


def _rate(metric: str, by: str, selector: str = SERVER) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}{RATE}))"


def _quantiles(metric: str, selector: str = SERVER) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (model, le) (rate({metric}_bucket{{{selector}}}{RATE}))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"{{{{model}}}} {name}") for q, name in
                 ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")))  # fmt: skip


def _latency(title: str, metric: str, description: str) -> Panel:
    selector = SLO if metric in _BY_CLASS else SERVER
    return Panel(title=title, queries=_quantiles(metric, selector), description=description, unit="s")


OVERVIEW = Dashboard(
    uid="quire-overview",
    title="Quire / Overview",
    rows=(
        Row(height=4, panels=(
            Panel(title="Goodput now", page="overview", kind="stat", unit="percentunit", maximum=1, red_below=OBJECTIVE,
                  queries=((f'min by (model) (quire_goodput_ratio{{{SLO}, window="1m"}})', "{{model}}"),),
                  description="Share of the requests of the last minute that met every objective; the worst class."),
            Panel(title="Engine", page="engine", kind="stat", red_below=1,
                  queries=((f"min by (model) (quire_engine_up{{{SERVER}}})", "{{model}}"),),
                  description="1 while the engine steps."),
            Panel(title="Asleep", kind="stat",
                  queries=((f'max by (model) (quire_engine_sleep_state{{{SERVER}, sleep_state!="awake"}})',
                            "{{model}}"),),
                  description="1 while an operator has freed the engine's memory."),
            Panel(title="Running", kind="stat",
                  queries=((f"sum by (model) (quire_requests_running{{{SERVER}}})", "{{model}}"),),
                  description="Requests in the batch."),
            Panel(title="Waiting", page="requests", kind="stat",
                  queries=((f"sum by (model) (quire_requests_waiting{{{SERVER}}})", "{{model}}"),),
                  description="Requests that wait for capacity, for their grammar, or (held) for an engine."),
            Panel(title="KV cache", page="kv-cache", kind="stat", unit="percentunit", maximum=1,
                  queries=((f"max by (model) (quire_kv_cache_usage_ratio{{{SERVER}}})", "{{model}}"),),
                  description="Share of the blocks that live requests hold."),
            Panel(title="Restarts, last hour", kind="stat",
                  queries=((f"sum by (model) (increase(quire_engine_restarts_total{{{SERVER}}}[1h]))", "{{model}}"),),
                  description="Engines that died and were started again."),
        )),
        Row(panels=(
            Panel(title="Goodput", unit="percentunit", maximum=1, red_below=OBJECTIVE,
                  queries=((f'quire_goodput_ratio{{{SLO}, window="5m"}}', "{{model}} {{slo}}"),),
                  description="Share of requests that met every objective that applies to them, over five minutes."),
            Panel(title="Requests", unit="reqps", is_stacked=True,
                  queries=((_rate("quire_requests_total", "outcome"), "{{outcome}}"),),
                  description="Requests that ended, by how."),
        )),
        Row(panels=(
            Panel(title="Tokens", unit=TOKENS,
                  queries=((_rate("quire_generation_tokens_total", "model"), "{{model}} generated"),
                           (_rate("quire_prompt_tokens_total", "model"), "{{model}} prompt"),
                           (_rate("quire_goodput_tokens_total", "model", SLO), "{{model}} good")),
                  description="Tokens per second; good ones are those of requests that met their objectives."),
            _latency("Time to first token", "quire_time_to_first_token_seconds", "From arrival to the first token."),
            _latency("End to end", "quire_e2e_request_latency_seconds", "From arrival to the end."),
        )),
    ),
)  # fmt: skip

LATENCY = Dashboard(
    uid="quire-latency-slo",
    title="Quire / Latency & SLO",
    rows=(
        Row(panels=(
            Panel(title="Burn rate", red_above=BURN, queries=(
                (f"quire:slo_burn:rate5m{{{RECORDED_SLO}}}", "{{model}} {{slo}} 5m"),
                (f"quire:slo_burn:rate1h{{{RECORDED_SLO}}}", "{{model}} {{slo}} 1h"),
                (f"quire:slo_burn:rate6h{{{RECORDED_SLO}}}", "{{model}} {{slo}} 6h"),
            ), description="How many times as fast as allowed the budget of misses is used up. "
                  f"From {BURN:g} on, an alert pages."),
            Panel(title="Misses by first cause", unit="reqps", is_stacked=True,
                  queries=((_rate("quire_slo_requests_total", "slo, cause", f'{SLO}, verdict="miss"'),
                            "{{slo}} {{cause}}"),),
                  description="The objective that was missed first; rejected and failed requests are misses, too."),
            Panel(title="Late now", queries=(
                (f"sum by (slo, target) (quire_requests_overdue{{{SLO}}})", "{{slo}} {{target}}"),
            ), description="Live requests whose first token, next token or end is later than the target."),
            Panel(title="Good tokens", unit=TOKENS,
                  queries=((f"quire:goodput_tokens:rate5m{{{RECORDED_SLO}}}", "{{model}} {{slo}}"),),
                  description="Tokens per second of requests that met their objectives."),
        )),
        Row(panels=(
            _latency("Time to first token", "quire_time_to_first_token_seconds", "From arrival to the first token."),
            _latency("Time per output token", "quire_time_per_output_token_seconds", "Mean after the first token."),
            _latency("Between tokens", "quire_inter_token_latency_seconds", "From one token of a request to its next."),
        )),
        Row(panels=(
            _latency("Queue", "quire_request_queue_time_seconds",
                     "Until the request's first step, or until its end before that."),
            _latency("Prefill", "quire_request_prefill_time_seconds", "From the first step to the first token."),
            _latency("Decode", "quire_request_decode_time_seconds",
                     "From the first token to the end, without preemptions and replays."),
            _latency("End to end", "quire_e2e_request_latency_seconds", "From arrival to the end."),
        )),
        Row(panels=(
            Panel(title="What the time goes to", is_stacked=True,
                  queries=tuple((_rate(f"quire_request_{phase}_time_seconds_sum", "model"), f"{{{{model}}}} {phase}")
                                for phase in ("encode", "queue", "prefill", "decode", "preempted")),
                  description="Seconds of requests per second, by phase; counted when the phase has ended."),
            Panel(title="What restarts take", is_stacked=True,
                  queries=tuple((_rate(f"quire_request_{phase}_time_seconds_sum", "model"), f"{{{{model}}}} {phase}")
                                for phase in ("held", "replayed")),
                  description="The same: held until there was an engine, replayed until the next token."),
            Panel(title="Refused for want of capacity", unit="reqps", is_stacked=True,
                  queries=((_rate("quire_requests_refused_total", "slo, reason"), "{{slo}} {{reason}}"),),
                  description="Requests of all classes that were refused at once, by the reason: their time to the "
                              "first token could not be met, or the queue had no room."),
            Panel(title="Images of prompts", unit="ops",
                  queries=tuple((_rate(f"quire_image_{name}_total", "model"), f"{{{{model}}}} {what}")
                                for name, what in (("cache_queries", "all"), ("cache_hits", "encoded before"),
                                                   ("failures", "failed"))),
                  description="Of models that take them: how many there were, how many of these needed no encoding, as "
                              "an equal one was encoded lately, and how many could not be decoded or encoded."),
            _latency("Encoding an image", "quire_image_encode_seconds",
                     "Decoding and encoding, without the wait for other images."),
            Panel(title="Error of predicted times to first token", unit="percentunit",
                  queries=_quantiles("quire_ttft_prediction_error_ratio"),
                  description='How far off the predictions of scheduling_policy "slo" were, as a share of what came.'),
        )),
        Row(panels=(
            Panel(title="Time to first token, all requests", kind="heatmap", unit="s",
                  queries=((_rate("quire_time_to_first_token_seconds_bucket", "le"), "{{le}}"),),
                  description="Two humps are two kinds of requests: short and long prompts, or cached and not."),
            _latency("Cancel to free", "quire_cancel_to_free_seconds",
                     "From a request's cancellation until its blocks are free."),
        )),
    ),
)  # fmt: skip

CACHE = Dashboard(
    uid="quire-cache-scheduler",
    title="Quire / KV cache & scheduler",
    rows=(
        Row(panels=(
            Panel(title="Blocks", page="kv-cache", is_stacked=True,
                  queries=((f"sum by (state) (quire_kv_blocks{{{SERVER}}})", "{{state}}"),),
                  description="Used by live requests, cached and free, or empty."),
            Panel(title="States", page="kv-cache", is_stacked=True,
                  queries=((f"sum by (state) (quire_state_blocks{{{SERVER}}})", "{{state}}"),),
                  description="Blocks of recurrent layers' states. 0 for models without such layers."),
            Panel(title="Usage", page="kv-cache", unit="percentunit", maximum=1,
                  queries=((f"quire_kv_cache_usage_ratio{{{SERVER}}}", ENGINE_NAME),),
                  description="Share of the blocks that live requests hold. Full is fine while none is preempted."),
            Panel(title="Preemptions", unit="ops",
                  queries=((f"quire:preemptions:rate5m{{{RECORDED}}}", ENGINE_NAME),),
                  description="Requests that gave their blocks up, and are computed again."),
            Panel(title="Evictions", unit="ops",
                  queries=((_rate("quire_kv_block_evictions_total", "model"), "{{model}}"),),
                  description="Cached blocks whose content made room for a request. With few hits, the cache is too "
                              "small for its prefixes."),
        )),
        Row(panels=(
            Panel(title="Prefix cache hits", unit="percentunit", maximum=1,
                  queries=((f"quire:prefix_cache_hit:ratio_rate5m{{{RECORDED}}}", ENGINE_NAME),),
                  description="Share of the looked-up prompt tokens that need not be computed."),
            Panel(title="Prompt tokens", unit=TOKENS,
                  queries=((_rate("quire_prompt_tokens_total", "model"), "{{model}} all"),
                           (_rate("quire_prompt_tokens_cached_total", "model"), "{{model}} cached")),
                  description="Prompt tokens of requests whose first token came."),
            Panel(title="Prompt lengths", queries=_quantiles("quire_request_prompt_tokens"),
                  description="Tokens per prompt."),
            Panel(title="Answer lengths",
                  queries=(*_quantiles("quire_request_generation_tokens"),
                           (f"{_rate('quire_request_params_n_sum', 'model')} / "
                            f"{_rate('quire_request_params_n_count', 'model')}", "{{model}} sequences")),
                  description="Generated tokens per request, and of how many sequences (`n`) they are in the mean."),
        )),
        Row(panels=(
            Panel(title="Running and waiting", page="requests",
                  queries=((f"sum by (model) (quire_requests_running{{{SERVER}}})", "{{model}} running"),
                           (f"sum by (model, reason) (quire_requests_waiting{{{SERVER}}})",
                            "{{model}} waiting: {{reason}}")),
                  description="A queue that only grows needs more capacity, or a bound."),
            Panel(title="Tokens per step", queries=_quantiles("quire_iteration_tokens"),
                  description="Of all requests in a step; at most max_num_batched_tokens."),
            Panel(title="Speculative decoding", unit="none",
                  queries=((_rate("quire_spec_decode_draft_tokens_total", "model"), "{{model}} drafted/s"),
                           (_rate("quire_spec_decode_accepted_tokens_total", "model"), "{{model}} accepted/s"),
                           (f"1 + {_rate('quire_spec_decode_accepted_tokens_total', 'model')} / "
                            f"{_rate('quire_spec_decode_drafts_total', 'model')}", "{{model}} acceptance length")),
                  description="Drafted tokens, and those that the model sampled in their place. The acceptance length "
                              "is how many tokens a step yields for a request with drafts, in the mean."),
        )),
        Row(panels=(
            Panel(title="Tokens found by the KV connector", unit="percentunit", maximum=1,
                  queries=((f"{_rate('quire_external_prefix_cache_hits_total', 'model')} / "
                            f"{_rate('quire_external_prefix_cache_queries_total', 'model')}", "{{model}}"),),
                  description="Of the prompt tokens that were not in the prefix cache: the share that was loaded. "
                              "Only with kv_transfer_config; so are the next three."),
            Panel(title="KV blocks saved and loaded", unit="ops",
                  queries=((_rate("quire_kv_connector_blocks_total", "model, engine, outcome"),
                            "{{model}} {{engine}} {{outcome}}"),),
                  description="load_failed: gone, damaged or late, and computed in their place. save_failed: no room, "
                              "no permission, or a disk that is slower than the model."),
            Panel(title="Bytes of KV blocks", unit="Bps",
                  queries=((_rate("quire_kv_connector_bytes_total", "model, direction"), "{{model}} {{direction}}"),),
                  description="To and from what the connector keeps, of all ranks."),
            Panel(title="KV blocks by tier", unit="ops",
                  queries=((_rate("quire_kv_connector_tier_blocks_total", "model, tier, outcome"),
                            "{{model}} {{tier}} {{outcome}}"),),
                  description="With a MultiConnector: what each of its connectors saved and loaded. Blocks that were "
                              "found in a later one count as saved in those before it, too."),
        )),
    ),
)  # fmt: skip

ENGINE = Dashboard(
    uid="quire-engine-ranks",
    title="Quire / Engine ranks",
    rows=(
        Row(height=5, panels=(
            Panel(title="Engines", page="engine", kind="stat", red_below=1,
                  queries=((f"quire_engine_up{{{SERVER}}}", "{{model}} {{engine}}"),),
                  description="1 while the engine steps."),
            Panel(title="Ranks", kind="stat", red_below=1,
                  queries=((f"quire_worker_up{{{SERVER}}}", "{{model}} {{engine}} rank {{rank}}"),),
                  description="1 while the rank's process runs."),
        )),
        Row(panels=(
            Panel(title="Step by phase", unit="s", is_stacked=True,
                  queries=((" / ".join(_rate(f"quire_step_seconds_{part}", "phase") for part in ("sum", "count")),
                            "{{phase}}"),),
                  description="Mean time of a step. All ranks wait for the slowest one in execute."),
            Panel(title="Execute, now and usually", unit="s",
                  queries=((f"quire:step_execute_seconds:mean5m{{{RECORDED}}}", f"{ENGINE_NAME} 5m"),
                           (f"quire:step_execute_seconds:mean6h{{{RECORDED}}}", f"{ENGINE_NAME} 6h")),
                  description="More than usual with no larger batches and no longer contexts is a slow rank."),
            Panel(title="Execute, 99th percentile", unit="s",
                  queries=(("histogram_quantile(0.99, sum by (model, engine, le) (rate(quire_step_seconds_bucket"
                            f'{{{SERVER}, phase="execute"}}{RATE})))', "{{model}} {{engine}}"),),
                  description="Steps that stand out: long prefills, or a rank that hiccups."),
        )),
        Row(panels=(
            Panel(title="Step by rank", page="engine", unit="s",
                  queries=((f"quire:worker_busy_seconds:mean5m{{{RECORDED}}}", "{{model}} {{engine}} rank {{rank}}"),),
                  description="A rank's own part of a step, without its waits for others. The others wait for the "
                              "slowest one."),
            Panel(title="Busy ranks", unit="percentunit", maximum=1,
                  queries=((_rate("quire_worker_busy_seconds_total", "model, engine, rank"),
                            "{{model}} {{engine}} rank {{rank}}"),),
                  description="Share of the time in which a rank computes. The rest it waits: for requests, for the "
                              "engine core, or for other ranks."),
        )),
        Row(panels=(
            Panel(title="Steps", unit="ops",
                  queries=((_rate("quire_step_seconds_count", "model, engine", f'{SERVER}, phase="execute"'),
                            "{{model}} {{engine}}"),),
                  description="Steps per second."),
            Panel(title="Restarts",
                  queries=((f"sum by (model) (increase(quire_engine_restarts_total{{{SERVER}}}{RATE}))",
                            "{{model}} restarts"),
                           (f"sum by (model) (increase(quire_requests_replayed_total{{{SERVER}}}{RATE}))",
                            "{{model}} replayed requests"),
                           (f"sum by (model) (increase(quire_requests_moved_total{{{SERVER}}}{RATE}))",
                            "{{model}} moved requests")),
                  description="Engines that were started again, the requests that went on with them, and those that a "
                              "replica handed over as it was taken away."),
            Panel(title="Engines by version", is_stacked=True,
                  queries=((f"count by (quire, python, torch) (quire_build_info{{{SERVER}}})",
                            "Quire {{quire}}, Python {{python}}, torch {{torch}}"),),
                  description="Engines of each version. More than one color: an upgrade is under way."),
        )),
        Row(panels=(
            Panel(title="Busiest expert and rank", page="engine", unit="none",
                  queries=((f"max by (model, over, layers) (quire_expert_imbalance_ratio{{{SERVER}}})",
                            "{{model}} {{over}}, {{layers}} of the layers"),),
                  description="Of a mixture of experts: tokens of the busiest expert, or rank, per those of one on "
                              "average; 1 is even. All ranks wait for the busiest one: EPLB evens it out."),
            Panel(title="Tokens of experts by rank", unit=TOKENS,
                  queries=((_rate("quire_expert_rank_tokens_total", "model, engine, rank"),
                            "{{model}} {{engine}} rank {{rank}}"),),
                  description="Tokens that the rank computed experts for; one counts for each of its experts."),
            Panel(title="Tokens of the ten busiest experts", unit=TOKENS,
                  queries=((f"topk(10, {_rate('quire_expert_tokens_total', 'model, layer, expert')})",
                            "{{model}} layer {{layer}} expert {{expert}}"),),
                  description='Only with the setting "expert_metrics": true.'),
        )),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, LATENCY, CACHE, ENGINE)
