"""All Prometheus series, and the only import of prometheus_client.

Facts come in (StepStats, the clock of a request, ends); nothing here decides. Counters only ever
add what happened since the last fact, so a new core process does not make them fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from scheduler.types import KVCapacity, StepStats
from server.errors import ApiError
from server.release import version
from server.tallies import Count, Distribution, TenantTokens
from server.timings import TTFT_PARTS, Timings

_TENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS = (*_TENS, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_FINE = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1)
TOKEN_BUCKETS = (*_FINE, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


# More names of keys than this have no series of their own.
MAX_TENANTS = 256
# An exemplar has at most 128 characters, its label name among them.
_MAX_EXEMPLAR_ID = 100


@dataclass(frozen=True, slots=True)
class SloLimits:
    """What a request should stay within: time to first token, and mean time of each further one."""

    ttft_seconds: float
    tpot_seconds: float


DEFAULT_LIMITS = SloLimits(ttft_seconds=1.0, tpot_seconds=0.1)


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """What is known of the core when somebody reads the metrics; `capacity` None: not ready yet."""

    model_name: str
    capacity: KVCapacity | None
    ready: bool
    silence_seconds: float


class CoreCollector(Collector):
    """Gauges made when they are read: those that routers know from vLLM, and signs of life."""

    def __init__(self, read: Callable[[], CoreFacts], last: Callable[[], StepStats]) -> None:
        self._read = read
        self._last = last
        self._version = version()

    def collect(self) -> Iterable[Metric]:
        facts, stats = self._read(), self._last()
        build = GaugeMetricFamily(
            "paceline_build_info",
            "The version of the server is its label; always 1.",
            labels=("version",),
        )
        build.add_metric((self._version,), 1)
        yield build
        yield GaugeMetricFamily(
            "paceline_engine_ready", "1 while the engine takes requests, else 0.", int(facts.ready)
        )
        yield GaugeMetricFamily(
            "paceline_engine_silence_seconds",
            "Since the engine's last sign of life while it has work; 0 without work.",
            facts.silence_seconds,
        )
        blocks = max(stats.num_blocks, 1)
        for name, text, value in (
            ("num_requests_waiting", "Sequences accepted and not running.", stats.num_waiting),
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            (
                "kv_cache_usage_perc",
                "Part of the KV blocks held by sequences, 0 to 1.",
                stats.num_blocks_used / blocks,
            ),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name",))
            gauge.add_metric((facts.model_name,), value)
            yield gauge
        if facts.capacity is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache in its labels; always 1.",
                labels=("model_name", "block_size", "num_gpu_blocks"),
            )
            sizes = (str(facts.capacity.block_size), str(facts.capacity.num_blocks))
            info.add_metric((facts.model_name, *sizes), 1)
            yield info


class TenantCollector(Collector):
    """What is seen of fairness, by name of the key: what each was served, and what waits.

    `sees` is the only one to be shown, None is all.
    """

    def __init__(
        self, served: dict[str, TenantTokens], read: Callable[[str], tuple[int, int | None]]
    ) -> None:
        self.sees: str | None = None
        self._served = served
        self._read = read

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily(
            "paceline_tenant_tokens",
            "Tokens served by name of the key: new and cached ones of prompts, and generated ones.",
            labels=("key", "kind"),
        )
        open_ = GaugeMetricFamily(
            "paceline_tenant_requests",
            "Sequences accepted and unfinished, by name of the key.",
            labels=("key",),
        )
        waiting = GaugeMetricFamily(
            "paceline_tenant_requests_waiting",
            "Of these, those that do not run, by name of the key (with --policy fair).",
            labels=("key",),
        )
        for name, served in self._served.items():
            if self.sees not in (None, name):
                continue
            tokens.add_metric((name, "prompt"), served.prompt - served.cached)
            tokens.add_metric((name, "cached"), served.cached)
            tokens.add_metric((name, "generated"), served.generated)
            num_open, num_waiting = self._read(name)
            open_.add_metric((name,), num_open)
            if num_waiting is not None:
                waiting.add_metric((name,), num_waiting)
        yield from (tokens, open_, waiting)


class TallyCollector(Collector):
    """What every token adds to (tallies.py)."""

    def __init__(self, *tallies: Count | Distribution) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        for tally in self._tallies:
            if isinstance(tally, Count):
                yield CounterMetricFamily(tally.name, tally.text, tally.value)
            else:
                yield HistogramMetricFamily(tally.name, tally.text, tally.buckets(), tally.sum)


class Metrics:
    """One instance a server; without a registry it has its own."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        limits: SloLimits = DEFAULT_LIMITS,
        read_core: Callable[[], CoreFacts] | None = None,
        tenants: Iterable[str] = (),
        read_tenant: Callable[[str], tuple[int, int | None]] = lambda _name: (0, None),
    ) -> None:
        # A time of creation beside each counter and histogram: half the series, and nobody asks.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry or CollectorRegistry()
        self._limits = limits
        self._last = StepStats(0, 0, 0, 0, 0, 0)
        if read_core is not None:
            self.registry.register(CoreCollector(read_core, lambda: self._last))
        names = list(tenants)
        self._served = {name: TenantTokens() for name in names if len(names) <= MAX_TENANTS}
        self._tenants = TenantCollector(self._served, read_tenant)
        if self._served:
            self.registry.register(self._tenants)
        self._make_request_series()
        self._make_token_series()
        self._make_core_series()

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(f"paceline_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"paceline_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"paceline_{name}", text, registry=self.registry)

    def _make_request_series(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first text written; once a request, whatever its n.",
            REQUEST_BUCKETS,
        )
        parts = self._histogram(
            "time_to_first_token_part_seconds",
            "The consecutive parts of the time to first token; for one request they add up to it.",
            REQUEST_BUCKETS,
            ("part",),
        )
        self.ttft_parts = {part: parts.labels(part) for part in TTFT_PARTS}
        self.queue = self._histogram(
            "queue_seconds",
            "From tokenized to first scheduled; preemption does not change it; once a request.",
            REQUEST_BUCKETS,
        )
        self.prefill = self._histogram(
            "prefill_seconds",
            "From first scheduled to the end of the prompt's prefill; once a request.",
            REQUEST_BUCKETS,
        )
        self.decode = self._histogram(
            "decode_seconds",
            "From the first text written to the end of the answer; once a finished request.",
            REQUEST_BUCKETS,
        )
        self.e2e = self._histogram(
            "request_duration_seconds",
            "From the request's arrival to the end of its answer; once a finished request.",
            REQUEST_BUCKETS,
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "(end - first text) / (tokens - 1) of each finished choice with two tokens or more.",
            TOKEN_BUCKETS,
        )
        self.itl = Distribution(
            "paceline_inter_token_latency_seconds",
            "Gaps between consecutive pieces of text of a choice, over all choices.",
            TOKEN_BUCKETS,
        )
        self.accepted = self._counter(
            "requests_accepted",
            "Sequences given to the core; each choice of n and each prompt of a list counts.",
        )
        finished = self._counter(
            "requests_finished",
            "Accepted sequences that ended, by reason; abort is the client hanging up, expired was "
            "not begun in time, invalid asked for what cannot be kept.",
            ("reason",),
        )
        self.finished = {
            reason: finished.labels(reason)
            for reason in ("stop", "length", "abort", "error", "expired", "invalid")
        }
        self.refused = self._counter(
            "requests_refused",
            "HTTP requests that got an error, as a status or as an event of a stream, by its code.",
            ("reason",),
        )
        cache = self._counter(
            "answer_cache", "Requests that asked for a cached answer, by result.", ("result",)
        )
        self.answer_cache = {result: cache.labels(result) for result in ("hit", "miss")}
        failures = self._counter(
            "redis_failures", "Calls to Redis that failed, by what they were for.", ("use",)
        )
        self.redis_failures = {use: failures.labels(use) for use in ("answer_cache", "responses")}
        slo = self._counter(
            "slo_requests",
            "Finished requests by whether they met a limit: ttft once each, tpot (mean over its "
            "choices) once each that has a second token.",
            ("slo", "met"),
        )
        self._slo = {
            (name, met): slo.labels(name, str(met).lower())
            for name in ("ttft", "tpot")
            for met in (True, False)
        }
        limit = Gauge(
            "paceline_slo_limit_seconds",
            "The limit behind each slo label of paceline_slo_requests_total.",
            ("slo",),
            registry=self.registry,
        )
        limit.labels("ttft").set(self._limits.ttft_seconds)
        limit.labels("tpot").set(self._limits.tpot_seconds)
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "How late the event loop of the API process woke from a short sleep.",
            LAG_BUCKETS,
        )
        self.descriptors_exhausted = self._counter(
            "descriptors_exhausted_seconds",
            "Time the API process had no file descriptor left for new connections.",
        )

    def _make_token_series(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens of requests that got a first token; a prompt shared by n counts once.",
        )
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Those prompt tokens that were found in the prefix cache."
        )
        self.generated_tokens = Count(
            "paceline_generated_tokens",
            "Tokens generated and used, the first one and stop tokens included; over finished "
            "requests the sum of usage.completion_tokens.",
        )
        self.registry.register(TallyCollector(self.generated_tokens, self.itl))

    def _make_core_series(self) -> None:
        self.running = self._gauge("requests_running", "Sequences in the running batch.")
        self.waiting = self._gauge("requests_waiting", "Sequences accepted and not running.")
        self.kv_usage = self._gauge(
            "kv_usage_ratio", "Part of the KV blocks held by sequences, 0 to 1."
        )
        self.kv_cached = self._gauge(
            "kv_cached_ratio", "Part of the KV blocks that hold only reusable prefixes, 0 to 1."
        )
        self.preemptions = self._counter(
            "preemptions", "Times a running sequence gave up its KV and went back to wait."
        )
        self.recomputed = self._counter(
            "recomputed_tokens", "Tokens computed again after preemptions."
        )
        self.refused_steps = self._counter(
            "refused_steps",
            "Steps the engine had no memory for; smaller ones follow, or one request fails.",
        )
        self.prefix_queries = self._counter(
            "prefix_queries", "Prompt tokens looked up in the prefix cache at admission."
        )
        self.prefix_hits = self._counter(
            "prefix_hits", "Prompt tokens found in the prefix cache at admission."
        )
        steps = self._histogram(
            "step_seconds",
            "Duration of each step of the model, by what it held: prefill, decode or mixed.",
            TOKEN_BUCKETS,
            ("kind",),
        )
        self.steps = {kind: steps.labels(kind) for kind in ("prefill", "decode", "mixed")}
        self.plan = self._histogram(
            "plan_seconds", "Time to plan each step, not part of its device time.", LAG_BUCKETS
        )
        tokens = self._counter("step_tokens", "Tokens computed in steps, by kind.", ("kind",))
        self.step_tokens = {kind: tokens.labels(kind) for kind in ("prefill", "decode")}

    def tokens_of(self, tenant: str) -> TenantTokens:
        """To be counted up; of a tenant without series it is nobody's."""
        return self._served.get(tenant) or TenantTokens()

    def observe_step(self, stats: StepStats) -> None:
        """One turn of the core's loop."""
        self._last = stats
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        blocks = max(stats.num_blocks, 1)
        self.kv_usage.set(stats.num_blocks_used / blocks)
        self.kv_cached.set(stats.num_blocks_cached / blocks)
        self.preemptions.inc(stats.num_preemptions)
        self.recomputed.inc(stats.num_recomputed_tokens)
        self.refused_steps.inc(stats.num_refused_steps)
        self.prefix_queries.inc(stats.prefix_queries)
        self.prefix_hits.inc(stats.prefix_hits)
        prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
        if not prefill and not decode:
            return
        kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        self.steps[kind].observe(stats.step_seconds)
        self.plan.observe(stats.plan_seconds)
        self.step_tokens["prefill"].inc(prefill)
        self.step_tokens["decode"].inc(decode)

    def count_error(self, error: ApiError) -> None:
        """An HTTP request that got an error. Codes are ours, so few."""
        self.count_refusal(error.code or error.type)

    def count_refusal(self, code: str) -> None:
        """Also of what never became a request."""
        self.refused.labels(code).inc()

    def observe_first_text(self, timings: Timings, request_id: str = "") -> None:
        """Once a request, when its first text has been written."""
        self.ttft.observe(timings.ttft_seconds, _exemplar(request_id))
        for part, series in self.ttft_parts.items():
            series.observe(timings.seconds(part))
        self.queue.observe(timings.seconds("queue"))
        self.prefill.observe(timings.seconds("prefill"))

    def observe_end(
        self, timings: Timings, request_id: str = "", tpot_seconds: float | None = None
    ) -> None:
        """Once a request that came to its own end; `tpot_seconds` is the mean over its choices."""
        self.decode.observe(timings.seconds("decode"))
        self.e2e.observe(timings.total_seconds, _exemplar(request_id))
        self._slo["ttft", timings.ttft_seconds <= self._limits.ttft_seconds].inc()
        if tpot_seconds is not None:
            self._slo["tpot", tpot_seconds <= self._limits.tpot_seconds].inc()

    def exposition(self, accept: str = "", sees: str | None = None) -> tuple[bytes, str]:
        """The text and its type: OpenMetrics, with exemplars, where `accept` asks for it.

        Of what is by key only what is of `sees`; None shows all.
        """
        encode, content_type = choose_encoder(accept)
        self._tenants.sees = sees  # nothing else runs before it is read
        return encode(self.registry), content_type


def _exemplar(request_id: str) -> dict[str, str] | None:
    return {"request_id": request_id[:_MAX_EXEMPLAR_ID]} if request_id else None
