"""Measures where an adapter can be released, with a plain transformers + PEFT decoding loop under the boundary rule.

    python examples/probe_release.py .models/SmolLM2-135M-Instruct examples/adapters/dispatch --requests 512

Per release step of the grid it prints the score, the share of safe requests and the active-row share; then how the best
fixed release step compares with a per-request oracle and with a rule that only looks at the probes. The numbers go to
release_probe.json in the adapter's folder and into its model card.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model_card import write_card
from peft import PeftModel
from tasks import generate, score
from torch import Tensor
from torch.nn.functional import log_softmax
from train_adapters import BASE_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lorazor.features.grid import decision_steps, release_grid, release_step
from lorazor.training.boundary_mask import BoundaryMask

NEVER = 1 << 30
DROP = 0.03  # the drop at which shares are compared


class Decoder:
    """Greedy decoding in batches; each row has its own release step."""

    def __init__(self, model: PeftModel, mask: BoundaryMask, pad: int, eos: int, max_tokens: int) -> None:
        self.model, self.mask, self.pad, self.eos, self.max_tokens = model, mask, pad, eos, max_tokens
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def decode(
        self, prompts: list[list[int]], releases: list[int], probe: bool = False
    ) -> tuple[list[list[int]], np.ndarray]:
        """Output tokens per row, the end token included, and KL(adapter ‖ base) in nats, float32 [rows, steps].

        Release step 0 stands for no adapter at all. KL is there for `probe` only, and NaN at step 0.
        """
        tokens, positions, attention = self._left_pad(prompts)
        lengths = attention.sum(1)
        boundaries = torch.where(torch.tensor(releases, device=self.device) > 0, lengths - 1, -NEVER)
        boundaries += torch.tensor(releases, device=self.device)
        cache = DynamicCache()
        outputs: list[Tensor] = []
        kl: list[Tensor] = []
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        while len(outputs) < self.max_tokens and not done.all():
            base = None
            if probe and outputs:
                base = self._forward(tokens, positions, torch.zeros_like(boundaries), attention, cache)
                cache.crop(-1)
            logits = self._forward(tokens, positions, boundaries, attention, cache)
            if base is not None:
                p, q = log_softmax(logits.float(), -1), log_softmax(base.float(), -1)
                kl.append((p.exp() * (p - q)).sum(-1))
            chosen = logits.argmax(-1)
            outputs.append(torch.where(done, self.pad, chosen))
            done |= chosen == self.eos
            tokens, positions = outputs[-1][:, None], positions[:, -1:] + 1
            attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)
        rows = [self._until_end(row) for row in torch.stack(outputs, 1).tolist()]
        first = torch.full((len(prompts), 1), float("nan"), device=self.device)
        return rows, torch.cat([first, *(step[:, None] for step in kl)], 1).cpu().numpy()

    def _forward(
        self, tokens: Tensor, positions: Tensor, boundaries: Tensor, attention: Tensor, cache: DynamicCache
    ) -> Tensor:
        self.mask.set(positions, boundaries)
        return self.model(
            input_ids=tokens, position_ids=positions, attention_mask=attention, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]

    def _left_pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, prompts))
        tokens = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts], device=self.device)
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        return tokens, (attention.cumsum(1) - 1).clamp(min=0), attention

    def _until_end(self, row: list[int]) -> list[int]:
        return row[: row.index(self.eos) + 1] if self.eos in row else row


@dataclass(frozen=True)
class Table:
    """Outcomes of n requests: column k of `scores` and `lengths` is release step grid[k]; NaN where not below the
    never-released length."""

    never: np.ndarray  # float [n], the score S
    length: np.ndarray  # int [n], L
    grid: list[int]
    scores: np.ndarray  # float [n, len(grid)]
    lengths: np.ndarray  # float [n, len(grid)]
    kl: np.ndarray  # float [n, steps]

    def outcome(self, column: np.ndarray) -> dict[str, float]:
        """Drop, active-row share and length ratio if request i is released at grid[column[i]]; -1 means never."""
        rows = np.arange(len(self.never))
        released = (column >= 0) & ~np.isnan(self.scores[rows, column])
        score = np.where(released, self.scores[rows, column], self.never)
        steps = np.where(released, np.array(self.grid)[column], self.length)
        out = np.where(released, self.lengths[rows, column], self.length)
        return {
            "score": float(score.mean()),
            "drop": float(1 - score.mean() / self.never.mean()) if self.never.any() else float("nan"),
            "active_row_share": float((steps - 1).sum() / (self.length - 1).sum()),
            "length_ratio": float(out[released].sum() / self.length[released].sum()) if released.any() else 1.0,
        }

    def fixed(self, k: int) -> dict[str, float]:
        return self.outcome(np.full(len(self.never), k))

    def safe(self) -> np.ndarray:
        """bool [n, len(grid)]: S > 0 and R >= S."""
        return (self.never > 0)[:, None] & (self.scores >= self.never[:, None])

    def oracle(self) -> dict[str, float]:
        safe = self.safe()
        return self.outcome(np.where(safe.any(1), safe.argmax(1), -1))

    def kl_rule(self, threshold: float, interval: int, calm: int) -> dict[str, float]:
        """Release at the first decision that ends `calm` probes in a row with KL at most `threshold`."""
        column = np.full(len(self.never), -1)
        for i, length in enumerate(self.length):
            streak = 0
            for c in decision_steps(int(length), interval)[1:]:
                streak = streak + 1 if self.kl[i, c] <= threshold else 0
                if streak == calm:
                    column[i] = self.grid.index(release_step(c))
                    break
        return self.outcome(column)


def measure(
    decoder: Decoder, tokenizer, task: str, count: int, batch: int, interval: int
) -> tuple[Table, dict[str, float]]:
    """The table of `count` requests, and how the base does without the adapter."""
    items = list(generate(task, count))
    chats = [tokenizer.apply_chat_template(i["messages"], tokenize=False, add_generation_prompt=True) for i in items]
    prompts = tokenizer(chats, add_special_tokens=False).input_ids

    def run(jobs: list[tuple[int, int]], probe: bool = False):
        """Scores, lengths and KL of (request, release step) jobs, decoded in batches."""
        scores, lengths, kls = [], [], []
        for start in range(0, len(jobs), batch):
            part = jobs[start : start + batch]
            rows, kl = decoder.decode([prompts[i] for i, _ in part], [r for _, r in part], probe)
            texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
            scores += [score(text, items[i]["reference"]) for text, (i, _) in zip(texts, part, strict=True)]
            lengths += map(len, rows)
            kls.append(np.pad(kl, ((0, 0), (0, decoder.max_tokens - kl.shape[1])), constant_values=np.nan))
        return np.array(scores), np.array(lengths), np.concatenate(kls)

    never, length, kl = run([(i, NEVER) for i in range(count)], probe=True)
    base, base_length, _ = run([(i, 0) for i in range(count)])
    grid = release_grid(int(length.max()), interval)
    jobs = [(i, r) for i in range(count) for r in release_grid(int(length[i]), interval)]
    released = run(jobs)
    scores, lengths = np.full((2, count, len(grid)), np.nan)
    for (i, r), s, n in zip(jobs, released[0], released[1], strict=True):
        scores[i, grid.index(r)], lengths[i, grid.index(r)] = s, n
    return Table(never, length, grid, scores, lengths, kl), {"score": base.mean(), "length": base_length.mean()}


def report(table: Table, base: dict[str, float], interval: int) -> dict[str, object]:
    """What decides whether the task suits the demo, as plain numbers."""
    safe = table.safe().sum(0) / max(1, (table.never > 0).sum())
    outcomes = [{"release": r, **table.fixed(k), "safe": float(safe[k])} for k, r in enumerate(table.grid)]
    fixed = [row for row in outcomes if row["drop"] <= DROP]
    thresholds = np.quantile(table.kl[~np.isnan(table.kl)], np.linspace(0.02, 0.98, 49))
    rules = [{"kl": t, "calm": k, **table.kl_rule(t, interval, k)} for t in thresholds for k in (1, 2)]
    kept = [rule for rule in rules if rule["drop"] <= DROP]
    never = {"release": "never", "score": float(table.never.mean()), "safe": 1.0, "drop": 0.0, "active_row_share": 1.0}
    return {
        "requests": len(table.never),
        "mean_output_tokens": float(table.length.mean()),
        "max_output_tokens": int(table.length.max()),
        "base_output_tokens": base["length"],
        "outcomes": [{"release": "none at all", "score": base["score"], "safe": 0.0}, *outcomes, never],
        "oracle": table.oracle(),
        "best_fixed": min(fixed, key=lambda row: row["active_row_share"], default=never),
        "best_kl_rule": min(kept, key=lambda row: row["active_row_share"], default=never),
    }


def render(result: dict) -> str:
    lines = [f"{'release':>12} {'score':>6} {'safe':>6} {'drop':>7} {'active':>7} {'length':>7}"]
    for row in result["outcomes"]:
        rest = "".join(f" {row.get(key, float('nan')):7.3f}" for key in ("drop", "active_row_share", "length_ratio"))
        lines.append(f"{row['release']:>12} {row['score']:6.3f} {row['safe']:6.3f}{rest}")
    for key in ("oracle", "best_fixed", "best_kl_rule"):
        named = " ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in result[key].items())
        lines.append(f"{key}: {named}")
    lines.append(f"mean output {result['mean_output_tokens']:.1f}, longest {result['max_output_tokens']} tokens")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path, help="a folder that train_adapters.py wrote")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--probe-interval", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    task = json.loads((args.adapter / "training_log.jsonl").open().readline())["task"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device)
    model = PeftModel.from_pretrained(base, args.adapter).eval()
    decoder = Decoder(model, BoundaryMask(model), tokenizer.eos_token_id, tokenizer.eos_token_id, args.max_tokens)
    result = report(
        *measure(decoder, tokenizer, task, args.requests, args.batch, args.probe_interval), args.probe_interval
    )
    print(f"{args.adapter.name} ({task})\n{render(result)}")
    (args.adapter / "release_probe.json").write_text(json.dumps({"dtype": args.dtype, **result}, indent=1) + "\n")
    write_card(args.adapter, BASE_NAME)


if __name__ == "__main__":
    main()
