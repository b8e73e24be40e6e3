"""The dashboards: made by their builder, laid out without overlap, each panel explained."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from deploy.grafana import build
from deploy.grafana.latency import PARTS
from server.timings import TTFT_PARTS
from tests.deploy.promql import dashboard_list, panels


@pytest.mark.parametrize("folder", [build.FOLDER, build.CHART_FOLDER], ids=["grafana", "chart"])
def test_committed_dashboards_are_what_the_builder_writes(folder: Path) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    assert written == build.files()


def test_each_panel_says_how_to_read_it() -> None:
    seen = [panel for _where, panel in panels()]
    assert len(seen) > 25
    for panel in seen:
        assert len(panel["description"].split()) >= 5, panel["title"]
        assert panel["targets"], panel["title"]


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    for board in dashboard_list():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in cells, panel["title"]
                    cells.add((x, y))


def test_every_part_of_the_first_token_is_shown() -> None:
    assert PARTS == TTFT_PARTS


def test_dashboards_read_as_grafana_reads_them() -> None:
    """By the types that Grafana's makers generate from its schema, where they are installed."""
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is not installed")
    from grafana_foundation_sdk.models.dashboard import Dashboard

    for text in build.files().values():
        board = json.loads(text)
        read = Dashboard.from_json(board)
        assert read.title == board["title"]
        assert read.panels is not None
        assert len(read.panels) == len(board["panels"])
