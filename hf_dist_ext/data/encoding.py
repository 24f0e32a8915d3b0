"""Text files that are not UTF-8: which byte is wrong, on which line, and what makes UTF-8 of the file.

pandas gives the place of a wrong byte in its field, and Arrow reads the JSON of any bytes and fails when a text is
asked for. So a file is looked through again once something has failed.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path
from typing import NoReturn

from hf_dist_ext.errors import UsageError

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def refuse_other_encoding(what: str, path: Path) -> None:
    """Raises UsageError where the file `path` (it may be .gz) is not UTF-8. `what`: the file in words."""
    start, number = 0, 1  # of the line: its place in bytes, and which it is
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for line in file:
                line.decode("utf-8")
                start, number = start + len(line), number + 1
    except UnicodeDecodeError as error:
        encoding = "utf-16" if number == 1 and line.startswith(UTF_16) else "latin1"
        raise UsageError(
            f"{what} is not UTF-8 text: line {number}, byte {start + error.start} of the file is "
            f"0x{line[error.start]:02x}. Save it as UTF-8, as iconv -f {encoding} -t utf-8 FILE does."
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{what} cannot be unpacked: {error}. Give a whole .gz file.") from None


def refuse_text(what: str, error: UnicodeDecodeError) -> NoReturn:
    """Raises UsageError for a text whose file nobody knows any more."""
    text = error.object[max(0, error.start - 40) : error.start + 20]
    raise UsageError(f"{what} is not UTF-8 text, as in {text!r}. Save it as UTF-8.") from error
