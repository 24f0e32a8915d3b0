"""The built-in dataset "glyph-search": find the picture of a character by its Unicode name. It needs no download.

    dataset = load_glyphs()                                     # test: 500 characters that train does not have
    processor = build_processor(dataset["train"]["query"])      # a tokenizer of these names, and an image processor
    chat = build_chat_processor(dataset["train"]["query"], 8)   # the same for LLaVA, with a chat template

(1) The characters of fonts that matplotlib comes with are drawn in white on black, 32 x 32 pixels
(2) A row is the name that `unicodedata` gives a character, in lower case, and its picture
(3) Of pictures that are alike to the pixel (Latin A, Greek Alpha, Cyrillic A) the first one alone is kept, font by
    font and in Unicode's order, so that a name of test has one right picture
(4) A seeded draw of `held_out` characters, in the first font, is the test split
(5) Train is the other characters, in every font, without pictures that are nearly one of test (`ALIKE`): a letter with
    diaeresis and the same one with dialytika differ in a shade of grey

The tokenizer: (6) a name is cut into words and digits ("braille pattern dots-1245" are seven tokens); (7) a word that
occurs fewer than `MIN_COUNT` times in train is spelt, so that the parts of "pwii", a syllable, are known from others

The rows depend on the versions of matplotlib's font, Pillow's FreeType and Python's names of characters alone.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import GLYPH_SEARCH

if TYPE_CHECKING:
    from datasets import DatasetDict
    from PIL.Image import Image
    from transformers import CLIPImageProcessorPil, CLIPProcessor, LlavaProcessor, PreTrainedTokenizerFast

NAME = GLYPH_SEARCH
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
SIDE, BASELINE, EM = 32, 24, 22  # pixels: of a picture, from its top to the line that letters stand on, of the font
ALIKE = 0.02  # of the squared difference of two pictures, in shares of the brighter one's squares
MIN_COUNT, MAX_LENGTH = 8, 32  # times in train; tokens
IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}


def load_glyphs(held_out: int = 500, seed: int = 42) -> DatasetDict:
    """Train and test split with the columns query, positive (the picture), character and font.

    Raises UsageError where matplotlib or Pillow is missing, or not more rows are there than `held_out`.
    """
    from datasets import Dataset, DatasetDict, Features, Image, Value

    rows = one_row_per_picture([row for font in FONTS for row in draw_font(font)])
    first = [row for row in rows if row["font"] == FONTS[0]]
    if len(first) <= held_out:
        raise UsageError(f"held_out={held_out} of {len(first)} {NAME} rows leaves none to train on. Hold out fewer.")
    drawn = set(random.Random(seed).sample(range(len(first)), held_out))  # (4)
    test = [row for index, row in enumerate(first) if index in drawn]
    characters = {row["character"] for row in test}
    train = [row for row in rows if row["character"] not in characters]  # (5)
    train = [row for row, is_alike in zip(train, look_alike(train, test), strict=True) if not is_alike]
    features = Features({name: Value("string") for name in rows[0]} | {"positive": Image()})
    splits = {"train": train, "test": test}
    return DatasetDict({name: Dataset.from_list(split, features) for name, split in splits.items() if split})


def draw_font(file: str = FONTS[0]) -> list[dict]:
    """Every character that has a name and fits a picture as a row, in Unicode's order."""
    try:
        import matplotlib
        from matplotlib.ft2font import FT2Font
        from PIL import ImageFont
    except ImportError as error:
        raise UsageError(f'dataset "{NAME}" needs matplotlib and Pillow. Run: pip install -e ".[images]"') from error
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", file)
    font = ImageFont.truetype(str(path), EM, layout_engine=ImageFont.Layout.BASIC)  # the other one may be missing
    rows = []
    for character in map(chr, sorted(FT2Font(str(path)).get_charmap())):
        name = unicodedata.name(character, "")
        if name and (picture := draw(character, font)) is not None:
            rows.append({"query": name.lower(), "positive": picture, "character": character, "font": file})
    return rows


def draw(character: str, font) -> Image | None:
    """(1) In the middle from left to right; None when nothing is seen, or a part would not be."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(character, anchor="ls")  # from where the line begins
    width = right - left
    if not 0 < width <= SIDE or top == bottom or BASELINE + top < 0 or BASELINE + bottom > SIDE:
        return None
    picture = Image.new("L", (SIDE, SIDE))
    place = ((SIDE - width) // 2 - left, BASELINE)
    ImageDraw.Draw(picture).text(place, character, fill=255, font=font, anchor="ls")
    return picture


def one_row_per_picture(rows: list[dict]) -> list[dict]:
    """(3)"""
    first_rows: dict[bytes, dict] = {}
    for row in rows:
        first_rows.setdefault(row["positive"].tobytes(), row)
    return list(first_rows.values())


def look_alike(rows: list[dict], others: list[dict]) -> np.ndarray:
    """(rows,) booleans: whether a picture is nearly that of any of the others."""
    here, there = (_pixels(some) for some in (rows, others))  # (N, SIDE * SIDE), (M, SIDE * SIDE)
    squares, other_squares = (np.square(pixels).sum(1) for pixels in (here, there))
    differences = squares[:, None] + other_squares - 2 * here @ there.T  # (N, M)
    return (differences < ALIKE * np.maximum(squares[:, None], other_squares)).any(1)


def _pixels(rows: list[dict]) -> np.ndarray:
    return np.stack([np.asarray(row["positive"], dtype=np.float32).reshape(-1) / 255 for row in rows])


def build_processor(names: Iterable[str], side: int | None = None) -> CLIPProcessor:
    """A tokenizer of the names, and pictures with values from -1 to 1, of `side` pixels (None: as they are)."""
    from transformers import CLIPProcessor

    return CLIPProcessor(_pictures(side), build_tokenizer(names))


def build_chat_processor(names: Iterable[str], patch_size: int, side: int | None = None) -> LlavaProcessor:
    """The same for a LLaVA that cuts pictures into patches of so many pixels, with a chat template."""
    from transformers import LlavaProcessor

    tokenizer = build_tokenizer(names)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    options = {"patch_size": patch_size, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(_pictures(side), tokenizer, chat_template=CHAT_TEMPLATE, **options)


def _pictures(side: int | None) -> CLIPImageProcessorPil:
    from transformers import CLIPImageProcessorPil

    size = dict.fromkeys(("height", "width"), side or SIDE)
    return CLIPImageProcessorPil(size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def build_tokenizer(names: Iterable[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for name in names for word in re.findall("[a-z]+|[0-9]", name))
    letters = sorted(set("".join(counts)))
    words = sorted(word for word, count in counts.items() if count >= MIN_COUNT and len(word) > 1)  # (7)
    tokens = [*SPECIAL_TOKENS.values(), *letters, *(f"##{letter}" for letter in letters), *words]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    cut = pre_tokenizers.Split(Regex("[^a-z0-9]+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Digits(individual_digits=True)])  # (6)
    ends = [(token, tokens.index(token)) for token in ("[CLS]", "[SEP]")]  # CLIP's text tower reads the last token
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **SPECIAL_TOKENS)
