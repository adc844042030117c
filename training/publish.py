"""The figures of a training run, and the run in MLflow."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorazor.training import tracking
from lorazor.training.baselines import Score
from lorazor.training.compare import Row
from lorazor.training.dataset import Tables
from lorazor.training.figures import draw_all
from lorazor.training.learned import PARAMS
from lorazor.training.provenance import git_sha
from lorazor.training.replay import Ints, ReplayTable
from lorazor.training.report import TrainReport

AUTO = "auto"
"""In place of a tracking store: `tracking.default_uri()`."""


def publish(
    report: TrainReport,
    test: Tables,
    score: Score,
    params: Mapping[str, Any],
    mlflow_uri: str | None,
    register_as: str | None,
    figures: str | Path | None,
) -> tracking.Tracked | None:
    """Draw the figures (into `figures` if given) and log the run; None when there is neither a place nor a store."""
    if figures is None and mlflow_uri is None:
        return None
    with tempfile.TemporaryDirectory() as spare:
        drawn = Path(figures or spare)
        comparisons = {task: r.comparison for task, r in report.tasks.items()}
        releases = {
            task: _releases(table, comparisons[task].rows, report.shipped, score) for task, table in test.items()
        }
        draw_all(drawn, comparisons, releases, {task: r.reliability for task, r in report.tasks.items()})
        if mlflow_uri is None:
            return None
        return tracking.track(
            tracking.default_uri() if mlflow_uri == AUTO else mlflow_uri,
            artifact=report.artifact,
            figures=drawn,
            params={**PARAMS, **params},
            metrics=report.metrics(),
            tags={"data_digest": report.data_digest, "git": git_sha()},
            report=report.render(),
            register_as=register_as,
        )


def _releases(table: ReplayTable, rows: Sequence[Row], shipped: str, score: Score) -> tuple[Ints, Ints]:
    """Release steps and decisions of the test requests at the last (widest) operating point of the shipped policy."""
    threshold = [row.threshold for row in rows if row.policy == shipped][-1]
    decision = table.first_decision(score(table), threshold)
    return table.outcome(decision).release, decision
