"""What `lorazor tune` refuses, and why: arguments out of range, requests that training saw, losses under the noise."""

from __future__ import annotations

from pathlib import Path

from lorazor.features.errors import InputError
from lorazor.policy.artifact import REGISTRY_PREFIX
from lorazor.training.calibration import Scored
from lorazor.training.losses import Kind
from lorazor.training.traces import Noise


def noise_floor(noise: Noise, kind: Kind, mean_score: float) -> float:
    """The loss of never against itself: numerics move a score either way, so half of the mean absolute difference.

    Relative to the mean score for relative losses. 0 for net and signed ones, in which the two ways cancel.
    """
    if kind in ("net", "signed") or not mean_score:
        return 0.0
    return noise.mean_abs_diff / 2 / (mean_score if kind == "relative" else 1.0)


def noise_text(noise: Noise | None, kind: Kind, mean_score: float) -> str:
    """The noise floor of a task in words."""
    if noise is None:
        return "not measured for this task"
    floor = noise_floor(noise, kind, mean_score)
    differing = f"{noise.differing} of {noise.n} outputs differ"
    return f"never against never under another batch size loses {floor:.2%} ({kind}); {differing}"


def check_arguments(
    artifact_dir: str | Path,
    max_drop: float | None,
    confidence: float,
    task: str | None,
    threshold: float | None,
    target_share: float | None,
) -> None:
    """InputError unless exactly one of the three ways is asked for, and within its range."""
    if str(artifact_dir).startswith(REGISTRY_PREFIX):
        raise InputError(
            f"{artifact_dir}: thresholds are written into the artifact; give a folder, not a registry name"
        )
    given = {"--max-drop": max_drop, "--threshold": threshold, "--target-share": target_share}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InputError(f"give one of {', '.join(given)}, got {' and '.join(named) or 'none'}")
    if max_drop is not None and not 0 < max_drop < 1:
        raise InputError(f"--max-drop must be above 0 and below 1, got {max_drop:g}")
    if not 0 < confidence < 1:
        raise InputError(f"--confidence must be above 0 and below 1, got {confidence:g}")
    for name in ("--threshold", "--target-share"):
        value = given[name]
        if value is None:
            continue
        if task is None:
            raise InputError(f"{name} is for one task: name it with --task")
        if not 0 <= value <= 1:
            raise InputError(f"{name} must be in [0, 1], got {value:g}")


def loss_kind(kind: Kind | None, greedy: bool) -> Kind:
    """The kind asked for, or the one that fits: relative, and signed where the traces were sampled."""
    if kind is None:
        return "relative" if greedy else "signed"
    if not greedy and kind != "signed":
        raise InputError(
            f"the traces were sampled, so S and R are different draws: the loss must be signed, not {kind}"
        )
    return kind


def check_unseen(task: str, scored: Scored) -> None:
    """InputError when training saw any of the requests: what a model has seen cannot vouch for it."""
    if scored.seen:
        raise InputError(
            f"task {task!r}: training saw {len(scored.seen):,} of the {len(scored.table):,} calibration requests "
            f"(one is {scored.seen[0]!r}); tune on others, or leave them out with --unseen-only"
        )


def check_noise(task: str, scored: Scored, noise: Noise | None, kind: Kind, max_drop: float) -> None:
    """InputError for a max-drop below the noise floor: not even never releasing would keep it."""
    if noise is None:
        return
    floor = noise_floor(noise, kind, float(scored.table.score.mean()))
    if max_drop < floor:
        raise InputError(
            f"task {task!r}: --max-drop {max_drop:g} is below the noise floor {floor:.4g}, the {kind} loss of never "
            "releasing against itself under another batch size"
        )
