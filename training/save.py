"""From a trained model to the policy artifact: everything of policy.json but the thresholds, which `tune` sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import lightgbm as lgb
from pydantic import ValidationError

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import save_artifact
from lorazor.policy.manifest import AdapterEntry, Manifest, TaskPolicy
from lorazor.training.baselines import Score
from lorazor.training.dataset import Dataset
from lorazor.training.provenance import made_by
from lorazor.training.thresholds import threshold_grid
from lorazor.training.traces import Meta


def request_hash(request_id: str) -> str:
    """What policy.json keeps of a request id: the first 16 hex digits of its sha256."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def save(
    out: Path,
    booster: lgb.Booster,
    data: Dataset,
    meta: Meta,
    *,
    seed: int,
    held_out: Score,
    digest: str,
    probes: bool = True,
) -> None:
    """Write the artifact folder; every task's threshold is None (never).

    Args:
        booster: fitted on all requests of `data`; `trained_on` lists them, for none may calibrate a threshold.
        held_out: the scores of the same model fitted on the training requests alone. The threshold grids are made of
            those that it gives to the others, because the scores to come are also of requests unseen.
        probes: whether it was fitted on what probes say.
    """
    try:
        manifest = Manifest(
            schema_hash=SCHEMA_HASH,
            features=list(FEATURES),
            probe_interval=meta.probe_interval,
            probes=probes,
            base_fingerprint=meta.base.fingerprint,
            adapters=_adapters(data, meta),
            tasks={t: TaskPolicy(threshold=None, mean_output_tokens=m) for t, m in data.mean_output_tokens.items()},
            threshold_grid={task: threshold_grid(table, held_out(table)) for task, table in data.unseen.items()},
            trained_on=_hashes(data.split.everyone),
            made=made_by(
                base=meta.base.name,
                data_digest=digest,
                seed=seed,
                rounds=booster.num_trees(),
                traces=meta.command,
            ),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"meta.json does not fit a policy artifact: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    save_artifact(out, manifest, booster.model_to_string())


def _adapters(data: Dataset, meta: Meta) -> list[AdapterEntry]:
    """Those of the tasks that have requests; others were listed but never collected."""
    return [
        AdapterEntry(name=a.name, fingerprint=a.fingerprint, task=a.task) for a in meta.adapters if a.task in data.train
    ]


def _hashes(request_ids: Iterable[str]) -> list[str]:
    return sorted(map(request_hash, request_ids))
