"""The dashboard of the scheduler, the steps and the KV memory."""

from __future__ import annotations

from typing import Any

from deploy.grafana.panels import Panel, Query, dashboard
from deploy.grafana.queries import gauge, limit, mean, quantiles, rate


def scheduler() -> dict[str, Any]:
    step = "paceline_step_seconds"
    tokens = "paceline_step_tokens_total"
    return dashboard(
        "paceline-scheduler",
        "Paceline: scheduler and KV memory",
        "What runs, what waits, what each step holds, and where the KV memory goes.",
        {
            "Load": (
                Panel(
                    "Running and waiting",
                    "Waiting near 0: there is room. Running flat at --max-running with a queue: "
                    "slots are the limit. Running below it with a queue: KV is.",
                    (
                        Query(gauge("paceline_requests_running"), "running {{instance}}"),
                        Query(gauge("paceline_requests_waiting"), "waiting {{instance}}"),
                    ),
                    unit="short",
                ),
                Panel(
                    "Accepted and ended",
                    "The two lines lie on each other, or the queue grows between them.",
                    (
                        Query(rate("paceline_requests_accepted_total"), "accepted"),
                        Query(rate("paceline_requests_finished_total"), "ended"),
                    ),
                    unit="reqps",
                ),
                Panel(
                    "Engine takes requests",
                    "1 is ready. A dip is a restart of the engine; a line at 0 is a load that does "
                    "not end, or a drain.",
                    (Query(gauge("paceline_engine_ready"), "{{instance}}"),),
                    unit="short",
                    maximum=1,
                ),
                Panel(
                    "Engine silence",
                    "Seconds without a sign of life while there is work. It saws near 0; above "
                    "--stall-seconds /health answers 503.",
                    (Query(gauge("paceline_engine_silence_seconds"), "{{instance}}"),),
                    limit=30,
                ),
            ),
            "Keys": (
                Panel(
                    "Tokens a second, by key",
                    "Prompts without what was cached, and answers. While several keys wait these "
                    "go by their weights (with --policy fair); a key that asks for less has less.",
                    (
                        Query(
                            rate("paceline_tenant_tokens_total", by="key", where='kind!="cached"'),
                            "{{key}}",
                        ),
                    ),
                    unit="short",
                    stacked=True,
                ),
                Panel(
                    "Waiting, by key",
                    "Who has a queue. One key alone: a flood, which holds up nobody else. "
                    "All: the server is full.",
                    (Query(gauge("paceline_tenant_requests_waiting"), "{{key}} {{instance}}"),),
                    unit="short",
                ),
            ),
            "Steps": (
                Panel(
                    "Step time, p99",
                    "decode is the pace of every stream; mixed steps hold prompts too, and are "
                    "longer. mixed too long: lower --max-step-tokens.",
                    (
                        Query(
                            f"histogram_quantile(0.99, {rate(f'{step}_bucket', by='le, kind')})",
                            "{{kind}}",
                        ),
                        limit("tpot"),
                    ),
                ),
                Panel(
                    "Time spent in steps, by kind",
                    "Seconds of steps a second. All together near 1: the engine is busy all the "
                    "time; at 0 with requests running: it is stuck.",
                    (Query(rate(f"{step}_sum", by="kind"), "{{kind}}"),),
                    unit="percentunit",
                    stacked=True,
                ),
                Panel(
                    "Tokens computed a second",
                    "prefill is prompts (and recomputing), decode is answers.",
                    (Query(rate(tokens, by="kind"), "{{kind}}"),),
                    unit="short",
                    stacked=True,
                ),
                Panel(
                    "Tokens of a step, mean",
                    "How full the steps are. At --max-step-tokens prompts wait for each other.",
                    (Query(f"{rate(tokens)} / {rate(f'{step}_count')}", "tokens"),),
                    unit="short",
                ),
                Panel(
                    "Steps a second",
                    "Many decode steps with few tokens each: there is room for more requests.",
                    (Query(rate(f"{step}_count", by="kind"), "{{kind}}"),),
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Planning",
                    "Time of the scheduler for each step. Far below the step time, or it limits.",
                    quantiles("paceline_plan_seconds"),
                ),
            ),
            "KV memory": (
                Panel(
                    "KV blocks",
                    "Held by sequences, and kept for reuse. The rest is free. Held near 100 % "
                    "with a queue: memory is the limit.",
                    (
                        Query(f"avg({gauge('paceline_kv_usage_ratio')})", "held by sequences"),
                        Query(f"avg({gauge('paceline_kv_cached_ratio')})", "kept for reuse"),
                    ),
                    unit="percentunit",
                    stacked=True,
                    maximum=1,
                ),
                Panel(
                    "KV held, each server",
                    "Lines far apart: the balancer does not spread by load.",
                    (Query(gauge("paceline_kv_usage_ratio"), "{{instance}}"),),
                    unit="percentunit",
                    maximum=1,
                    limit=0.9,
                ),
                Panel(
                    "Prefix cache: hits",
                    "Share of looked-up prompt tokens found. Low where prompts share a beginning: "
                    "the cache is too small, or requests of one chat go to different servers.",
                    (
                        Query(
                            f"{rate('paceline_prefix_hits_total')}"
                            f" / {rate('paceline_prefix_queries_total')}",
                            "hits",
                        ),
                    ),
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "Prompt tokens a second",
                    "Cached ones cost no prefill.",
                    (
                        Query(rate("paceline_prompt_tokens_total"), "all"),
                        Query(rate("paceline_cached_prompt_tokens_total"), "cached"),
                    ),
                    unit="short",
                ),
                Panel(
                    "Preemptions a second",
                    "A running sequence lost its KV and waits again. A few are fine, many mean "
                    "that too much was admitted: lower --max-running or add KV memory.",
                    (Query(rate("paceline_preemptions_total"), "preemptions"),),
                    unit="ops",
                ),
                Panel(
                    "Work done twice",
                    "Share of computed tokens that had been computed before a preemption.",
                    (
                        Query(
                            f"{rate('paceline_recomputed_tokens_total')} / {rate(tokens)}",
                            "recomputed",
                        ),
                    ),
                    unit="percentunit",
                    limit=0.1,
                ),
            ),
            "API process": (
                Panel(
                    "Event loop lag",
                    "How late the loop wakes. Above 50 ms streams stutter, however fast the steps.",
                    quantiles("paceline_event_loop_lag_seconds"),
                    limit=0.05,
                ),
                Panel(
                    "Parse, tokenize and write, mean",
                    "What the API process adds to the TTFT. It should be a few milliseconds.",
                    tuple(
                        Query(
                            mean(
                                "paceline_time_to_first_token_part_seconds",
                                where=f'part="{name}"',
                            ),
                            name,
                        )
                        for name in ("parse", "tokenize", "write")
                    ),
                    stacked=True,
                ),
            ),
        },
    )
