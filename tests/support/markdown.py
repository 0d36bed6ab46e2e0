"""Fenced examples of the Markdown pages, with the directive that stands above each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

FENCE: Final = re.compile(r"^(?P<indent> *)(?P<marks>```+|~~~+) *(?P<language>[\w+-]*)")
DIRECTIVE: Final = re.compile(r"^ *<!-- docs: (?P<text>.+?) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: Path of the page, from the root of the repository.
        line: Line of its opening fence, from 1.
        language: First word of the info string; empty when there is none.
        directive: What the comment `<!-- docs: ... -->` right above it says, or empty.
        text: The lines between the fences.
    """

    page: str
    line: int
    language: str
    directive: str
    text: str

    @property
    def name(self) -> str:
        """Where to find it: `README.md:42`."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """List the Markdown pages: the root's, and those under docs/ and examples/."""
    folders = (ROOT / "docs", ROOT / "examples")
    return [
        *sorted(ROOT.glob("*.md")),
        *(page for folder in folders for page in sorted(folder.rglob("*.md"))),
    ]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order.

    Raises:
        ValueError: A fence is not closed.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        closing = fence["indent"] + fence["marks"]
        try:
            end = lines.index(closing, number + 1)
        except ValueError:
            raise ValueError(f"{page}:{number + 1}: fence is not closed") from None
        above = DIRECTIVE.match(lines[number - 1]) if number else None
        indent = len(fence["indent"])
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=number + 1,
            language=fence["language"],
            directive=above["text"] if above else "",
            text="\n".join(line[indent:] for line in lines[number + 1 : end]) + "\n",
        )
        number = end + 1


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks, where links and headings are real."""
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(page):
        text = text.replace(block.text, "", 1)
    return text


def shape(value: object) -> object:
    """Reduce JSON to its keys and kinds; whole and broken numbers are one kind, null is itself."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    if isinstance(value, bool) or value is None:
        return value
    return "number" if isinstance(value, int | float) else "text"
