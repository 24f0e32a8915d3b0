"""What a run says on the console while it trains: a line per logged step, evaluations, one progress bar on a terminal.

Once an hour and at the end one line says what makes the run slow, where a logged figure shows it, and which field
changes that (`why_slow`). Everything else that is logged is in metrics.jsonl and the trackers.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

STOCK = (PrinterCallback, ProgressCallback)  # of Trainer: all that is logged, and a bar for every evaluation
NOT_SHOWN = ("_runtime", "_per_second", "_model_preparation_time")  # of evaluations
PER_LINE = 6
WAITS = 0.15  # of the time, for data
PADDED = 0.3  # of the computed tokens
HALF_SPEED_TOKENS = 512  # a chunk of so few leaves half of a GPU idle, as the plan counts
IS_FREE = 0.5  # of a device's memory
SMALL = 0.25  # of a device's memory: what a whole model takes with gradients and AdamW's state
REDUCES = 0.5  # of the time
EFFICIENT = 0.8
BYTES_OF_ADAMW = 16  # a parameter in float32, its gradient and two moments
HOUR, SHORT = 3600, 60  # seconds between two lines about slowness; a run that is shorter gets none


class Console(TrainerCallback):
    """On the first process; the others are silent. A bar is drawn on a terminal, unless `disable_tqdm`.

    `facts()`: what the run is made of, name -> words, printed when training begins. `is_hidden`: whether a figure,
    without "eval_", is logged and not printed. `why_slow`: means of logged figures -> sentences.
    """

    def __init__(
        self,
        facts: Callable[[], Mapping[str, str]],
        is_hidden: Callable[[str], bool] = lambda name: False,
        why_slow: Callable[[Mapping[str, float]], list[str]] = lambda figures: [],
    ) -> None:
        self.facts, self.is_hidden, self.why_slow = facts, is_hidden, why_slow
        self._figures: dict[str, list[float]] = defaultdict(list)  # since the last line about slowness
        self.bar: tqdm | None = None
        self.is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.is_training, self.began_at, self.began = state.is_world_process_zero, state.global_step, time.monotonic()
        self._told_at = self.began
        self._figures.clear()
        if self.is_training:
            begin = f", from {state.global_step} on" if state.global_step else ""
            has_end = state.num_train_epochs < sys.maxsize  # as transformers counts those of a stream without a length
            epochs = f" ({state.num_train_epochs} epochs at most)" if has_end else ""
            steps = f"{state.max_steps:,}{epochs}{begin}"
            for name, words in (dict(self.facts()) | {"steps": steps, "output": args.output_dir}).items():
                print(f"{name:8}{words}", flush=True)
        if self.is_training and sys.stderr.isatty() and not args.disable_tqdm:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.bar is not None:
            self.bar.set_description(None, refresh=False)
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.bar is not None and self.bar.desc == "":
            self.bar.set_description("evaluating")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **others: Any) -> None:
        if not self.is_training or not logs or "train_runtime" in logs:
            return
        for name, value in logs.items():
            if isinstance(value, (int, float)) and not name.startswith("eval_"):
                self._figures[name].append(value)
        begin = f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
        if "loss" in logs or "learning_rate" in logs:
            text = "  ".join([begin, *step_words(logs), f"left {self._left(state)}"])
        else:
            text = evaluation_lines(begin, logs, self.is_hidden)
        if text:
            tqdm.write(text)
        self._say_why_slow(HOUR)

    def _say_why_slow(self, after_seconds: float) -> None:
        if time.monotonic() - self._told_at < after_seconds:
            return
        means = {name: sum(values) / len(values) for name, values in self._figures.items()}
        if words := self.why_slow(means):
            tqdm.write(f"slow    {'; '.join(words)}")
        self._told_at = time.monotonic()
        self._figures.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.is_training:
            self._say_why_slow(SHORT)
        self.is_training = False
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _left(self, state: Any) -> timedelta:
        per_step = (time.monotonic() - self.began) / max(1, state.global_step - self.began_at)
        left = timedelta.max.total_seconds() - 1  # where max_steps means "until I stop it"
        return timedelta(seconds=round(min(per_step * (state.max_steps - state.global_step), left)))


def step_words(logs: dict[str, Any]) -> list[str]:
    words = [f"loss {float(logs['loss']):.4g}"] if "loss" in logs else ["no finite loss"]
    if "accuracy" in logs:
        words.append(f"accuracy {logs['accuracy']:.3f}")
    if "rows_per_second" in logs:
        words.append(f"{logs['rows_per_second']:,.0f} rows/s")
    if "peak_memory_gib" in logs:
        words.append(f"{logs['peak_memory_gib']:.1f} GiB ({logs['memory_share']:.0%})")
    return words


def evaluation_lines(begin: str, logs: dict[str, Any], is_hidden: Callable[[str], bool]) -> str:
    """A figure after the other, `PER_LINE` on a line; nothing where there is no figure."""
    figures = {
        name.removeprefix("eval_"): value
        for name, value in logs.items()
        if name.startswith("eval_") and not name.endswith(NOT_SHOWN) and isinstance(value, (int, float))
    }
    cells = [f"{name} {value:.4g}" for name, value in figures.items() if not is_hidden(name)]
    lines = ["  ".join(cells[at : at + PER_LINE]) for at in range(0, len(cells), PER_LINE)]
    begin += "  evaluation: "
    return begin + f"\n{' ' * len(begin)}".join(lines) if lines else ""


# ---- what makes a run slow ----


def why_slow(
    figures: Mapping[str, float],
    *,
    workers: int,
    processes: int,
    device_bytes: int,
    is_sharded: bool,
    trained_parameters: int,
    frozen_bytes: int,
) -> list[str]:
    """Sentences for what the means of the logged `figures` show; none where nothing stands out. `device_bytes`: memory
    of one accelerator, 0 for a CPU."""
    said = []
    total = sum(value for name, value in figures.items() if name.startswith("seconds_"))
    if total and (share := figures.get("seconds_data", 0.0) / total) > WAITS:
        said.append(f"waited for data in {share:.0%} of the time: raise dataloader_num_workers (now {workers})")
    if processes > 1 and total and (share := _reduction(figures) / total) > REDUCES:
        said.append(
            f"reducing gradients took {share:.0%} of the time: a larger per_device_train_batch_size makes steps "
            "longer and rarer; ddp_comm_hook (DDP) or reduce_dtype (FSDP) sends half"
        )
    if (efficiency := figures.get("scaling_efficiency", 1.0)) < EFFICIENT:
        said.append(
            f"scaling efficiency is {efficiency:.0%}: raise per_device_train_batch_size, and between machines use "
            '"sharding": "HYBRID_SHARD" where FSDP runs'
        )
    whole = BYTES_OF_ADAMW * trained_parameters + frozen_bytes
    if is_sharded and whole < SMALL * device_bytes:
        said.append(
            f"FSDP gathers a model that takes {whole / 2**30:.1f} GiB of the {device_bytes / 2**30:.0f} GiB of "
            'a device with gradients and AdamW: "accelerate_config": "ddp" sends less'
        )
    tokens = figures.get("tokens_per_chunk", HALF_SPEED_TOKENS)
    is_small = tokens < HALF_SPEED_TOKENS and figures.get("num_chunks", 1) > 2
    if is_small and figures.get("memory_share", 1.0) < IS_FREE:
        said.append(
            f"chunks of {tokens:.0f} tokens leave the device idle, and {1 - figures['memory_share']:.0%} of its "
            'memory is free: raise gradient_cache_chunk_size, or "auto"'
        )
    if (share := figures.get("padding_share", 0.0)) > PADDED:
        said.append(
            f"{share:.0%} of the computed tokens were padding: gradient_cache_packing, gradient_cache_chunk_tokens or "
            "a lower max_length compute fewer"
        )
    return said


def _reduction(figures: Mapping[str, float]) -> float:
    """Seconds by which a step's last chunk took longer than the others, as it waits for the reduction."""
    others = figures.get("num_chunks", 1.0) - 1
    last = figures.get("seconds_last_backward", 0.0)
    return max(0.0, last - figures.get("seconds_replay", 0.0) / others) if others > 0 else 0.0
