"""Traces as a server with a larger probe interval would have made them.

Exact where the new interval is a multiple of the old one: probes change no token, the decisions of the larger interval
are among those of the smaller, and so are the rollouts.
"""

from __future__ import annotations

import numpy as np

from lorazor.features.grid import is_decision_step_of_each, release_grid
from lorazor.training.trace_checks import checked
from lorazor.training.traces import PROBE_SIGNALS, TraceSet


def subsample(traces: TraceSet, probe_interval: int) -> TraceSet:
    """Without the probes and rollouts that belong to no decision of the larger interval.

    Raises:
        ValueError: it is no multiple of the interval of the traces.
    """
    if probe_interval % traces.meta.probe_interval:
        raise ValueError(f"{probe_interval} is no multiple of the traces' g = {traces.meta.probe_interval}")
    due = is_decision_step_of_each(traces.steps["step"].to_numpy(np.int64), probe_interval)
    steps = traces.steps.assign(probed=due)
    probes = [name for name in PROBE_SIGNALS if name in steps.columns]
    steps.loc[~due, probes] = np.nan
    grid = set(release_grid(int(traces.requests["length"].max()), probe_interval))
    rollouts = traces.rollouts
    kept = (rollouts["mode"] != "released") | rollouts["release_step"].isin(grid)
    meta = traces.meta.model_copy(update={"probe_interval": probe_interval})
    return checked(steps, rollouts[kept].reset_index(drop=True), meta)
