"""`lorazor finetune`: LoRA training for an adapter that can be let go.

transformers' Trainer does the work (checkpoints, mixed precision, several GPUs); the mask of each example's boundary
and the losses are in finetune_trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, TrainingArguments

from lorazor.features.errors import InputError
from lorazor.policy.fingerprint import fingerprint
from lorazor.training.finetune_config import FinetuneConfig
from lorazor.training.finetune_data import Examples, collate, load_examples
from lorazor.training.finetune_model import load_lora, load_tokenizer, token_limit
from lorazor.training.finetune_own import OwnOutputs
from lorazor.training.finetune_progress import ProgressCallback
from lorazor.training.finetune_report import FinetuneReport, summary, track, validated
from lorazor.training.finetune_save import save_adapter
from lorazor.training.finetune_store import Checkpoints
from lorazor.training.finetune_trainer import FinetuneTrainer
from lorazor.training.publish import AUTO

LOGS_PER_VALIDATION = 4


def _silent(_: str) -> None:
    """Progress that nobody reads."""


def finetune(
    config: FinetuneConfig,
    out: str | Path,
    *,
    resume: bool = False,
    mlflow_uri: str | None = AUTO,
    progress: Callable[[str], None] = _silent,
) -> FinetuneReport | None:
    """Train an adapter and write it to the new folder `out`; checkpoints lie in OUT.checkpoints until it is there.

    Args:
        resume: go on from the last checkpoint, if there is one.
        mlflow_uri: a tracking store; AUTO is `tracking.default_uri()`, None is none.
        progress: called with one line at the start of each stage.

    Returns:
        The report; None in every process but the first, where several work together.

    Raises:
        InputError: anything wrong with the configuration, the data, the model or the places, or too little memory.
    """
    checkpoints, first = Checkpoints(Path(out)), int(os.environ.get("RANK", "0")) == 0
    if first:  # the other processes of this run would find what the first one made
        checkpoints.check(resume)
    else:
        progress = _silent
    progress("reading data")
    tokenizer = load_tokenizer(config.model)
    examples = load_examples(config, tokenizer, token_limit(config))
    begun = {"init": fingerprint(config.init)} if config.init else {}
    settings = {"recipe": config.recipe(), "data": examples.digest(), "base": fingerprint(config.model), **begun}
    progress("loading the model")
    model = load_lora(config)
    if first:
        checkpoints.open(settings)
    trainer = make_trainer(config, examples, model, tokenizer, checkpoints.folder)
    last = checkpoints.last() if resume else None
    trainer.args.eval_on_start &= last is None  # else --patience would count a validation twice
    progress("training")
    try:
        trainer.train(resume_from_checkpoint=last)
    except torch.OutOfMemoryError:
        raise InputError(
            f"--batch {config.batch} does not fit into the GPU's memory: lower it and raise --accumulate (the same "
            "training, more slowly), or try --gradient-checkpointing"
        ) from None
    trainer.accelerator.wait_for_everyone()  # the first removes the checkpoints that all have read
    if not first:
        return None
    steps = trainer.state.global_step
    best = trainer.state.best_global_step or steps
    log = trainer.state.log_history
    report = FinetuneReport(Path(out), steps, best, validated(log, best), validated(log, 0))
    save_adapter(trainer.model, report.out, config, summary(trainer, config, examples, report) | begun)
    checkpoints.remove()
    return report if mlflow_uri is None else track(trainer, config, examples, report, mlflow_uri)


def make_trainer(
    config: FinetuneConfig, examples: Examples, model: Any, tokenizer: Any, checkpoints: Path
) -> FinetuneTrainer:
    """The trainer, ready to run."""
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    most = max(len(example.target) for example in examples.train)
    trainer = FinetuneTrainer(
        config=config,
        own=OwnOutputs(pad, end, most, config.refresh) if config.own_outputs else None,
        model=model,
        args=_arguments(config, bool(examples.validation), checkpoints),
        train_dataset=examples.train,
        eval_dataset=examples.validation or None,
        data_collator=partial(collate, pad=pad),
        callbacks=[EarlyStoppingCallback(config.patience)] if config.patience and examples.validation else [],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressCallback())
    return trainer


def _arguments(config: FinetuneConfig, validate: bool, checkpoints: Path) -> TrainingArguments:
    if torch.cuda.device_count() > 1 and "RANK" not in os.environ:
        # Trainer would use DataParallel, whose copies of the model do not see the mask.
        raise InputError(
            f"{torch.cuda.device_count()} GPUs are visible: start with torchrun --nproc-per-node, or set "
            "CUDA_VISIBLE_DEVICES to one of them"
        )
    best = {"load_best_model_at_end": True, "metric_for_best_model": f"eval_{config.select_on}"} if validate else {}
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        num_train_epochs=config.epochs,
        max_steps=config.steps or -1,
        learning_rate=config.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        optim="adamw_torch",
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),  # else bf16 is refused there, and torchrun's processes do not join
        seed=config.seed,
        logging_steps=max(1, config.eval_every // LOGS_PER_VALIDATION),
        logging_nan_inf_filter=False,
        eval_strategy="steps" if validate else "no",
        eval_steps=config.eval_every,
        eval_on_start=validate and config.init is not None,
        save_steps=config.eval_every,
        save_total_limit=2,
        greater_is_better=config.select_on == "exact",
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
        **best,
    )
