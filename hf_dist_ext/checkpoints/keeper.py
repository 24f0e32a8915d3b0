"""`Keeper` holds what a run knows of its checkpoints; it finds the one to resume, and makes a save one act.

A save goes like this:

(1) the folder is emptied and marked as unfinished
(2) every rank writes its files
(3) when all ranks have, they share the reading, hashing and fsync of the files, and rank 0 writes the manifest
(4) older complete checkpoints beyond the limit are deleted, but never the newest proved one; the checkpoint is pushed
(5) the next finite update proves the checkpoint (checkpoints/manifest.py), and (4) deletes again

An error of one rank in any of them ends all ranks with it (strategies/consensus.py). With `save_async`, (3) and (4)
happen while training goes on, and so does the writing of what is large in (2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_dist_ext.checkpoints import async_save, commit, manifest, resume
from hf_dist_ext.checkpoints.loss_state import LOSS_WEIGHTS, load_loss, state_of
from hf_dist_ext.strategies import consensus
from hf_dist_ext.strategies.base import Strategy, meanwhile

logger = logging.get_logger(__name__)


class Keeper:
    """Made once per run, with its arguments, its loss, and a function that raises when the run's folder is no longer
    its own.

    Attributes:
        at_begin: what else `begin` does on this process.
        committed_step: of this run's last checkpoint.
        is_guarded: updates that are not finite are skipped; else every checkpoint counts as proved.
        finite_step: the last update of this start that was not skipped; -1 before.
        best_checkpoint: of the run that this start continues, where it lies now.
        background: the saves that are made while training goes on.
        writer: of what is large in the save that runs.
    """

    def __init__(self, args: Any, loss: Any, check_lease: Callable[[], None]):
        self.args, self.loss, self.check_lease = args, loss, check_lease
        self.committed_step: int | None = None
        self.is_guarded, self.finite_step = False, -1
        self._to_rotate: Path | None = None  # (5)
        self.best_checkpoint: str | None = None
        self.resumed: Mapping[str, Any] = {}  # the manifest of the checkpoint that this start continues, if it has one
        self.background = async_save.Background(args.ddp_timeout)
        self.writer = async_save.Writer()
        self.at_begin: list[Callable[[], None]] = []
        self._begin_run: Callable[[], Mapping[str, Any]] = manifest.new_run
        self._run: Mapping[str, Any] = manifest.new_run()
        self._chosen: Path | None = None
        self._asked: bool | str | None = None
        self._takes_weights_only = False

    def choose(self, asked: bool | str | None, strategy: Strategy, has_scaler: bool) -> str | None:
        """The path of the checkpoint that this start continues, complete and fit for this way to run, or None: also
        with `resume_weights_only`, which continues nothing."""
        self.committed_step, self.best_checkpoint, self.resumed = None, None, {}
        self.finite_step, self._to_rotate = -1, None
        self._chosen, self._asked = folder, asked = resume.choose(self.args, asked)
        self._takes_weights_only = folder is not None and resume.takes_weights_only(self.args, folder, asked)
        if folder is None or self._takes_weights_only:
            return None
        self.resumed = content = manifest.read(folder) or {}
        resume.check_complete(self.args, folder, content, self.loss, strategy.rows, has_scaler)
        strategy.check_resumable(folder, content, self.args.world_size)
        self.best_checkpoint = resume.best_checkpoint_of(self.args, folder, content)
        return str(folder)

    def fit(
        self,
        model: nn.Module,
        strategy: Strategy,
        frozen_digests: Mapping[str, str] | None,
        dtype_of_base: str,
        load_adapters: Callable[[nn.Module, Path], None],
        optimizer: str,
        is_search: bool,
    ) -> bool:
        """Once the (bare) model is there: it fits what was chosen, or has its weights with `resume_weights_only`.
        Returned: whether it has these.
        `frozen_digests`: of the weights that this run's checkpoints leave out. `dtype_of_base`: what this run loaded
        the model in. `optimizer`: the class of this run's."""
        folder = self._chosen
        if folder is not None and self._takes_weights_only:
            resume.load_weights_only(model, folder, self.args.trust_checkpoint, strategy, load_adapters)
            if (folder / LOSS_WEIGHTS).is_file():
                load_loss(self.loss, str(folder))
            elif state_of(self.loss) and self.args.process_index == 0:
                logger.warning(f"{folder} holds no {LOSS_WEIGHTS}: the loss begins anew.")
        elif folder is not None:
            resume.check_optimizer(self.args, folder, self.resumed, optimizer)
            resume.check_base(folder, self.resumed, model, dtype_of_base, strategy.casts_to)
            resume.check_frozen(folder, frozen_digests)
            resume.check_scales(folder, self.resumed, model)
        begin, given = resume.begin_or_continue_run, (self.args, folder, self._asked, is_search)
        self._begin_run = partial(begin, *given, self._takes_weights_only)
        return self._takes_weights_only

    def begin(self) -> None:
        """Write down that the run begins, once nothing of it can be refused any more. Every rank calls it."""
        self._run = self._begin_run()
        for action in self.at_begin:
            action()

    def restore_best_checkpoint(self, state: Any) -> None:
        """`state`: of a checkpoint, as Trainer has read it. Trainer looks for the best one where it lay once, and says
        that it ignores one that lies elsewhere now."""
        if state.best_model_checkpoint is None and self.best_checkpoint and self.args.process_index == 0:
            logger.warning(f"It is not ignored: the run's folder was moved, and it is {self.best_checkpoint} now.")
        state.best_model_checkpoint = self.best_checkpoint

    def prove(self, step: int, best: str | None) -> None:
        """After an update that was not skipped."""
        self.finite_step = step
        if self._to_rotate is not None and self._is_proved and self.background.saving is None:
            manifest.rotate(self._to_rotate, self.args.save_total_limit, keep=[best])
            self._to_rotate = None

    @property
    def _is_proved(self) -> bool:
        """Whether the newest checkpoint is."""
        return self.finite_step > (-1 if self.committed_step is None else self.committed_step)

    def go_back(self) -> str:
        """A run ends because its updates are not finite: later resumes of it go on from its newest proved checkpoint.
        Says which one that is. Every rank calls it."""
        self.background.collect(wait=True)
        return resume.go_back(self.args, self._is_proved)

    def save(
        self,
        output_dir: Path,
        state: Any,
        write: Callable[[Path], None],
        facts: Callable[[], Mapping[str, Any]],
        push: Callable[[Path], None],
    ) -> None:
        """Every rank calls it. `write` makes the files of a checkpoint."""
        args, step = self.args, state.global_step
        if self.committed_step == step:
            return  # asked for twice, as when an evaluation was left: to write it again would put it at risk
        self.background.collect(wait=True)
        folder = output_dir / f"checkpoint-{step}"
        consensus.together(self.check_lease)
        with ExitStack() as entered:
            entered.enter_context(commit.full_disk_in_words(output_dir, folder))
            generation = consensus.together(lambda: commit.begin(args, output_dir, folder))[0]  # (1)
            entered.enter_context(consensus.ends_together(f"writing {folder.name}", args.ddp_timeout))
            self.writer = writer = async_save.Writer(self.background.stager.copied if args.save_async else None)
            entered.callback(setattr, self, "writer", async_save.Writer())
            write(folder)  # (2)
        run = {name: self._run.get(name) for name in ("run_id", "parent", "began_from_weights")}
        best, limit = state.best_model_checkpoint, args.save_total_limit
        content = {**facts(), **run, "generation": generation} if args.should_save else {}
        content["best"] = resume.identity_of_best(best, folder, content)

        def end(group: Any = None) -> None:
            together = partial(consensus.together, group=group)
            with commit.full_disk_in_words(output_dir, folder):
                together(lambda: async_save.make(writer.writes, group))
                # (3)
                shares = together(lambda: manifest.record(folder, commit.share(args, manifest.files_in(folder))))
                together(lambda: commit.commit_when_all_wrote(args, folder, shares, content, self.check_lease))
            if args.should_save:  # (4)
                manifest.rotate(output_dir, limit, keep=[best], is_proved=not self.is_guarded)

        self.committed_step, self._to_rotate = step, output_dir if args.should_save and self.is_guarded else None
        if args.save_async:
            self.background.begin(folder.name, end, partial(push, folder))
            return
        end()
        push(folder)

    @contextmanager
    def ending(self, state: Any, loads_best: bool) -> Iterator[None]:
        """Around what Trainer does when it has trained."""
        self.background.collect(wait=True)
        if loads_best:
            best = state.best_model_checkpoint = resume.best_checkpoint(self.args, state.best_model_checkpoint)
            kept = None if best is None else manifest.step_of(Path(best))
            if state.best_global_step not in (None, kept) and self.args.process_index == 0:
                logger.warning(
                    f"Step {state.best_global_step} had the best {self.args.metric_for_best_model} "
                    f"({state.best_metric:.4g}), but no checkpoint was saved there: the run ends with the weights of "
                    f"{'its last step' if best is None else f'step {kept}'}. Give save_steps the value of eval_steps, "
                    'or "save_strategy": "best".'
                )
        # With save_total_limit=1 Trainer would now delete every folder but the best, complete and newest or not.
        with meanwhile(self.args, save_total_limit=None):
            yield
