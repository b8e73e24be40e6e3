"""The dashboard of what users feel: first token, pace, goodput and errors."""

from __future__ import annotations

from typing import Any

from deploy.grafana.panels import Panel, Query, dashboard
from deploy.grafana.queries import limit, mean, quantile, quantiles, rate, within
from deploy.objectives import OURS, SHARE_WITHIN

PARTS = ("parse", "tokenize", "queue", "prefill", "first_sample", "write")


def latency() -> dict[str, Any]:
    ttft, tpot = "paceline_time_to_first_token_seconds", "paceline_time_per_output_token_seconds"
    part = "paceline_time_to_first_token_part_seconds"
    itl, e2e = "paceline_inter_token_latency_seconds", "paceline_request_duration_seconds"
    finished, refused = "paceline_requests_finished_total", "paceline_requests_refused_total"
    ours = "|".join(OURS)
    return dashboard(
        "paceline-latency",
        "Paceline: latency that users feel",
        "Waiting for the first token, the pace after it, and how many requests kept both limits.",
        {
            "Goodput": (
                Panel(
                    "First token in time",
                    f"Share of requests, now. Below {SHARE_WITHIN:.0%} the error budget shrinks.",
                    (Query(within("ttft"), "within"),),
                    unit="percentunit",
                    kind="stat",
                    width=6,
                    height=5,
                    maximum=1,
                ),
                Panel(
                    "Tokens fast enough",
                    f"Share of finished answers, now. Below {SHARE_WITHIN:.0%} the budget shrinks.",
                    (Query(within("tpot"), "within"),),
                    unit="percentunit",
                    kind="stat",
                    width=6,
                    height=5,
                    maximum=1,
                ),
                Panel(
                    "Answers a second",
                    "Sequences that ended by themselves: the work that was worth doing.",
                    (Query(rate(finished, where='reason=~"stop|length"'), "answers"),),
                    unit="reqps",
                    kind="stat",
                    width=6,
                    height=5,
                ),
                Panel(
                    "Tokens a second",
                    "Tokens generated and used. It levels off where the machine is full.",
                    (Query(rate("paceline_generated_tokens_total"), "tokens"),),
                    unit="short",
                    kind="stat",
                    width=6,
                    height=5,
                ),
                Panel(
                    "Share within each limit",
                    "Both near 100 %: good. TTFT falls first: too many requests, see the queue. "
                    "TPOT falls first: the batch is too large, see --max-running.",
                    (
                        Query(within("ttft"), "TTFT"),
                        Query(within("tpot"), "TPOT"),
                    ),
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "How requests end",
                    "stop and length are answers, abort is a client that hung up, error is ours. "
                    "Many aborts with a high TTFT: people do not wait.",
                    (Query(rate(finished, by="reason"), "{{reason}}"),),
                    unit="reqps",
                    stacked=True,
                ),
            ),
            "Time to first token": (
                Panel(
                    "TTFT",
                    "From arrival to the first text written. p99 far above p50: queueing or long "
                    "prompts; the parts on the right say which.",
                    (*quantiles(ttft), limit("ttft")),
                ),
                Panel(
                    "TTFT in its parts, mean",
                    "The parts add up to the mean TTFT. queue: more servers or slots; prefill: "
                    "shorter prompts, cache hits, --max-step-tokens; write: slow API process.",
                    tuple(Query(mean(part, where=f'part="{name}"'), name) for name in PARTS),
                    stacked=True,
                ),
                Panel(
                    "TTFT, all requests",
                    "Each column is a moment, brighter where more requests are. Two bands: "
                    "two kinds of prompts, or cache hits and misses.",
                    (Query(rate(f"{ttft}_bucket", by="le"), "{{le}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Queue and prefill",
                    "Queue p99 grows alone: overload. Prefill p99 grows alone: longer prompts, or "
                    "decodes take the step's token budget.",
                    (
                        Query(quantile(0.5, "paceline_queue_seconds"), "queue p50"),
                        Query(quantile(0.99, "paceline_queue_seconds"), "queue p99"),
                        Query(quantile(0.5, "paceline_prefill_seconds"), "prefill p50"),
                        Query(quantile(0.99, "paceline_prefill_seconds"), "prefill p99"),
                    ),
                ),
            ),
            "After the first token": (
                Panel(
                    "TPOT",
                    "Mean time a token of each answer. People read about ten tokens a second, so "
                    "0.1 s is fluent.",
                    (*quantiles(tpot), limit("tpot")),
                ),
                Panel(
                    "Gaps between pieces of text",
                    "p99 far above TPOT: answers stutter, since long prompts share their steps or "
                    "sequences are preempted.",
                    (*quantiles(itl), limit("tpot")),
                ),
                Panel(
                    "Whole answer",
                    "Arrival to end. It follows the answers' lengths, so compare it with itself.",
                    quantiles(e2e),
                ),
                Panel(
                    "Decode part of an answer",
                    "First text to end. Whole answer less this is the TTFT.",
                    quantiles("paceline_decode_seconds"),
                ),
            ),
            "Errors": (
                Panel(
                    "Refusals that are ours",
                    "Nothing is best. queue_full: overload; engine_unavailable: the engine died; "
                    "server_draining: a balancer still sends to a server that stops.",
                    (Query(rate(refused, by="reason", where=f'reason=~"{ours}"'), "{{reason}}"),),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Refusals that are the clients'",
                    "A sudden kind: a client with a new bug, or a wrong key.",
                    (Query(rate(refused, by="reason", where=f'reason!~"{ours}"'), "{{reason}}"),),
                    unit="reqps",
                    stacked=True,
                ),
            ),
        },
    )
