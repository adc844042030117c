"""A real policy artifact, quickly: LightGBM on planted traces, as `lorazor train` makes it but without baselines."""

from pathlib import Path

import lightgbm as lgb
import numpy as np

from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import Artifact, save_artifact
from lorazor.policy.manifest import AdapterEntry, Manifest, TaskPolicy
from lorazor.training.labels import safe
from lorazor.training.replay import ReplayTable
from lorazor.training.save import request_hash
from lorazor.training.thresholds import threshold_grid
from lorazor.training.traces import TraceSet


def planted_artifact(folder: Path, traces: TraceSet, trees: int = 40) -> Artifact:
    """An artifact trained on all of `traces` and saved at `folder`; every task's threshold is None (never)."""
    means = {task: float(traces.select(task).requests["length"].mean()) for task in traces.tasks}
    tables = {task: ReplayTable.from_traces(traces, task, mean) for task, mean in means.items()}
    features = np.concatenate([t.features for t in tables.values()])
    data = lgb.Dataset(features, np.concatenate([safe(t) for t in tables.values()]), feature_name=list(FEATURES))
    params = {"objective": "binary", "num_leaves": 15, "verbosity": -1, "num_threads": 1, "deterministic": True}
    booster = lgb.train(params, data, num_boost_round=trees)
    meta = traces.meta
    manifest = Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=meta.probe_interval,
        base_fingerprint=meta.base.fingerprint,
        adapters=[AdapterEntry(name=a.name, fingerprint=a.fingerprint, task=a.task) for a in meta.adapters],
        tasks={task: TaskPolicy(mean_output_tokens=mean) for task, mean in means.items()},
        threshold_grid={t: threshold_grid(x, booster.predict(x.features)) for t, x in tables.items()},
        trained_on=sorted(request_hash(str(i)) for i in traces.requests["request_id"]),
    )
    return save_artifact(folder, manifest, booster.model_to_string())
