"""TRL's GKD trainer beside disaggkd: the same pair, the same token batches in the same order, forward KL.

    python scripts/peers/trl_gkd.py configs/two-cores.yaml [KEY=VALUE ...] [--steps 8] [--json]

TRL's GKD trainer is colocated and forms full logits. Its on-policy trainer has a chunked loss, which is put into the
same GKD trainer here, because that one alone trains on given texts; where this TRL has none, that row is skipped with
the reason. Each is given the very batches that disaggkd's run would train on, each
row one token longer so that the same positions are supervised, with the same optimizer settings; so losses are
comparable step by step. Both run on this machine with all its cores. Without `trl` the comparison is skipped, and says
so; `pip install 'disaggkd[peers]'` brings it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disaggkd_cli.bench.runs import machine, watch_run
from disaggkd_cli.config import Config, load
from disaggkd_cli.data import load_splits, load_tokenizer
from disaggkd_cli.models import build_student, load_causal_lm, resolve_source
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.schedule import WorkPlan

FORCED = ["data.packing='off'", "train.schedule=constant", "train.warmup_steps=0", "train.eval_every=0",
          "train.save_every=0", "data.eval_sequences=1", "loss.divergence=forward_kl", "loss.temperature=1.0",
          "student.dtype=float32", "teacher.dtype=float32", "transport.dtype=float32"]  # fmt: skip
OURS = {
    "disaggkd, colocated, full logits": ["mode=colocated", "loss.implementation=full"],
    "disaggkd, colocated, fused": ["mode=colocated", "loss.implementation=fused"],
    "disaggkd, disaggregated, fused": ["mode=disaggregated", "loss.implementation=fused"],
}


def batches(config: Config) -> Iterator[dict[str, Tensor]]:
    """Yield each micro-batch as TRL wants it: labels unshifted, so each row has one more token at its end."""
    tokenizer = load_tokenizer(config.student.model)
    splits = load_splits(config.data, tokenizer, pack=False, seed=config.seed)
    plan = WorkPlan(config, splits.train, splits.evaluation, 0, tokenizer.pad_token_id)
    for item in plan.items(0):
        if item.evaluation:
            continue
        ids, targets = item.batch.input_ids, item.batch.labels
        # The token after the last one of a row: only targets know it, and only where it counts.
        last = targets[:, -1:].clamp(min=0)
        labels = torch.cat([torch.full_like(ids[:, :1], -100), targets], dim=1)
        longer = torch.cat([ids, last], dim=1)
        ones = torch.ones_like(longer)
        yield {"input_ids": longer, "attention_mask": ones, "labels": labels, "prompts": longer[:, :1],
               "prompt_attention_mask": ones[:, :1]}  # fmt: skip


def chunked_loss() -> Any:
    """Return TRL's chunked divergence over hidden states, or the reason (a string) why there is none."""
    try:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss
    except ImportError as error:
        return f"this TRL has no chunked divergence ({error})"
    return _chunked_divergence_loss


def run_trl(config: Config, folder: Path, chunked: Any = None) -> dict[str, Any]:
    """Train with TRL and return the loss and the seconds of each step.

    Args:
        chunked: TRL's own chunked loss, to stand in for the one over full logits.
    """
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    prepared = list(batches(config))
    losses: list[float] = []
    seconds: list[float] = []

    class InOrder(GKDTrainer):
        """The trainer as it is, but with the data in the order given."""

        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            if chunked is None:
                return super().compute_loss(model, inputs, return_outputs, **more)
            start = inputs["prompts"].shape[1] - 1
            arguments = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"],
                         "use_cache": False}  # fmt: skip
            with torch.no_grad():
                teacher_states = self.teacher_model.base_model(**arguments).last_hidden_state
            states = model.base_model(**arguments).last_hidden_state
            mask = inputs["labels"][:, start + 1 :] != -100
            return chunked(
                states[:, start:-1], teacher_states[:, start:-1], model.get_output_embeddings().weight,
                self.teacher_model.get_output_embeddings().weight, mask, beta=0.0,
                num_items_in_batch=more.get("num_items_in_batch"),
            )[0]  # fmt: skip

    class Clock(TrainerCallback):
        """Notes the loss and the time of each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    train = config.train
    settings = GKDConfig(
        output_dir=str(folder), max_steps=train.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=train.accumulation, learning_rate=train.learning_rate,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=train.weight_decay, max_grad_norm=train.clip_norm,
        adam_beta1=train.adam_betas[0], adam_beta2=train.adam_betas[1], adam_epsilon=1e-8, logging_steps=1,
        logging_first_step=True, report_to=[], save_strategy="no", use_cpu=True, bf16=False, fp16=False,
        gradient_checkpointing=False, disable_tqdm=True, seed=config.seed, dataloader_num_workers=0,
        lmbda=0.0, beta=0.0, temperature=1.0, seq_kd=False,
    )  # fmt: skip
    teacher = load_causal_lm(resolve_source(config.teacher.model, trust_remote_code=False), torch.float32, "teacher")
    trainer = InOrder(
        model=build_student(config), teacher_model=teacher, args=settings,
        data_collator=lambda rows: prepared[rows[0]["number"]],
        train_dataset=Dataset.from_list([{"number": index} for index in range(len(prepared))]),
        processing_class=load_tokenizer(config.student.model), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return {"losses": losses[: train.steps], "seconds": seconds}


def run_ours(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Train with `disaggkd run` and return the loss and the seconds of each step."""
    watched = watch_run([*arguments, f"run_dir={folder}", "--restarts", "0"], timeout=600)
    if watched.code != 0:
        raise SystemExit(watched.output)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    return {"losses": [line["loss"] for line in lines], "seconds": [line["step_seconds"] for line in lines]}


def main() -> int:
    """Run both and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("skipped: trl is not installed here; pip install 'disaggkd[peers]'")
        return 0
    overrides = [*options.overrides, *FORCED, f"train.steps={options.steps}", "student.ranks=1"]
    config = load(options.config, overrides)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        import trl

        results = {f"TRL {trl.__version__} GKD, full logits": run_trl(config, Path(folder) / "trl")}
        chunked = chunked_loss()
        if isinstance(chunked, str):
            print(f"skipped: TRL's chunked loss: {chunked}")
        else:
            name = f"TRL {trl.__version__} GKD, chunked loss"
            try:
                results[name] = run_trl(config, Path(folder) / "chunked", chunked)
            except (TypeError, RuntimeError, NotImplementedError) as error:
                print(f"skipped: {name}: {type(error).__name__}: {error}")
        for number, (name, more) in enumerate(OURS.items()):
            arguments = [options.config, *overrides, *more]
            results[name] = run_ours(arguments, Path(folder) / f"ours{number}")
    first = next(iter(results.values()))
    for one in results.values():
        warm = sorted(one["seconds"][len(one["seconds"]) // 4 :])
        one["step_seconds"] = warm[len(warm) // 2]
        one["largest_difference"] = max(abs(a - b) for a, b in zip(first["losses"], one["losses"], strict=True))
    if options.json:
        print(json.dumps({"machine": machine(), "steps": options.steps, "runs": results}, indent=2))
        return 0
    host = machine()
    print(f"{options.config}, {options.steps} steps; {host['processor']}, {host['cores']} cores, torch {host['torch']}")
    for name, one in results.items():
        print(
            f"{name:36} loss {one['losses'][0]:.6f} -> {one['losses'][-1]:.6f} "
            f"(at most {one['largest_difference']:.1e} from TRL's)  median step {one['step_seconds']:.3f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
