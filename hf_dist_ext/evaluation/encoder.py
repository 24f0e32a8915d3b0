"""A model of sentence-transformers whose `encode` shares the rows out over the ranks of a run.

    encoder = dist_encoder(model, wrapped, strategy, device)
    encoder.encode(texts)       # on every rank: each encodes a share, all get all embeddings in the order of `texts`

An encoder is the user's model under another class: it has the same weights, prompts, similarity and model card, so
that evaluators take it for the model. Its `encode`, `encode_query` and `encode_document` are those of
sentence-transformers, down to the method that runs the model over a list of rows:
(1) rows are dealt to ranks in turn, the longest first, so that ranks have equal work and batches have little padding
(2) every rank runs equally many batches, since a forward may be a collective: a rank with one row less repeats a row
(3) embeddings are gathered on every rank and put into the caller's order

While an evaluator runs on rank 0 alone, the other ranks `serve` it: rank 0 first tells them what to encode.
Letters: n rows, D embedding, t tokens of a row, W ranks with rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.consensus import together


@dataclass(eq=False)
class Encoding:
    """What an encoder knows of the run.

    Attributes:
        model: the user's SentenceTransformer or MultiVectorEncoder.
        forward: what all ranks call together with (features, **options), as one calls the model: the model in its
            wrappers.
        device: where features go.
        precision: context around every forward.
        after_batch: called after every batch, equally often on all ranks.
        is_asking: this rank runs an evaluator and the other ranks serve it.
        is_shared: all ranks are inside of the same forwards.
        failure: what such forwards have raised on every rank.
    """

    model: nn.Module
    forward: Callable[..., Mapping[str, Any]]
    strategy: Strategy
    device: torch.device
    precision: Callable[[], AbstractContextManager]
    after_batch: Callable[[], Any]
    is_asking: bool = False
    is_shared: bool = False
    failure: BaseException | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Around what all ranks do together."""
        self.is_shared = True
        try:
            with in_eval_mode(self.model):
                yield
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.is_shared = False

    def on_device(self, features: Mapping[str, Any]) -> dict[str, Any]:
        copied = lambda value: value.to(self.device, copy=True) if isinstance(value, torch.Tensor) else value  # noqa: E731
        return {name: copied(value) for name, value in features.items()}

    def ask(self, kind: str, *content: Any) -> None:
        """On rank 0: tell the ranks that serve what to do. The length at which rows are cut goes with it, since an
        evaluator may have set it."""
        if self.failure is not None:
            raise RunError("an error has ended this evaluation on all processes. Do not catch it.") from self.failure
        collectives.told_by_first((kind, getattr(self.model, "max_seq_length", None), content))


def dist_encoder(
    model: nn.Module,
    forward: Callable[..., Mapping[str, Any]],
    strategy: Strategy,
    device: torch.device | str,
    precision: Callable[[], AbstractContextManager] = nullcontext,
    after_batch: Callable[[], Any] = lambda: None,
) -> Any:
    """The encoder of `model`, a SentenceTransformer or MultiVectorEncoder; `Encoding` explains the arguments. An
    attribute that is set on the encoder is set on the model."""
    own = type(model)
    kind = type(own.__name__, (SharedEncoder, own), {"__module__": own.__module__})
    kind.encoding = Encoding(model, forward, strategy, torch.device(device), precision, after_batch)
    encoder = object.__new__(kind)
    object.__setattr__(encoder, "__dict__", model.__dict__)
    return encoder


