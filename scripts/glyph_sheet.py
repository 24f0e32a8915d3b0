#!/usr/bin/env python
"""Draw what a model of configs/glyph_search.json finds: a line per query, the pictures with the highest scores.

    python scripts/glyph_sheet.py --model outputs/glyph_search --output outputs/glyph_sheet.png
    python scripts/glyph_sheet.py --model outputs/glyph_search --output mine.png "black chess queen" "arrow upwards"

It searches the 500 characters that were held out. Without queries it asks for the names of ten of them, drawn by lot
(--seed). The picture that has the name is framed.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from sentence_transformers import SentenceTransformer

from hf_dist_ext.data.glyphs import FONTS, SIDE, load_glyphs
from hf_dist_ext.failures import exit_on_usage_error

PICTURES, ZOOM, GAP, FRAME = 8, 2, 12, 4  # pictures per line, pixels per pixel of theirs, between them, of a frame
TEXT_WIDTH, TEXT_SIZE = 380, 15  # pixels
RIGHT, PAPER, INK = (40, 170, 80), (255, 255, 255), (30, 30, 30)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR", help="the output_dir of the run")
    parser.add_argument("--output", required=True, metavar="FILE", help="a PNG file")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of ten names (default: %(default)s)")
    parser.add_argument("query", nargs="*", metavar="QUERY", help="what to look for instead of ten names")
    arguments = parser.parse_args(argv)
    with exit_on_usage_error():
        rows = load_glyphs()["test"]
        names, pictures = rows["query"], rows["positive"][:]
        queries = arguments.query or random.Random(arguments.seed).sample(names[:], 10)
        model = SentenceTransformer(arguments.model)
        scores = model.similarity(model.encode(queries), model.encode(pictures))  # (queries, 500)
        best = scores.topk(PICTURES).indices.tolist()
        found = [
            [(pictures[row], names[row] == query.lower()) for row in line]
            for query, line in zip(queries, best, strict=True)
        ]
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        sheet(queries, found).save(arguments.output, optimize=True)
        right = sum(line[0][1] for line in found)
        print(f"{arguments.output}: {len(queries)} queries, {right} of them with the right picture first")


def sheet(queries: list[str], found: list[list[tuple[Image.Image, bool]]]) -> Image.Image:
    """A line per query: its words, then its pictures from the best on; those marked True have a frame."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", FONTS[0])), TEXT_SIZE)
    cell = SIDE * ZOOM + GAP
    paper = Image.new("RGB", (TEXT_WIDTH + PICTURES * cell + GAP, len(queries) * cell + GAP), PAPER)
    pen = ImageDraw.Draw(paper)
    for line, (query, pictures) in enumerate(zip(queries, found, strict=True)):
        top = GAP + line * cell
        while font.getlength(query) > TEXT_WIDTH - 2 * GAP:
            query = query[:-2] + "…"
        pen.text((GAP, top + SIDE * ZOOM // 2), query, fill=INK, font=font, anchor="lm")
        for place, (picture, is_right) in enumerate(pictures):
            left = TEXT_WIDTH + place * cell
            if is_right:
                right, bottom = left + SIDE * ZOOM - 1, top + SIDE * ZOOM - 1
                pen.rectangle((left - FRAME, top - FRAME, right + FRAME, bottom + FRAME), fill=RIGHT)
            paper.paste(picture.convert("L").resize((SIDE * ZOOM,) * 2, Image.Resampling.BICUBIC), (left, top))
    return paper.quantize(64)


if __name__ == "__main__":
    main()
