"""The built-in dataset "digits": scikit-learn's handwritten digits as conversations about pictures, all of it offline.

    load_digits("pictures")["train"][0]   # image: 8 x 8, "<image> which digit is this ?" -> "this is the digit seven"
    load_digits("captions")["train"][0]   # no image: "... seven ..." stands where the picture would
    build_processor()                     # tokenizer, image processor and chat template, made here

The pictures are 1,797 digits that people wrote; 360 of them are held out, and every test split is of these. Captions
are words alone, each beginning with as many words as a picture has patches: some name the digit, the others say
nothing. A language model that has learned to answer from captions can answer from a picture as soon as a projector
puts the picture into those words' place.
"""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset, Features, Image, Value

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import DIGITS

NAME = DIGITS
CONFIGS = ("pictures", "captions")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FILLERS = ("a", "grey", "small", "drawn", "by", "hand", "on", "paper")
QUESTION, ANSWER = "which digit is this ?", "this is the digit"
HELD_OUT, SPLIT_SEED = 360, 0
NUM_CAPTIONS, CAPTION_WORDS = 3000, 16

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "<image>")
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{{ message['role'] }} : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def load_digits(config_name: str | None = None) -> dict[str, Dataset]:
    """Splits train and test in LLaVA's form: `image` (null in captions) and `conversations`."""
    if config_name not in (None, *CONFIGS):
        raise UsageError(f'dataset_config_name="{config_name}": "{NAME}" has {" and ".join(CONFIGS)}.')
    pictures = _pictures()
    train = pictures[HELD_OUT:] if config_name != "captions" else _captions()
    return {"train": _dataset(train), "test": _dataset(pictures[:HELD_OUT])}


def _pictures() -> list[dict[str, Any]]:
    try:
        from sklearn.datasets import load_digits as load_bunch
    except ImportError as error:
        raise UsageError(f'dataset "{NAME}" needs scikit-learn. Run: pip install -e ".[digits]"') from error
    from PIL.Image import fromarray

    bunch = load_bunch()
    rows = [
        {"image": fromarray((picture * 15.9).astype("uint8")), "conversations": _conversation("<image>", label)}
        for picture, label in zip(bunch.images, bunch.target, strict=True)
    ]
    random.Random(SPLIT_SEED).shuffle(rows)
    return rows


def _captions() -> list[dict[str, Any]]:
    draw, rows = random.Random(SPLIT_SEED), []
    for number in range(NUM_CAPTIONS):
        label = number % len(WORDS)
        named = draw.randint(1, CAPTION_WORDS)
        words = [WORDS[label]] * named + draw.choices(FILLERS, k=CAPTION_WORDS - named)
        draw.shuffle(words)
        rows.append({"image": None, "conversations": _conversation(" ".join(words), label)})
    return rows


def _conversation(shown: str, label: int) -> list[dict[str, str]]:
    return [
        {"from": "human", "value": f"{shown}\n{QUESTION}"},
        {"from": "gpt", "value": f"{ANSWER} {WORDS[label]}"},
    ]


def _dataset(rows: list[dict[str, Any]]) -> Dataset:
    turns = [{"from": Value("string"), "value": Value("string")}]
    return Dataset.from_list(rows, features=Features({"image": Image(), "conversations": turns}))


def build_processor(patch_size: int = 2, image_size: int = 8) -> Any:
    """A LLaVA processor whose tokenizer knows the words of this dataset."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words = [*SPECIAL, *dict.fromkeys(f"user assistant : {QUESTION} {ANSWER}".split()), *WORDS, *FILLERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
    size = {"height": image_size, "width": image_size}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=wrapped,
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
