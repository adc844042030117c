"""`lorazor tune`: the threshold of each task, with a guarantee, on requests that training never saw.

The guarantee is Learn then Test (see ltt.py, losses.py, pvalues.py): with the asked confidence over the draw of the
calibration requests, the loss of the threshold that is kept is at most max-drop on requests like them. By hand
(`threshold`) or by outcome (`target_share`), a threshold is set without a guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lorazor.features.errors import InputError
from lorazor.policy.artifact import update_tasks
from lorazor.policy.manifest import Guarantee, TaskPolicy
from lorazor.training.calibration import Calibration, Scored, calibration
from lorazor.training.losses import LOOSEST_BUDGET, Kind, certifiable, observed, p_values, requests_needed, upper_bound
from lorazor.training.ltt import keep
from lorazor.training.replay import Floats, active_row_share, summarize
from lorazor.training.traces import Noise
from lorazor.training.tune_checks import check_arguments, check_noise, check_unseen, loss_kind, noise_text
from lorazor.training.tune_report import Tested, TunedTask, TuneReport, write_json


def tune(
    artifact_dir: str | Path,
    traces_dir: str | Path,
    *,
    max_drop: float | None = None,
    confidence: float = 0.9,
    kind: Kind | None = None,
    task: str | None = None,
    threshold: float | None = None,
    target_share: float | None = None,
    unseen_only: bool = False,
    json_path: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TuneReport:
    """Choose the thresholds of an artifact and write them into its policy.json (atomically, all or none).

    Args:
        artifact_dir: a policy artifact; its thresholds are replaced.
        traces_dir: calibration traces and rollouts.
        max_drop: the loss that is allowed, in (0, 1); see losses.py for the kinds.
        confidence: of the guarantee, in (0, 1).
        kind: None is relative, or signed for sampled traces (not greedy), for which it is the only one.
        task: this task only; needed with `threshold` and `target_share`.
        threshold: set by hand, in [0, 1].
        target_share: the active-row share wanted; takes the threshold whose share here is the nearest at or below it.
        unseen_only: leave out the requests that training saw, instead of refusing them.
        json_path: where to write `TuneReport.to_dict()`.
        progress: called with one line per task.

    Raises:
        InputError: see above; also a max-drop below the noise floor, an unknown task, another base, g or schema.
    """
    check_arguments(artifact_dir, max_drop, confidence, task, threshold, target_share)
    data = calibration(artifact_dir, traces_dir, task=task, unseen_only=unseen_only)
    kind = loss_kind(kind, data.meta.greedy)
    for name, scored in data.tasks.items():
        check_unseen(name, scored)
        if max_drop is not None:
            check_noise(name, scored, data.meta.noise.get(name), kind, max_drop)
    tuned: dict[str, TunedTask] = {}
    for name, scored in data.tasks.items():
        progress(f"{name}: {len(scored.table):,} requests")
        by, chosen, tested = "set by hand", threshold, None
        if target_share is not None:
            by, chosen = f"for a target share of {target_share:.1%}", threshold_for_share(scored, target_share)
        elif max_drop is not None:
            by = "Learn then Test"
            chosen, tested = learn_then_test(scored, data.grid(name), kind, max_drop, confidence)
        tuned[name] = _described(scored, chosen, by, kind, confidence, data.meta.noise.get(name), tested)
    update_tasks(artifact_dir, {name: _policy(data, name, t) for name, t in tuned.items()})
    report = TuneReport(Path(artifact_dir), tuned, _notes(data, kind))
    if json_path is not None:
        write_json(json_path, report.to_dict())
    return report


def learn_then_test(
    scored: Scored, grid: Floats, kind: Kind, max_drop: float, confidence: float
) -> tuple[float | None, Tested]:
    """The threshold of `grid` (strictest first) that is kept, None for never, and how the tests went.

    A threshold that passes but releases no request with S > 0 at its full score saves nothing that counts (it passes
    because it hardly ever releases), and becomes never.
    """
    never, level = scored.table.score, 1 - confidence
    if not len(grid):
        return None, Tested(max_drop, 0, 1.0, certifiable=certifiable(kind, never, level))
    released = scored.released_scores(grid)

    def p_of(some: slice, at: float) -> Floats:
        return p_values(kind, never, released[:, some], max_drop, at)[None]

    budget = LOOSEST_BUDGET.get(kind, 0.0)
    (kept,) = keep(p_of, len(grid), level, budget)
    if kept.index is not None:
        threshold = float(grid[kept.index])
        useful = _releases_safely(scored, threshold)
        return threshold if useful else None, Tested(max_drop, len(grid), kept.p_value, passed=kept.index + 1)
    strictest, walk = released[:, 0], level * (1 - budget)
    return None, Tested(
        max_drop,
        len(grid),
        kept.p_value,
        strictest_loss=observed(kind, never, strictest),
        needed=requests_needed(kind, never, strictest, max_drop, walk),
        certifiable=certifiable(kind, never, walk),
    )


def _releases_safely(scored: Scored, threshold: float) -> bool:
    table = scored.table
    outcome = table.outcome(table.first_decision(scored.scores, threshold))
    return bool((outcome.released & table.solved & (outcome.score >= table.score)).any())


def threshold_for_share(scored: Scored, target: float) -> float:
    """The highest threshold whose active-row share is at most `target`; the share grows with the threshold.

    Raises:
        InputError: even releasing at every request's first decision leaves a larger share.
    """
    candidates = np.unique(scored.scores[~np.isnan(scored.scores)])
    table = scored.table

    def share(index: int) -> float:
        return active_row_share(table, table.outcome(table.first_decision(scored.scores, float(candidates[index]))))

    if not len(candidates) or (least := share(0)) > target:
        least = 1.0 if not len(candidates) else least
        raise InputError(
            f"task {table.task!r}: --target-share {target:g} is below {least:.3f}, the least that is possible"
        )
    low, high = 0, len(candidates)  # share(low) <= target, and high is past the end or above the target
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share(middle) <= target else (low, middle)
    return float(candidates[low])


def _described(
    scored: Scored,
    threshold: float | None,
    by: str,
    kind: Kind,
    confidence: float,
    noise: Noise | None,
    tested: Tested | None,
) -> TunedTask:
    table = scored.table
    outcome = table.outcome(table.first_decision(scored.scores, threshold))
    loss: float | None = 0.0
    bound: float | None = 0.0
    if threshold is not None:
        loss = observed(kind, table.score, outcome.score)
        bound = upper_bound(kind, table.score, outcome.score, 1 - confidence)
    return TunedTask(
        by=by,
        threshold=threshold,
        kind=kind,
        confidence=confidence,
        loss=loss,
        bound=bound,
        overall=summarize(table, outcome),
        solved=summarize(table, outcome, solved_only=True) if table.solved.any() else None,
        left_out=table.left_out,
        noise=noise_text(noise, kind, float(table.score.mean())),
        tested=tested,
    )


def _policy(data: Calibration, name: str, tuned: TunedTask) -> TaskPolicy:
    """The task's entry of policy.json; a guarantee only for a threshold that was tested and kept."""
    t, guarantee = tuned.tested, None
    if t is not None and tuned.threshold is not None:
        guarantee = Guarantee(
            kind=tuned.kind,
            max_drop=t.max_drop,
            confidence=tuned.confidence,
            n=tuned.overall.n,
            loss=tuned.loss,
            bound=tuned.bound,
            p_value=t.p_value,
            active_row_share=tuned.overall.active_row_share,
            length_ratio=tuned.overall.length_ratio,
        )
    mean = data.artifact.manifest.tasks[name].mean_output_tokens
    return TaskPolicy(threshold=tuned.threshold, mean_output_tokens=mean, guarantee=guarantee)


def _notes(data: Calibration, kind: Kind) -> tuple[str, ...]:
    notes = [f"task {t!r} of the traces is unknown to the policy and was skipped" for t in data.unknown]
    if kind == "signed":
        notes.append("signed losses are in points of the full score: S and R may be different draws")
    missing = [t for t in data.artifact.manifest.tasks if t not in data.tasks]
    if missing:
        notes.append(f"left as it was, for lack of requests or by --task: {', '.join(missing)}")
    return tuple(notes)
