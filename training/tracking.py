"""MLflow: a run's parameters, metrics, figures and artifact, and the artifact registered by name as plain files.

Registered this way `models:/NAME@ALIAS` resolves to a folder with policy.json and model.txt: no pickle, no MLmodel.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError

EXPERIMENT = "lorazor"
DEFAULT_ALIAS = "trained"
POLICY = "policy"
MOST_AT_ONCE = 1000  # metrics that an MLflow server takes in one call


@dataclass(frozen=True)
class Tracked:
    """Where a run went: the store, the run's id, and `models:/NAME@ALIAS` when it was registered."""

    uri: str
    run_id: str
    model: str | None


def default_uri() -> str:
    """MLFLOW_TRACKING_URI if it is set, else `mlflow.db` in the working folder: where `models:/` is looked up too."""
    return os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"


def model_name(register_as: str) -> tuple[str, str]:
    """Name and alias of NAME or NAME@ALIAS; InputError for a name that `models:/` could not resolve."""
    name, _, alias = register_as.partition("@")
    alias = alias or DEFAULT_ALIAS
    if not re.fullmatch(r"[\w. -]+", name) or not re.fullmatch(r"[\w-]+", alias) or re.fullmatch(r"latest|v\d+", alias):
        raise InputError(f"register as NAME or NAME@ALIAS in letters, digits, '.', '_' and '-', got {register_as!r}")
    return name, alias


def track(
    uri: str,
    *,
    artifact: Path,
    figures: Path | None = None,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    report: str,
    curves: Sequence[Mapping[str, float]] = (),
    name: str = POLICY,
    register_as: str | None = None,
) -> Tracked:
    """Log one finished training as an MLflow run; InputError when the store cannot be used.

    Args:
        artifact: the folder that was made; the run keeps it as `name`.
        curves: metrics on the way, each with its `step`.
    """
    # MLflow reports its use to its makers unless told not to, which is not ours to decide for the user.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        run_id = client.create_run(_experiment(client, uri), tags=dict(tags)).info.run_id
    except (MlflowException, OSError) as error:
        raise InputError(f"the MLflow store {uri} cannot be used: {str(error).splitlines()[0]}") from None
    try:
        for param, value in params.items():
            client.log_param(run_id, param, value)
        _log_curves(client, run_id, curves)
        for metric, value in metrics.items():
            client.log_metric(run_id, _metric_name(metric), value)
        client.log_artifacts(run_id, str(artifact), name)
        if figures is not None:
            client.log_artifacts(run_id, str(figures), "figures")
        client.log_text(run_id, report, "report.txt")
        model = _register(client, run_id, register_as) if register_as else None
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return Tracked(uri, run_id, model)


def _experiment(client: Any, uri: str) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    # A local store keeps its files beside its database; elsewhere the server knows where they belong.
    beside = Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlruns" if uri.startswith("sqlite:///") else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=beside.as_uri() if beside else None))


def _log_curves(client: Any, run_id: str, curves: Sequence[Mapping[str, float]]) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    points = [
        Metric(_metric_name(name), float(value), now, int(row["step"]))
        for row in curves
        for name, value in row.items()
        if name != "step"
    ]
    for first in range(0, len(points), MOST_AT_ONCE):
        client.log_batch(run_id, metrics=points[first : first + MOST_AT_ONCE])


def _register(client: Any, run_id: str, register_as: str) -> str:
    from mlflow.exceptions import MlflowException

    name, alias = model_name(register_as)
    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)
    source = f"{client.get_run(run_id).info.artifact_uri}/{POLICY}"
    version = client.create_model_version(name, source=source, run_id=run_id).version
    client.set_registered_model_alias(name, alias, version)
    return f"models:/{name}@{alias}"


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits and a few signs only."""
    return re.sub(r"[^\w\-. /]", "_", name)
