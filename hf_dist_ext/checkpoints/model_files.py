"""What the folders of a run hold of its model and optimizer, and how they are read again.

A checkpoint of a run with frozen parts holds what trains (checkpoints/trainable.py); FSDP's may hold shards; any other
one holds what `save_pretrained` writes. The folder that a run ends with is complete, unless only a part was trained
and the rest lies in a folder or on the hub. Where `load` or one for the optimizer returns False, Trainer does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dist_ext.checkpoints import commit, loss_state, merge, safe_reading, sentence_model, trainable, weights
from hf_dist_ext.checkpoints.async_save import Writer
from hf_dist_ext.checkpoints.facts import base_model, dtype_of_base
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import adapters_of, merged_weights, trains_beside
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.strategies import consensus
from hf_dist_ext.strategies.base import Strategy

Save = Callable[..., None]  # takes a folder, and the whole weights when they are not the model's own


class ModelFiles:
    """Made once per model of a `run`, a `DistTrainer`.

    Attributes:
        frozen_digests: of the weights that checkpoints leave out; None when they hold all of them.
        dtype_of_base: what the base was loaded in. DeepSpeed casts it later.
        base: the folder or hub id that the weights came from, or None.
    """

    def __init__(self, run: Any):
        self.run, self.args = run, run.args
        self.is_ours = run.has_own_arguments  # with other arguments checkpoints are Trainer's
        self.frozen_digests: Mapping[str, str] | None = None
        bare = run.bare_model
        base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
        self.dtype_of_base = dtype_of_base(base)
        self.base = base_model(bare)  # before somebody changes the working directory, where it is a relative path
        self._empty: Any = None  # of a model of sentence-transformers, before anything wraps it
        self._take_settings()

    @property
    def strategy(self) -> Strategy:
        return self.run.strategy

    @property
    def saved(self) -> frozenset[str] | None:
        """The names of the weights that checkpoints hold, None for all."""
        return None if self.run.freeze_plan is None else self.run.freeze_plan.saved

    def _take_settings(self) -> None:
        bare = self.run.bare_model
        if is_of_sentence_transformers(bare) and not sentence_model.is_sharded(bare):
            with self.strategy.saving_whole(bare):
                self._empty = sentence_model.empty_copy(bare)

    @property
    def _processor(self) -> Any:
        return self.run.processing_class or getattr(self.run.data_collator, "tokenizer", None)

    @property
    def is_part(self) -> bool:
        return self.saved is not None

    def _saved_here(self) -> frozenset[str]:
        """Of the names that checkpoints hold those of this rank's parameters. Every rank calls it."""
        return self.saved - self.strategy.elsewhere

    @property
    def is_sharded(self) -> bool:
        return self.is_ours and self.strategy.saves_shards

    @property
    def is_by_name(self) -> bool:
        """The state of the optimizer."""
        return self.is_part or self.strategy.saves_by_name

    @property
    def ends_complete(self) -> bool:
        """Whether the run ends with a folder that from_pretrained loads: not when only a part of a model of
        transformers was trained, unless it was asked for, or the rest is in no folder and on no hub."""
        bare = self.run.bare_model
        is_whole = not self.is_part or self.args.save_full_model or base_model(bare) is None
        return is_whole or is_of_sentence_transformers(bare)

    @property
    def has_adapters(self) -> bool:
        """And saves nothing else, in a peft model."""
        return not self.is_part and bool(adapters_of(self.run.bare_model))

    @property
    def are_adapters_merged(self) -> bool:
        """At the end. A folder of sentence-transformers holds adapters beside the other modules' weights, so they may
        stay where their base lies somewhere and has not trained."""
        bare = self.run.bare_model
        is_wanted = self.is_part
        if is_of_sentence_transformers(bare):
            is_wanted = base_model(bare) is None or trains_beside(bare)
        return (is_wanted or (self.is_ours and self.args.save_full_model)) and bool(adapters_of(bare))

    @property
    def _is_apart(self) -> bool:
        """Whether no process has the whole model."""
        strategy = self.strategy
        return strategy.forwards_are_collective or strategy.is_cut or bool(strategy.split)

    # ---- before a run ----

    def prepare(self) -> None:
        """Before anything is wrapped or trained."""
        strategy = self.strategy
        merges = self.ends_complete and self.are_adapters_merged
        inside = getattr(self.run.bare_model, "transformers_model", None)
        if adapters_of(inside) and not isinstance(inside, PreTrainedModel):  # what `get_peft_model` gives
            use = "Put them in by model.add_adapter(LoraConfig(...), NAME), without get_peft_model."
            if (active := inside.active_adapters) != ["default"]:  # others are saved in a folder of their name
                raise UsageError(
                    f"the active adapters {', '.join(active)} belong to a PeftModel in the SentenceTransformer, "
                    f'whose folder opens with the adapter called "default" alone and would lose what trains. {use}'
                )
            if merges:
                raise UsageError(
                    "this run would end with a complete model, and adapters of a PeftModel inside a "
                    f"SentenceTransformer can not be merged. {use}"
                )
        elif adapters_of(inside):
            if not inside._hf_peft_config_loaded:  # transformers' own mark (5.23, integrations/peft.py)
                raise UsageError(
                    "get_peft_model has put adapters into the SentenceTransformer's model, which does not know of "
                    "them: its folder would lose them. Use model.add_adapter(LoraConfig(...))."
                )
            if len(active := inside.active_adapters()) > 1 and self.args.save_strategy != "no" and not self.is_part:
                raise UsageError(
                    f"the adapters {', '.join(active)} are active, and a checkpoint of a SentenceTransformer holds "
                    "one. Activate the one that trains: model.set_adapter(NAME)."
                )
        if not strategy.has_engine:  # whose weights are no longer whole in a second run
            self._take_settings()  # prompts and lengths may have been changed since the trainer was made
        if self.args.save_full_model or (self._is_apart and merges):
            merge.check_can_save_merged(self.run.bare_model, self._is_apart)
        if self.frozen_digests is None and (self.is_part or self.has_adapters):
            self.frozen_digests = self._digests()

    def _digests(self) -> dict[str, str]:
        bare = self.run.bare_model
        own = trainable.frozen_digests(bare, self._saved_here()) if self.is_part else trainable.base_digests(bare)
        return {name: digest for part in self.strategy.said_by_parts(own) for name, digest in part.items()}

    def carry(self, names: Iterable[str]) -> None:
        """Checkpoints hold these parameters too, which do not train."""
        if (plan := self.run.freeze_plan) is None or not (more := frozenset(names) - plan.saved):
            return
        known = {name for name, _ in self.run.bare_model.named_parameters()} | self.strategy.elsewhere
        self.run.freeze_plan, self.frozen_digests = replace(plan, carried=plan.carried | more & known), None

    def carry_what_changed(self) -> None:
        """After a checkpoint's weights alone were taken: what is frozen and not as it was, is in no other file."""
        if not self.is_part:
            return
        before, now = self.frozen_digests or {}, self._digests()
        owners = {name.rpartition(".")[0] for name in now if now[name] != before[name]}
        own = [name for name, _ in self.run.bare_model.named_parameters() if name.rpartition(".")[0] in owners]
        self.carry(name for part in self.strategy.said_by_parts(own) for name in part)
        self.frozen_digests = self._digests()

    @property
    def frozen_fingerprint(self) -> str | None:
        return None if self.frozen_digests is None else trainable.fingerprint(self.frozen_digests)

    # ---- a checkpoint ----

    def save_for_resume(self, folder: Path, save: Save, writer: Writer) -> bool:
        if self.has_adapters:
            self._save_digests(folder)
        if self.is_part or self.is_sharded:  # FSDP's shards follow with the optimizer
            self._save_description(folder)
            if self.is_part:
                self._save_trainable(folder, self.is_sharded, writer)
        elif self.strategy.split or self._empty is not None:
            self._save_whole(folder, save)
        else:
            return False
        return True

    def save_optimizer(self, folder: Path, optimizer: Any, writer: Writer) -> bool:
        strategy, model, keep = self.strategy, self.run.model, self.args.should_save
        if not self.is_by_name:
            return self.is_ours and strategy.save_optimizer(model, optimizer, folder, keep, writer)
        if strategy.has_engine:
            strategy.save_engine(folder)
        else:
            trainable.save_optimizer(model, optimizer, folder, self.args, self.is_sharded, writer, strategy)
        return True

    def save_weights(self, folder: Path, whole: dict | None, save: Save, writer: Writer) -> None:
        """As `save`, Trainer's, does, which takes the folder and the whole weights; None: the model's own."""
        if not self.args.should_save:  # of a model that transformers has split, all ranks gather it
            return None if self._empty is not None else save(str(folder), whole)
        model: Any = self.run.bare_model
        if self._empty is not None:
            loss_state.save_arguments(self.args, folder)
            weights = list(model.parameters())
            is_packed = not all(map(torch.is_floating_point, weights))  # which an empty copy does not take
            is_own = not writer.is_later and all(map(sentence_model.is_alone, weights))
            if not self._is_apart and (is_own or is_packed):
                sentence_model.write(model, folder)  # with its settings of now
                return
            write = partial(sentence_model.save, self._empty)
        elif not (writer.is_later and self._can_be_written_later()):
            return _keeping_card(save, str(folder), whole)
        else:
            self._save_description(folder)
            if not isinstance(model, PreTrainedModel):
                return writer.tensors(model.state_dict() if whole is None else whole, folder / "model.safetensors")
            write = partial(_save_pretrained, model)
        whole = model.state_dict() if whole is None else whole
        writer.write(whole, lambda whole, group: write(whole, folder))

    def write_merged(self, folder: Path, whole: Mapping[str, torch.Tensor]) -> None:
        """The folder of a model of sentence-transformers, of whole weights that have no adapters any more."""
        sentence_model.save(self._empty, whole, folder, merged=True)

    def _can_be_written_later(self) -> bool:
        """Whether `save_pretrained` makes what it writes of the weights it is given: not that of adapters (some kinds
        compute theirs of the live model), of quantized weights, and of a model that transformers has split."""
        model = self.run.bare_model
        is_split = getattr(getattr(model, "config", None), "distributed_config", None) is not None
        return not (adapters_of(model) or getattr(model, "hf_quantizer", None) or is_split)

    def _save_description(self, folder: Path) -> None:
        if self.args.should_save:
            loss_state.save_description(self.run.bare_model, self._processor, self.args, folder)

    def _save_trainable(self, folder: Path, is_sharded: bool, writer: Writer) -> None:
        digests, keep = self.frozen_digests or {}, self.args.should_save
        strategy, saved = self.strategy, self._saved_here()
        trainable.save_weights(self.run.model, saved, digests, folder, keep, is_sharded, writer, strategy)

    def _save_digests(self, folder: Path) -> None:
        if self.frozen_digests and self.args.should_save:
            trainable.write_digests(folder, self.frozen_digests)

    def _save_whole(self, folder: Path, save: Save) -> None:
        whole = self.whole_weights()
        if self.args.should_save:
            with self.strategy.saving_whole(self.run.model):
                save(str(folder), whole)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict on the first rank, also when it is sharded. Every rank calls it."""
        return self.strategy.whole_weights(self.run.model, keep=self.args.should_save)

    # ---- the model that a run ends with ----

    def replacing(self, folder: Path) -> AbstractContextManager:
        """Around such a save: nothing of another model stays in the folder. With Trainer's arguments it may."""
        return commit.replacing_model(folder, self.base, self.is_ours and self.args.should_save)

    def save_at_end(self, folder: Path, save: Save, as_trainer: Save, facts: Callable[[], Mapping[str, Any]]) -> bool:
        """`as_trainer`: Trainer's `save_model`, without its push; `facts`: of the manifest."""
        if adapters_of(self.run.bare_model) and not self.are_adapters_merged:
            consensus.together(lambda: self._save_digests(folder))
        if not self.ends_complete:
            consensus.together(lambda: self._save_description(folder))
            consensus.together(lambda: self._save_trainable(folder, False, Writer()))
            consensus.together(lambda: None)  # all have written
            if self.args.should_save:
                commit.commit_model(folder, [trainable.WEIGHTS, trainable.FROZEN], facts())
        elif self.are_adapters_merged and self._is_apart and self._empty is not None:
            whole = self.whole_weights()
            if self.args.should_save:
                with self.strategy.saving_whole(self.run.model):
                    self.write_merged(folder, merged_weights(self.run.bare_model, whole))
        elif self.are_adapters_merged:
            if self.args.should_save:
                merge.save_merged(self.run.bare_model, self._processor, folder)
        elif self.is_sharded or self.strategy.split or self._empty is not None:
            self._save_whole(folder, save)
        else:
            return False
        return True

    # ---- reading ----

    def load(self, model: nn.Module, folder: Path) -> bool:
        """The weights of a checkpoint; the way Trainer takes is safe then."""
        strategy, trusts = self.strategy, getattr(self.args, "trust_checkpoint", False)
        if self.is_part:
            trainable.load_weights(model, self._saved_here(), folder, trusts, strategy.elsewhere)
        elif strategy.reads_own_format and (strategy.holds_own_format(folder) or not self.is_ours):
            safe_reading.check(folder, trusts)
            return False
        else:
            return weights.load(self.run.bare_model, folder, trusts, strategy)
        return True

    def load_optimizer(self, folder: Path, optimizer: Any) -> bool:
        is_empty = self.strategy.has_no_optimizer_state(folder)
        converts = self.is_ours and self.strategy.converts(folder)
        if not (self.is_by_name or is_empty or converts):
            return False
        if not self.strategy.has_engine and not is_empty:  # DeepSpeed's engine has read all of it
            elsewhere = self.strategy.elsewhere
            trainable.load_optimizer(self.run.model, optimizer, folder, self.args.trust_checkpoint, elsewhere)
        return True


def _save_pretrained(model: PreTrainedModel, whole: dict[str, torch.Tensor], folder: Path) -> None:
    model.save_pretrained(folder, state_dict=whole)


def _keeping_card(save: Save, folder: str, whole: dict | None) -> None:
    """peft writes lines of its own into a README.md that lies there."""
    card = Path(folder, "README.md")
    before = card.read_bytes() if card.is_file() else None
    save(folder, whole)
    if before is not None:
        card.write_bytes(before)
