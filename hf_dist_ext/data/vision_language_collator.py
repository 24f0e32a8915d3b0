"""Rows of texts, pictures or both become the features of one vision-language model, which embeds all of them.

    collator = VisionLanguageCollator(processor.tokenizer, ["query", "positive"], processor=processor)
    collator.features("query", ["a red boat", picture, {"image": picture, "text": "in which year?"}])

(1) A value is a text, a picture, or both: a mapping of `text` and `image`, either of which a row may lack. Its parts
    are the content of one message, in the order of the mapping
(2) The column's prompt is the message of the system before it, as sentence-transformers has it, and the processor's
    chat template writes the two as text
(3) The processor puts a picture's tokens where its placeholder stands
(4) A text beyond `max_length` loses the end of what the user says, and keeps what the template writes after it, such
    as an end-of-turn token that is pooled. A row with pictures is cut plainly, and never through a picture
(5) The batch says how many images, and how many tiles of images, each row has: lists beside the features, from which
    chunks are cut and which the model never sees (engine/images.py)

Letters: B rows, T tokens.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dist_ext.data.collator import as_list, is_empty
from hf_dist_ext.data.image_text_collator import check_processor
from hf_dist_ext.data.padding import as_tensors, is_per_token
from hf_dist_ext.data.sentence_collator import ContrastiveCollator, image_token, tiles_of_rows
from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("text", "image")
STORED = {"bytes", "path"}  # the keys of a picture as `datasets` stores it
OF_PROCESSOR = ("text", "image", "common", "chat_template")
OF_OTHERS = ("audio", "video")  # of rows that are not read here; a folder may have options for them


class VisionLanguageCollator(ContrastiveCollator):
    """A `ContrastiveCollator` whose columns hold texts, pictures (PIL, a file's bytes, or as `datasets` stores them),
    or mappings of `text` and `image` (one or a list; a str is a path there).

    `processor` has a tokenizer, an image processor and a chat template; `tokenizer` is its tokenizer. `prompts` are
    instructions, which the template writes as the message of the system. `max_length` counts a picture's tokens too.
    `processing_kwargs` as in sentence-transformers: {"chat_template": {...}, "text": {...}, "image": {...},
    "common": {...}}, options of the template and of the processor. Those of "audio" and "video" concern no row here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        prompts: Mapping[str, str] | None = None,
        *,
        processor: Any,
        processing_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        pad_to_multiple_of: int | None = None,
        **more: Any,
    ):
        check_processor(processor)
        super().__init__(tokenizer, columns, prompts, processor=processor, **more)
        self.pad_to_multiple_of = pad_to_multiple_of
        self._tails: dict[str, int] = {}  # prompt -> tokens after what the user says
        self.processing_kwargs = dict(processing_kwargs or {})
        if alien := [name for name in self.processing_kwargs if name not in (*OF_PROCESSOR, *OF_OTHERS)]:
            raise UsageError(f'processing_kwargs has no "{alien[0]}". It takes {", ".join(OF_PROCESSOR)}.')
        options = {name: dict(self.processing_kwargs.get(name, {})) for name in OF_PROCESSOR}
        self._of_template, self._of_image = options["chat_template"], options["image"]
        self._keeps_tail = self._of_template.pop("restore_suffix", True)  # sentence-transformers' name of (4)
        # Rows are cut and padded here.
        own = {"padding": False, "truncation": False, "verbose": False}
        self._of_text = {**options["common"], **options["text"], **own}
        self._limit = self._of_text.pop("max_length", None)
        self._side = self._of_text.get("padding_side", self._usual_side())
        for name in ("return_tensors", "logits_to_keep"):
            self._of_text.pop(name, None)
        self._image_id = image_token(self.processor)

    def _usual_side(self) -> str:
        return getattr(self.processor, "text_kwargs", {}).get("padding_side", self.tokenizer.padding_side)

    def features(self, column: str, values: list) -> dict[str, Any]:
        """(B, T) of tokens, the pictures' features, and (5)."""
        if not values:  # no row of this batch has a negative; rows of other processes may
            return {name: value[:0] for name, value in self.features(column, ["."]).items()}
        contents = [content_of(column, value) for value in values]
        images = [[part["image"] for part in content if part["type"] == "image"] for content in contents]
        prompt = (self.prompts or {}).get(column, "")
        encoded = self._encoded(column, prompt, contents, images)
        if (limit := self._length(column)) is not None:
            self._cut(encoded, limit, prompt, images)
        counts = self._counts(encoded["input_ids"], images)
        return as_tensors(encoded, self.tokenizer.pad_token_id, self._side, self.pad_to_multiple_of) | counts

    def _column(self, name: str, place: int, values: list, draws: list[str] | None) -> tuple[dict[str, Any], dict]:
        return self.features(name, values), {}

    def gives_tokens(self, column: str) -> bool:
        return False  # of a text alone: the template and the pictures have a part in them

    def _length(self, column: str) -> int | None:
        given = self.max_length.get(column) if isinstance(self.max_length, Mapping) else self.max_length
        limit = given or self._limit or self.tokenizer.model_max_length
        return limit if limit < 10**9 else None  # transformers writes "no limit" as 1e30

    # (2), (3)

    def _encoded(
        self, column: str, prompt: str, contents: Sequence[list[dict]], images: Sequence[list]
    ) -> dict[str, Any]:
        """What the processor returns, with tokens as a list per row."""
        texts = self._rendered(prompt, contents)
        name, token = type(self.processor).__name__, getattr(self.processor, "image_token", None)
        if prompt and prompt.strip() not in texts[0]:
            raise UsageError(
                f'prompts: the chat template of {name} does not write the message of the system, so the prompt of "'
                f'{column}" would be lost. Use a template that does, or leave the prompt out.'
            )
        for text, of_row in zip(texts, images, strict=True):
            if token is not None and text.count(token) != len(of_row):
                raise UsageError(
                    f'column "{column}": the chat template of {name} writes {text.count(token)} image token(s) '
                    f"{token} for {len(of_row)} image(s). "
                    + ("Remove it from the text." if text.count(token) > len(of_row) else "Use a template for images.")
                )
        if not any(images):
            return self._processed(texts)
        return self._processed(texts, images=images, images_kwargs={**self._of_image, "return_tensors": "pt"})

    def _processed(self, texts: list[str], **options: Any) -> dict[str, Any]:
        bos = self.tokenizer.bos_token
        of_text = {"add_special_tokens": False} if bos is not None and texts[0].startswith(bos) else {}
        encoded = dict(self.processor(text=list(texts), text_kwargs={**of_text, **self._of_text}, **options))
        encoded.pop("labels", None)  # PaliGemma's processor makes some
        return encoded

    def _rendered(self, prompt: str, contents: Sequence[list[dict]]) -> list[str]:
        system = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] if prompt else []
        messages = [
            [*system, {"role": "user", "content": [_without_picture(part) for part in content]}]
            for content in contents
        ]
        try:
            return self.processor.apply_chat_template(messages, tokenize=False, **self._of_template)
        except Exception as error:  # jinja's, or raised by the template's own raise_exception
            raise UsageError(
                f"the chat template of {type(self.processor).__name__} refuses a message: {error}."
            ) from error

    # (4)

    def _cut(self, encoded: dict[str, Any], limit: int, prompt: str, images: Sequence[list]) -> None:
        ids, token = encoded["input_ids"], self._image_id
        long = [row for row, tokens in enumerate(ids) if len(tokens) > limit]
        for row in long:
            if token in ids[row][limit:]:
                raise UsageError(
                    f"a row with {len(images[row])} image(s) has an image token at place "
                    f"{len(ids[row]) - ids[row][::-1].index(token)}, beyond max_length={limit}. Raise max_length, or "
                    "use smaller or fewer images."
                )
        of_tokens = [value for value in encoded.values() if is_per_token(value, ids)]
        tails = [min(self._tail(prompt), limit) if self._keeps_tail and not images[row] else 0 for row in long]
        for value in of_tokens:
            for row, tail in zip(long, tails, strict=True):
                value[row] = value[row][: limit - tail] + value[row][len(value[row]) - tail :]

    def _tail(self, prompt: str) -> int:
        """How many tokens follow what the user says: the end that two different texts have in common."""
        if prompt not in self._tails:
            texts = self._rendered(prompt, [[{"type": "text", "text": said}] for said in ("0", "1 2 3 4")])
            first, second = (row[::-1] for row in self._processed(texts)["input_ids"])
            pairs = zip(first, second, strict=False)
            self._tails[prompt] = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
        return self._tails[prompt]

    # (5)

    def _counts(self, ids: list[list[int]], images: Sequence[list]) -> dict[str, list[int]]:
        if not any(images):
            return {}
        return {"num_images": [len(of_row) for of_row in images], **tiles_of_rows(ids, self.processor)}


