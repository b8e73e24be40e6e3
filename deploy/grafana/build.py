"""Writes the dashboards, for Grafana's provisioning and for the Helm chart.

What is on them is in latency.py and scheduler.py, the format in panels.py. Run it as
`python -m deploy.grafana.build` from the root; a test compares the files with its output.
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.latency import latency
from deploy.grafana.scheduler import scheduler

FOLDER = Path(__file__).with_name("dashboards")
# The Helm chart can only read files of its own folder.
CHART_FOLDER = FOLDER.parent.parent / "helm" / "paceline" / "files"


def files() -> dict[str, str]:
    """Name and content of each file."""
    return {
        f"{board['uid']}.json": json.dumps(board, indent=1) + "\n"
        for board in (latency(), scheduler())
    }


def main() -> None:
    for folder in (FOLDER, CHART_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
