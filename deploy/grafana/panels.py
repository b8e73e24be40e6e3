"""The few kinds of panels that our dashboards use, as plain dictionaries of Grafana's JSON model.

Knows Grafana's format and nothing of our metrics. Every panel has a line on how to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


@dataclass(frozen=True)
class Query:
    """`expr` is PromQL, `legend` names its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel; `read` is the line on how to read it. `limit` draws a line, red above it."""

    title: str
    read: str
    queries: tuple[Query, ...]
    unit: str = "s"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    limit: float | None = None
    stacked: bool = False
    maximum: float | None = None

    def json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.read,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(index, query) for index, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
        }

    def _target(self, index: int, query: Query) -> dict[str, Any]:
        heatmap = self.kind == "heatmap"
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "format": "heatmap" if heatmap else "time_series",
            "instant": self.kind == "stat",
            "range": self.kind != "stat",
        }

    def _defaults(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.limit is not None:
            steps.append({"color": "red", "value": self.limit})
        found: dict[str, Any] = {
            "unit": self.unit,
            "min": 0,
            "thresholds": {"mode": "absolute", "steps": steps},
        }
        if self.maximum is not None:
            found["max"] = self.maximum
        if self.kind == "timeseries":
            found["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 60 if self.stacked else 8,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "off" if self.limit is None else "dashed"},
            }
        return found


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "heatmap": {
        "calculate": False,
        "yAxis": {"unit": "s", "axisPlacement": "left"},
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64},
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": True},
    },
}


def dashboard(
    uid: str, title: str, text: str, rows: dict[str, tuple[Panel, ...]]
) -> dict[str, Any]:
    """Rows of panels, laid out from the left, a new line where one is full."""
    panels: list[dict[str, Any]] = []
    y = 0
    for name, members in rows.items():
        panels.append(_row(len(panels) + 1, name, y))
        x, y, line = 0, y + 1, 0
        for panel in members:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            panels.append(panel.json(len(panels) + 1, x, y))
            x, line = x + panel.width, max(line, panel.height)
        y += line
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _choice("job"), _choice("instance")]},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _row(panel_id: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {
        "id": panel_id,
        "type": "row",
        "title": title,
        "gridPos": place,
        "collapsed": False,
        "panels": [],
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def _choice(label: str) -> dict[str, Any]:
    """Servers by label, all of them to begin with."""
    source = "paceline_requests_running" + ('{job=~"$job"}' if label == "instance" else "")
    query = f"label_values({source}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
