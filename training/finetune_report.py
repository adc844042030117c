"""What a fine-tuning run came to: for a person, for the model card and record, and for MLflow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorazor.training import tracking
from lorazor.training.finetune_config import FinetuneConfig
from lorazor.training.finetune_data import Examples
from lorazor.training.finetune_save import METRICS, card
from lorazor.training.finetune_trainer import FinetuneTrainer
from lorazor.training.provenance import git_sha
from lorazor.training.publish import AUTO


@dataclass(frozen=True)
class FinetuneReport:
    """Where the adapter is, and what validation says of it (the mean over target tokens, and shares of examples).

    Attributes:
        begun: the same of the adapter that the run went on from; empty where it began anew.
    """

    out: Path
    steps: int
    best_step: int
    metrics: dict[str, float]
    begun: dict[str, float]
    tracked: tracking.Tracked | None = None

    def render(self) -> str:
        """A few lines for a person."""
        lines = [f"Adapter in {self.out}: {self.steps} steps, weights of step {self.best_step}"]
        if self.metrics:
            lines.append(f"  never released             {self._judged('never')}")
            lines.append(f"  released after the prompt  {self._judged('prompt')}")
        if self.tracked is not None:
            lines.append(f"  MLflow run {self.tracked.run_id} in {self.tracked.uri}")
        return "\n".join(lines)

    def _judged(self, path: str) -> str:
        loss, exact = f"{path}_loss", f"{path}_exact"
        text = f"loss {self.metrics[loss]:.4f}, exact {self.metrics[exact]:.1%}"
        return f"{text} (before: {self.begun[loss]:.4f}, {self.begun[exact]:.1%})" if self.begun else text


def validated(log: list[dict[str, float]], step: int) -> dict[str, float]:
    """What the validation after that step gave; empty where there was none."""
    rows = [row for row in log if row["step"] == step and "eval_loss" in row]
    return {name: rows[-1][f"eval_{name}"] for name in ("loss", "exact", *METRICS)} if rows else {}


def summary(
    trainer: FinetuneTrainer, config: FinetuneConfig, examples: Examples, report: FinetuneReport
) -> dict[str, Any]:
    """What the model card and the record say of this run."""
    return {
        "steps": report.steps,
        "best_step": report.best_step,
        "batch": config.batch * config.accumulate * trainer.args.world_size,
        "examples": len(examples.train),
        "held": len(examples.validation),
        "data_digest": examples.digest(),
        "metrics": report.metrics,
        **({"begun": report.begun} if report.begun else {}),
        "log": trainer.state.log_history,
    }


def track(
    trainer: FinetuneTrainer, config: FinetuneConfig, examples: Examples, report: FinetuneReport, uri: str
) -> FinetuneReport:
    """Log the run, with its curves and the adapter, to an MLflow store; the report that says where."""
    run = summary(trainer, config, examples, report)
    tracked = tracking.track(
        tracking.default_uri() if uri == AUTO else uri,
        artifact=report.out,
        name="adapter",
        params={**config.recipe(), "base": config.base, "examples": run["examples"], "batch_in_all": run["batch"]},
        metrics={f"best_{name}": value for name, value in report.metrics.items()},
        curves=run["log"],
        tags={"data_digest": run["data_digest"], "git": git_sha()},
        report=card(config, run),
    )
    return replace(report, tracked=tracked)
