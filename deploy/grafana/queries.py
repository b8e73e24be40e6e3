"""PromQL as our dashboards need it: rates, quantiles and shares over the chosen servers."""

from __future__ import annotations

from deploy.grafana.panels import Query

WHO = 'job=~"$job", instance=~"$instance"'
RATE = "$__rate_interval"


def rate(metric: str, *, by: str = "", where: str = "") -> str:
    """The rate of a counter, over all chosen servers unless `by` names labels."""
    selector = f"{WHO}, {where}" if where else WHO
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{{selector}}}[{RATE}]))"


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', by='le')})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))


def mean(histogram: str, *, where: str = "", by: str = "") -> str:
    return (
        f"{rate(f'{histogram}_sum', where=where, by=by)}"
        f" / {rate(f'{histogram}_count', where=where, by=by)}"
    )


def within(slo: str) -> str:
    """The share of finished requests that kept the server's own limit."""
    counted = "paceline_slo_requests_total"
    chosen = f'slo="{slo}"'
    good = rate(counted, where=f'{chosen}, met="true"')
    return f"{good} / {rate(counted, where=chosen)}"


def limit(slo: str) -> Query:
    """A line to compare with."""
    return Query(f'max(paceline_slo_limit_seconds{{{WHO}, slo="{slo}"}})', "limit")


def gauge(metric: str) -> str:
    return f"{metric}{{{WHO}}}"