class SharedEncoder:
    """The first base of an encoder's class, before the class of the model."""

    encoding: ClassVar[Encoding]

    def __call__(self, features: dict[str, Any], **options: Any) -> Mapping[str, Any]:
        """Inside of `encode` a forward of all ranks; elsewhere the model is called, for an evaluator that asks for a
        forward."""
        run = self.encoding
        if not run.is_shared:
            if run.strategy.is_cut:
                raise UsageError(
                    "an evaluator calls the model itself, and in a pipeline no process has a whole one. Let it use "
                    "encode, or train under multi_gpu_fsdp."
                )
            return run.model(features, **options)
        # FSDP2 and ZeRO keep tensors of a forward for training, which can not use inference tensors.
        with torch.inference_mode(False), torch.no_grad(), run.precision():
            found = run.forward(run.on_device(features), **options)
        run.after_batch()
        return found

    def _inference(self, inputs: list, *, device: Any = None, **options: Any) -> Any:
        """sentence-transformers 6.2 calls it from `encode`, with what that has resolved: n rows -> (n, D), or n token
        vectors (t, D)."""
        run = self.encoding
        if device is not None and torch.empty(0, device=device).device != torch.empty(0, device=run.device).device:
            raise UsageError(
                f'encode(device="{device}"): the processes of this run encode together, this one on {run.device}. '
                "Leave device out."
            )
        if not inputs:
            return super()._inference(inputs, **options)  # type: ignore[misc]
        if options["output_value"] is None and run.strategy.rows.size > 1:
            raise UsageError(
                "encode(output_value=None) returns what every module has computed, which processes do not exchange. "
                'Ask for "sentence_embedding" or "token_embeddings".'
            )
        if run.is_asking:
            run.ask("encode", inputs, options | {"show_progress_bar": False})
        return self.encode_together(inputs, options)

    def _multi_process(self, inputs: list, **options: Any) -> Any:
        raise UsageError(
            "encode(pool=...) and encode(device=[...]) start processes of their own, and those of this run share the "
            "rows already. Leave pool and device out."
        )

    def encode_together(self, inputs: list, options: dict[str, Any]) -> Any:
        """Every rank calls it with the same arguments. An error of one rank is raised on all; where forwards are
        collectives, one inside of a forward ends its process."""
        run, rows, encode = self.encoding, self.encoding.strategy.rows, super()._inference  # type: ignore[misc]
        with run.shared():
            if rows.size == 1:
                return encode(inputs, **options)
            order = np.argsort([-_length(row) for row in inputs], kind="stable")  # (1)
            dealt = [order[i :: rows.size] for i in range(rows.size)]
            own, flat = dealt[rows.index], []
            mine = [inputs[i] for i in (*own, order[-1])[: len(dealt[0])]]  # (2)

            def share() -> list[int]:
                """(own n, D), or own token vectors end to end; the number of vectors of each row."""
                found = encode(mine, **options | {"save_to_cpu": False})
                is_dense = isinstance(found, torch.Tensor)
                lengths = [1] * len(own) if is_dense else [len(one) for one in found[: len(own)]]
                flat.append((found if is_dense else torch.cat(found))[: sum(lengths)])
                return lengths

            own_lengths = share() if run.strategy.forwards_are_collective else None
            lengths = rows.one_of_each(together(lambda: share() if own_lengths is None else own_lengths))
            with torch.inference_mode(False), torch.no_grad():
                everyone = rows.gather(flat[0], [sum(of_rank) for of_rank in lengths])  # (3)
        everyone = everyone.cpu() if options["save_to_cpu"] else everyone
        places = np.concatenate(dealt).argsort()
        if options["output_value"] == "sentence_embedding":
            return everyone[torch.from_numpy(places)]
        of_rows = everyone.split(list(chain.from_iterable(lengths)))
        return [of_rows[i] for i in places]

    def serve(self) -> None:
        """On the ranks beside 0, while rank 0 runs an evaluator: what it asks for, until it says that it has ended."""
        run = self.encoding
        while True:
            kind, max_seq_length, content = collectives.told_by_first()
            if max_seq_length != getattr(run.model, "max_seq_length", None):
                run.model.max_seq_length = max_seq_length
            if kind == "end":
                return
            if kind == "encode":
                self.encode_together(*content)
            else:
                with torch.no_grad():
                    (features, *more), options = content
                    run.model(run.on_device(features), *more, **options)


@contextmanager
def asking(encoder: SharedEncoder) -> Iterator[None]:
    """On rank 0, around an evaluator that other ranks `serve`. Where forwards are collectives, one that the evaluator
    asks of the model itself runs on all ranks."""
    run = encoder.encoding

    def tell(module: nn.Module, arguments: tuple, options: dict) -> None:
        if not run.is_shared:
            features, *more = arguments
            run.ask("forward", (_on_host(features), *more), options)

    is_collective = run.strategy.forwards_are_collective
    hooks = [run.model.register_forward_pre_hook(tell, with_kwargs=True, prepend=True)] if is_collective else []
    run.is_asking = True
    try:
        yield
    finally:
        run.is_asking = False
        for hook in hooks:
            hook.remove()
        if run.failure is None:
            run.ask("end")


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def _on_host(features: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in features.items()}


def _length(row: Any) -> int:
    return len(row) if isinstance(row, str) else len(str(row))
