"""`frozen_feature_cache`: what a frozen leading part makes of the training rows, computed once, used in every epoch,
run and rank.

Before the model is wrapped, the ranks share the rows, collate them and compute what the folder lacks. The first batch
is collated and computed twice, and features that differ then are refused: random features must not be frozen. The disk
that the features take is estimated from that batch and said before the rest is computed. While training, the loader
replaces the part's inputs by the stored features; a batch with a row that is not stored (another text, another
picture) is computed as without a cache.

Features are stored as they are computed, in the precision of the run. They equal those of a step without the cache up
to float rounding, since a row's neighbours in a batch differ.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_dist_ext.errors import RunError, UsageError, bytes_in_words, in_short
from hf_dist_ext.frozen.feature_store import FeatureStore, part_digest, row_keys
from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.frozen.leading_part import FEATURES, ImageEncoder, frozen_leading_part
from hf_dist_ext.strategies import collectives, consensus

logger = logging.get_logger(__name__)


WAITS = (1, 2, 4)  # seconds
Autocast = Callable[[], AbstractContextManager]  # the run's precision, around a forward


class FeatureCache:
    """The store of one model's frozen part, and the way of its features into training batches. Loader workers get a
    copy of it. `model`: without its wrappers."""

    def __init__(self, model: nn.Module, args: Any):
        self.part = frozen_leading_part(model)
        config = getattr(model, "config", None)
        facts = (args.bf16, args.fp16, None if config is None else config.to_dict())
        self.store = FeatureStore(Path(args.frozen_feature_cache) / part_digest(self.part.modules, model, *facts))
        self.keeps_left_padding = getattr(config, "rope_parameters", None) is None
        self.must_have_all = False  # set where a forward of the part is a collective

    def keys(self, name: str, inputs: dict) -> list[bytes]:
        return row_keys(inputs, self.part.salt(name), self.keeps_left_padding)

    def replace(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Stored features in place of the part's inputs: all or none of a batch, so that a forward has one kind of
        input."""
        keys = {name: self.keys(name, inputs) for name, inputs in self.part.inputs(batch).items()}
        if not all(key in self.store for of_name in keys.values() for key in of_name):
            if self.must_have_all:
                raise UsageError(
                    "frozen_feature_cache: a training batch has a row that is not stored, and the frozen part is "
                    'sharded, so one rank can not compute it alone. Set frozen_parts_fsdp="replicate", or check '
                    "whether the collator changes rows at random."
                )
            return batch
        for name, of_name in keys.items():
            batch = self.part.put(batch, name, self.store.get(of_name))
        return batch

    def take(self, inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Hand a batch's stored image features to the encoder's stand-in; other batches pass unchanged."""
        if not isinstance(self.part, ImageEncoder):
            return inputs
        self.part.withdraw()
        if FEATURES not in inputs:
            return inputs
        self.part.provide(inputs[FEATURES].to(device))
        return {key: value for key, value in inputs.items() if key != FEATURES}

    # ---- filling ----

    def load_everyones(self) -> None:
        """Of all ranks: a folder on the network may show another machine's files a little later."""
        for wait in (0, *WAITS):
            time.sleep(wait)
            self.store.load()
            seen = [row[0] for row in collectives.exchange([len(self.store)])]
            if min(seen) == max(seen):
                return
        if collectives.rank() == 0:
            logger.warning(
                f"frozen_feature_cache: processes see from {min(seen)} to {max(seen)} stored rows in "
                f"{self.store.folder}; what one does not see it computes in every step. Give a folder that all "
                "machines share."
            )

    def fill(self, model: nn.Module, dataset: Any, collate: Callable, args: Any, autocast: Autocast) -> None:
        """Compute what is missing of this rank's share of the training rows."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                "frozen_feature_cache needs a dataset with a length, not a stream. Set streaming to false."
            )
        own = range(collectives.rank(), len(dataset), collectives.world_size())
        loader = DataLoader(
            Subset(dataset, own),
            batch_size=args.per_device_eval_batch_size,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
        )
        weights = [(module, next(module.parameters(), None)) for module in self.part.modules]
        places = [(module, weight.device) for module, weight in weights if weight is not None]
        was_training = model.training
        model.eval()
        is_silent = args.disable_tqdm or not args.should_log or collectives.rank() > 0
        progress = tqdm(loader, "frozen features", disable=is_silent or None)  # None: where there is no terminal
        try:
            for module, _ in places:
                module.to(args.device)  # FSDP leaves the model where it was loaded
            for number, batch in enumerate(progress):
                computed = self._compute(batch, args.device, autocast)
                if number == 0 and computed:
                    rows = collate([dataset[i] for i in own[: args.per_device_eval_batch_size]])
                    _check_repeatable(computed, self._compute(rows, args.device, autocast, again=True))
                    self._check_disk(computed, len(own))
                for keys, features in computed:
                    self.store.add(keys, features)
            self.store.flush()
        except (UsageError, RunError) as error:
            raise in_short(error) from error
        finally:
            for module, device in places:
                module.to(device)
            model.train(was_training)

    def _compute(
        self, batch: dict, device: torch.device, autocast: Autocast, again: bool = False
    ) -> list[tuple[list, torch.Tensor]]:
        """(keys, features) of every input of the batch that has a row which is not stored."""
        computed = []
        for name, inputs in self.part.inputs(batch).items():
            keys = self.keys(name, inputs)
            # An image encoder's shapes are known from a forward only, so the first batch is always computed.
            is_known = not isinstance(self.part, ImageEncoder) or self.part.output is not None
            if not keys or (all(key in self.store for key in keys) and is_known and not again):
                continue
            placed = {key: value.to(device) for key, value in inputs.items()}
            with torch.no_grad(), autocast():
                features = self.part.compute(name, placed)
            if len(features) != len(keys):
                raise UsageError(
                    f"frozen_feature_cache: {len(features)} features for the {len(keys)} rows of {name!r}."
                )
            computed.append((keys, features))
        return computed

    def _check_disk(self, computed: list, own_rows: int) -> None:
        """A first batch says what a row takes; the ranks share the rows evenly."""
        stored, rows = sum(features.nbytes for _, features in computed), own_rows * collectives.world_size()
        needed = stored / max(len(keys) for keys, _ in computed) * max(0, rows - len(self.store))
        free = shutil.disk_usage(self.store.folder).free
        words = f"about {bytes_in_words(needed)} for {rows} rows, {bytes_in_words(free)} are free in"
        if needed > free:
            raise UsageError(f"frozen_feature_cache: {words} {self.store.folder}. Make room, or give another folder.")
        if collectives.rank() == 0:
            print(f"frozen features: {words} {self.store.folder}")


def _check_repeatable(computed: list, again: list) -> None:
    """Of the first batch: (keys, features) as they were computed, and as they are once more."""
    first = [keys for keys, _ in computed]
    if first != [keys for keys, _ in again][: len(first)]:
        raise UsageError(
            "frozen_feature_cache: collating the same rows twice gave different inputs (augmentation, random "
            "cropping?), so their features are not constants. Make the collator repeatable or drop the cache."
        )
    if not all(torch.equal(one, other) for (_, one), (_, other) in zip(computed, again, strict=False)):
        raise UsageError(
            "frozen_feature_cache: the frozen part gave different features for the same rows (dropout in its own "
            "code, or a random operation), so they are not constants. Drop the cache."
        )


def _check_can_serve(dataset: Any, loss: Any) -> None:
    """That batches, which hold features in the place of texts, are of one dataset, and no loss reads their texts."""
    if sources := getattr(dataset, "sources", None):  # data/mixture.py
        raise UsageError(
            f"frozen_feature_cache does not work with several datasets ({', '.join(sources)}). Remove it: the frozen "
            "part is then computed in every step."
        )
    for one in loss.modules() if isinstance(loss, nn.Module) else ():
        if getattr(one, "_guides", None):  # training/sentence_losses.py
            raise UsageError(
                f"{one.name} has a guide that reads the texts of every batch, and with frozen_feature_cache batches "
                "hold features in their place. Remove frozen_feature_cache."
            )


def filled(
    model: nn.Module,
    dataset: Any,
    collate: Callable,
    loss: Any,
    args: Any,
    autocast: Autocast,
    stand_in: ImageStandIn | None,
) -> FeatureCache:
    """The cache of a model without its wrappers, with all training rows. Every rank must call it.

    loss: over embeddings, or None.
    stand_in: its blank picture goes on from its features as well: a rank that stands in must not run an encoder, whose
    shards the others do not gather.
    """
    _check_can_serve(dataset, loss)
    cache = FeatureCache(model, args)
    consensus.together(lambda: cache.fill(model, dataset, collate, args, autocast))
    cache.load_everyones()
    part = cache.part
    if isinstance(part, ImageEncoder) and stand_in is not None:
        with torch.no_grad(), autocast():
            encoder_device = next(part.encoder.parameters()).device
            blank = part.compute("images", {key: value.to(encoder_device) for key, value in stand_in.blank.items()})
        stand_in.before = lambda: part.provide(blank)
    return cache
