"""Conversations with pictures become a batch whose labels stand on the answers only.

(1) The processor's chat template writes each conversation as text. An answer is what the template adds after the
    prompt that a model would be asked with, its end-of-turn token included; a template with {% generation %} marks
    the answers itself
(2) The processor puts a picture's tokens where its placeholder stands, and tells every token's place in the text
(3) Tokens that overlap an answer keep their id as label, all others get -100
(4) Rows are cut at `max_length` from the end (never through a picture), then padded on the tokenizer's side
(5) For evaluation the batch also holds the last answers and, with `with_prompts`, the conversations up to them, padded
    on the left, to generate from

Rows with no picture, one or several may share a batch, and a batch may have none (frozen/image_stand_in.py says why
that needs no care here).
Letters: B rows, T tokens.
"""

from __future__ import annotations

import bisect
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_dist_ext.data.conversations import ConversationReader, Example, Message
from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)

Span = tuple[int, int]
IGNORED = -100  # the label of a token that no loss counts


@dataclass(eq=False)
class ImageTextCollator:
    """Makes rows of `load_conversations` into input_ids, attention_mask, labels (B, T) and the pictures' features.

    `max_length` counts a picture's tokens too; None cuts nothing.
    """

    processor: Any
    reader: ConversationReader
    max_length: int | None = None
    for_evaluation: bool = False
    with_prompts: bool = False

    def __post_init__(self):
        check_processor(self.processor)
        self.tokenizer, self.image_token = self.processor.tokenizer, getattr(self.processor, "image_token", None)
        self._has_warned = False

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        examples = [self.reader.read(row) for row in rows]
        texts, spans = zip(*(self.render(example) for example in examples), strict=True)
        images = [example.images for example in examples]
        batch = self._encode(list(texts), images, list(spans), [example.where for example in examples])
        if self.for_evaluation:
            batch = {"answers": self._answers(examples), **batch}  # first: Trainer counts the rows of the first tensor
        if self.with_prompts:
            questions = [self._template(example.messages[:-1], add_generation_prompt=True) for example in examples]
            batch["prompt"] = self._encode(questions, images, None, side="left")
        return batch

    # (1)

    def render(self, example: Example) -> tuple[str, list[Span]]:
        """The conversation as text, and where its answers stand in it."""
        text = self._template(example.messages)
        self._check_placeholders(text, example)
        if _marks_answers(self.processor):
            return text, self._marked_spans(example)
        spans = []
        for number, message in enumerate(example.messages):
            if message["role"] == "assistant":
                before = self._template(example.messages[:number], add_generation_prompt=True)
                after = self._template(example.messages[: number + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise UsageError(
                        f"{example.where}: the chat template of {type(self.processor).__name__} writes earlier turns "
                        "differently once others follow, so answers cannot be told from it. Give a template that "
                        "marks them with {% generation %}."
                    )
                spans.append(self._narrowed(text, len(before), len(after), message))
        return text, spans

    def _narrowed(self, text: str, start: int, end: int, message: Message) -> Span:
        """Without a header that the template writes unasked, and without the line break after an end-of-turn."""
        start = max(start, text.find(message["content"][0]["text"].strip(), start, end))
        closed = text[start:end].rstrip()
        if closed.endswith(tuple(self.tokenizer.get_added_vocab())):
            end = start + len(closed)
        return start, end

    def _marked_spans(self, example: Example) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.processor.chat_template
        _, spans = render_jinja_template(
            [example.messages],
            chat_template=template["default"] if isinstance(template, Mapping) else template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return [tuple(span) for span in spans[0]]

    def _template(self, messages: list[Message], **options: Any) -> str:
        try:
            return self.processor.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # jinja's, or raised by the template's own raise_exception
            raise UsageError(
                f"the chat template of {type(self.processor).__name__} refuses a conversation: {error}."
            ) from error

    def _check_placeholders(self, text: str, example: Example) -> None:
        if self.image_token is None:
            return
        written, wanted = text.count(self.image_token), len(example.images)
        if written != wanted:
            raise UsageError(
                f"{example.where}: the text that goes to {type(self.processor).__name__} has {written} image token(s) "
                f"{self.image_token} for {wanted} image(s). "
                + ("Its chat template writes none for an image." if written < wanted else "Remove it from the text.")
            )

    # (2)

    def _encode(
        self,
        texts: list[str],
        images: list[list[Any]],
        spans: list[list[Span]] | None,
        names: list[str] | None = None,
        side: str | None = None,
    ) -> dict[str, torch.Tensor]:
        starts_with_bos = self.tokenizer.bos_token is not None and texts[0].startswith(self.tokenizer.bos_token)
        options = {"add_special_tokens": False} if starts_with_bos else {}
        if any(images):
            options["images"] = images  # by row, also where a row has none: Gemma's and SmolVLM's count them so
        options |= {"return_offsets_mapping": True, "return_text_replacement_offsets": True, "padding": False}
        encoded = dict(self.processor(text=texts, **options))
        offsets = encoded.pop("offset_mapping")
        replaced = encoded.pop("text_replacement_offsets", None) or [[] for _ in texts]
        encoded.pop("labels", None)  # PaliGemma's processor makes some, of another meaning
        ids = encoded["input_ids"]
        if spans is not None:
            encoded["labels"] = [self._labels(*row) for row in zip(ids, offsets, replaced, spans, strict=True)]
            encoded = self._cut(encoded, names)
        return as_tensors(encoded, self.tokenizer.pad_token_id, side or self.tokenizer.padding_side)

    # (3)

    def _labels(self, ids: list[int], offsets: list[Span], replaced: list[dict], spans: list[Span]) -> list[int]:
        # A span stands in the text before pictures took their place: every one before it moves it.
        ends = [one["span"][1] for one in replaced]
        gained = [0] + [one["new_span"][1] - one["span"][1] for one in replaced]
        labels = [IGNORED] * len(ids)
        for span in spans:
            start, end = (place + gained[bisect.bisect_right(ends, place)] for place in span)
            for index, (token_start, token_end) in enumerate(offsets):
                if token_start < end and token_end > start:
                    labels[index] = ids[index]
        return labels

    # (4)

    def _cut(self, encoded: dict[str, Any], names: list[str]) -> dict[str, Any]:
        ids, labels = encoded["input_ids"], encoded["labels"]
        limit = self.max_length
        if limit is not None:
            image_id = getattr(self.processor, "image_token_id", None)
            for row, name in zip(ids, names, strict=True):
                if image_id in row[limit:]:
                    raise UsageError(
                        f"{name}: its images end at token {len(row) - row[::-1].index(image_id)}, beyond "
                        f"max_length={limit}. Raise max_length, or use fewer or smaller images."
                    )
            encoded = {
                key: [row[:limit] for row in value] if is_per_token(value, ids) else value
                for key, value in encoded.items()
            }
            labels = encoded["labels"]
        has_answer = [any(label != IGNORED for label in row) for row in labels]
        silent = [name for name, has in zip(names, has_answer, strict=True) if not has]
        if silent and not any(has_answer):
            raise UsageError(f"{silent[0]}: no token of an answer is left in this batch. Raise max_length={limit}.")
        if silent and not self._has_warned:
            logger.warning("%s: max_length=%s cuts its whole answer; such rows train nothing.", silent[0], limit)
            self._has_warned = True
        return encoded

    # (5)

    def _answers(self, examples: list[Example]) -> torch.Tensor:
        texts = [example.messages[-1]["content"][0]["text"].strip() for example in examples]
        return padded(self.tokenizer(texts, add_special_tokens=False)["input_ids"], IGNORED, "right")


def check_processor(processor: Any) -> None:
    """UsageError when conversations cannot be written, or tokens not be found in them, with this processor."""
    name = type(processor).__name__
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise UsageError(
            f"{name} is no image-text processor. Conversations about pictures need a model with its own: a tokenizer, "
            "an image processor and a chat template."
        )
    if not getattr(processor, "chat_template", None):
        raise UsageError(
            f"{name} has no chat template, which writes a conversation as text. Add chat_template.jinja to the "
            "model's folder, or use an instruction-tuned model of the family."
        )
    if not processor.tokenizer.is_fast:
        raise UsageError(f"{name} has a slow tokenizer, which does not tell where its tokens stand. Use its fast one.")
    if processor.tokenizer.pad_token_id is None:
        if processor.tokenizer.eos_token is None:
            raise UsageError(f"the tokenizer of {name} has no padding token. Set its pad_token.")
        processor.tokenizer.pad_token = processor.tokenizer.eos_token


def _marks_answers(processor: Any) -> bool:
    template = processor.chat_template
    template = template.get("default", "") if isinstance(template, Mapping) else template
    return re.search(r"\{%-?\s*generation\b", template) is not None


def is_per_token(value: Any, ids: list[list[int]]) -> bool:
    """Whether a processor's output has one integer for every token of `ids`."""
    return (
        isinstance(value, list)
        and len(value) == len(ids)
        and all(isinstance(row, list) and len(row) == len(of) for row, of in zip(value, ids, strict=True))
        and all(isinstance(one, int) for one in value[0][:1])
    )


def padded(rows: list[list[int]], fill: int, side: str) -> torch.Tensor:
    """(B, T)"""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def as_tensors(encoded: Mapping[str, Any], pad_id: int, side: str) -> dict[str, Any]:
    """`encoded`: of a processor that was called without padding, so that rows could be cut. Whatever has a number per
    token is padded, all else stacked."""
    fill, ids = {"input_ids": pad_id, "labels": IGNORED}, encoded["input_ids"]
    return {
        key: padded(value, fill.get(key, 0), side) if is_per_token(value, ids) else _tensor(value)
        for key, value in encoded.items()
    }


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(list(value))
    return torch.as_tensor(np.asarray(value))