# (1)


def content_of(column: str, value: Any) -> list[dict[str, Any]]:
    """A value's parts: {"type": "text", "text": ...} and {"type": "image", "image": an RGB picture}."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, Mapping) or STORED >= value.keys():
        return [{"type": "image", "image": open_picture(column, value)}]
    if alien := [kind for kind in value if kind not in KINDS]:
        raise UsageError(f'Column "{column}" holds a row with "{alien[0]}"; a row has "text", "image" or both.')
    parts = [(kind, one) for kind, some in value.items() for one in as_list(some) if not is_empty(one)]
    if not parts:
        raise UsageError(f'Column "{column}" holds a row without text and image. Remove the row.')
    return [{"type": kind, kind: one if kind == "text" else open_picture(column, one)} for kind, one in parts]


def open_picture(column: str, value: Any) -> Any:
    """RGB, of a PIL image, a file's bytes or path, or both as `datasets` stores them."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if value is None or isinstance(value, (int, float, list)):
        raise UsageError(f'Column "{column}" holds {value!r}, which is neither text nor picture. Remove the row.')
    try:
        if isinstance(value, Image.Image):
            return value.convert("RGB")
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as opened:
            return opened.convert("RGB")
    except OSError as error:  # Pillow's "cannot identify image file" is one
        raise UsageError(f'Column "{column}" holds a picture that cannot be read: {error}.') from error


def _without_picture(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else dict(part)
