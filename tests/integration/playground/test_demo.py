"""The playground on the real demo model, served by the real command."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import expect

from tests.support.browser import headless_browser, opened
from tests.support.kept_text import NUM_SHADES, read_shades
from tests.support.served import example_environment, serving

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(600)]

#: A character of several tokens, twice, around words.
PROMPT = (
    "\U0001f98a The fox \U0001f98a is called Fredegund. "
    + "It sleeps in the hay and wakes when the moon is up. " * 12
    + "\nQuestion: What is the fox called?\nAnswer: The fox is called"
)
KNOBS = {"max_capacity_prompt": 64, "window_size": 16, "kernel_size": 15, "pooling": "max"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model."""
    folder: Path = tmp_path_factory.mktemp("served")
    with serving(example_environment(folder), folder / "server.log") as address:
        yield f"http://{address}"


async def test_a_run_shades_each_character_by_what_its_tokens_were_kept(url: str) -> None:
    """Counted by this test from `/tokenize` and `/generate`, character by character."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        body = {"prompt": PROMPT, "max_new_tokens": 4, "explain": True, **KNOBS}
        answer = (await client.post("/generate", json=body)).json()
        asked = {"prompt": PROMPT, "return_offsets": True}
        tokens = (await client.post("/tokenize", json=asked)).json()
    explain = answer["explain"]
    assert tokens["count"] == answer["usage"]["prompt_tokens"] == len(explain["kept_counts"])
    assert any(PROMPT[start:end] == "\U0001f98a" for start, end in tokens["offsets"])
    most = explain["num_kv_heads"] * len(explain["layer_kept_counts"])
    # Tokens that overlap are parts of one character, and are shown as the most kept of them.
    kept: list[int] = []
    group_start = 0
    for (start, end), count in zip(tokens["offsets"], explain["kept_counts"], strict=True):
        if start >= len(kept):
            group_start = len(kept)
        most_of_group = max([count, *kept[group_start:]])
        kept[group_start:] = [most_of_group] * (max(end, len(kept)) - group_start)
    assert len(kept) == len(PROMPT)

    async with headless_browser() as browser, opened(browser, f"{url}/") as watched:
        page = watched.page
        await page.fill("#prompt", PROMPT)
        await expect(page.locator("#count")).to_have_text(f"{tokens['count']} tokens")
        for name, value in KNOBS.items():
            field = f"#{name}-a"
            await (page.select_option if name == "pooling" else page.fill)(field, str(value))
        await page.fill("#max_new_tokens", "4")
        await page.press("#prompt", "Control+Enter")
        await expect(page.locator(".panel-state")).to_contain_text("Finished", timeout=300_000)
        assert await page.text_content(".answer") == answer["text"]
        figures = await page.locator(".figures").inner_text()
        assert f"{tokens['count']} \u2192 64" in figures
        assert f"{100 * answer['kv_cache']['kept_attention_mass']:.1f} %" in figures

        # The browser counts the fox as two units.
        expected = [-(-kept[place] * NUM_SHADES // most) for place in units(PROMPT)]
        assert await read_shades(page) == expected
        await page.focus(".kept-text")
        await page.keyboard.press("Home")
        shown = await page.text_content(".readout") or ""
        assert re.match(r'Tokens 1 to [2-4] of [\d,]+, "\U0001f98a": kept by \d+, \d+', shown), (
            shown
        )
        assert watched.complaints == []


def units(text: str) -> list[int]:
    """Return, for each UTF-16 unit of a text, the character that it is part of."""
    return [
        place
        for place, character in enumerate(text)
        for _ in range(len(character.encode("utf-16-le")) // 2)
    ]
