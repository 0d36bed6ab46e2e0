"""The shaded prompt of the playground: as the browser has it, and as an answer says it must be."""

import base64
import re
from typing import Any

from playwright.async_api import Page

NUM_SHADES = 8
_READ = """() => [...CSS.highlights].flatMap(([name, ranges]) =>
    [...ranges].map((range) =>
        [name, range.startOffset, range.endOffset, range.startContainer.data]))"""


async def read_shades(page: Page) -> list[int | None]:
    """Return the shade of each UTF-16 unit of the one text that is shown.

    Neighbours of one shade must lie in one piece.
    """
    found = [piece for piece in await page.evaluate(_READ) if piece[0] != "kept-cursor"]
    (text,) = {piece[3] for piece in found}
    shades: list[int | None] = [None] * (len(text.encode("utf-16-le")) // 2)
    pieces = sorted(found, key=lambda piece: int(piece[1]))
    for name, start, end, _ in pieces:
        assert shades[start:end] == [None] * (end - start), "two shades lie on one character"
        assert start == 0 or shades[start - 1] != int(name.removeprefix("kept-"))
        shades[start:end] = [int(name.removeprefix("kept-"))] * (end - start)
    return shades


def expected_shades(text: str, explain: dict[str, Any], layer: int) -> list[int | None]:
    """Return the same for the fake's tokens, words; blanks belong to the word behind them."""
    rows = [list(base64.b64decode(row)) for row in explain["layer_kept_counts"]]
    counts = explain["kept_counts"] if layer == 0 else rows[layer - 1]
    most = explain["num_kv_heads"] * (len(rows) if layer == 0 else 1)
    shades: list[int | None] = []
    for count, word in zip(counts, re.findall(r"\s*\S+", text), strict=True):
        # Rounded up: only what nobody kept has no shade.
        shades += [(count * NUM_SHADES + most - 1) // most] * len(word)
    return shades
