"""The shaded prompt of the playground: as the browser has it, and as an answer says it must be."""

import base64
import re
from typing import Any

from playwright.async_api import Page

NUM_SHADES = 8
_READ = """() => {
    const found = [], places = new Map();
    let place = 0;
    for (const node of document.querySelector(".kept-text").childNodes) {
        places.set(node, place);
        place += node.data.length;
    }
    for (const [name, ranges] of CSS.highlights) {
        for (const range of name === "kept-cursor" ? [] : ranges) {
            const start = places.get(range.startContainer);
            found.push([name, start + range.startOffset, start + range.endOffset]);
        }
    }
    return [place, found, [...places.values()]];
}"""


async def read_shades(page: Page) -> list[int | None]:
    """Return the shade of each UTF-16 unit of the one text that is shown.

    Neighbours of one shade must lie in one piece, unless their text is cut between them.
    """
    length, pieces, cuts = await page.evaluate(_READ)
    shades: list[int | None] = [None] * length
    for name, start, end in sorted(pieces, key=lambda piece: int(piece[1])):
        shade = int(name.removeprefix("kept-"))
        assert shades[start:end] == [None] * (end - start), "two shades lie on one character"
        assert start in cuts or shades[start - 1] != shade
        shades[start:end] = [shade] * (end - start)
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
