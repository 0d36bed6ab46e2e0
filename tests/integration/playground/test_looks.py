"""The playground by keyboard, on a phone, and in the light and in the dark."""

import re

import pytest
from playwright.async_api import expect

from tests.support.playground import PROMPT, Served, fill, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

#: Lists name, colour and ground of everything that shows text, and of every shade.
COLOURS = """() => {
    const ground = (one) => {
        for (let it = one; it; it = it.parentElement) {
            const found = getComputedStyle(it).backgroundColor;
            if (!found.startsWith("rgba(0, 0, 0, 0")) return found;
        }
    };
    const pairs = [...document.querySelectorAll("body *")]
        .filter((one) => one.checkVisibility()
            && one.getAttribute("aria-disabled") !== "true"
            && [...one.childNodes].some((it) => it.nodeType === 3 && it.data.trim()))
        .map((one) => [one.className || one.id || one.tagName,
            getComputedStyle(one).color, ground(one)]);
    const text = document.querySelector(".kept-text");
    for (const shade of [0, 1, 2, 3, 4, 5, 6, 7, 8, "cursor"]) {
        const name = `kept-${shade}`;
        const style = getComputedStyle(text, `::highlight(${name})`);
        const isClear = style.backgroundColor.startsWith("rgba(0, 0, 0, 0");
        pairs.push([name, style.color, isClear ? ground(text) : style.backgroundColor]);
    }
    return pairs;
}"""
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


async def test_the_keyboard_alone_is_enough(served: Served) -> None:
    """Tab reaches every control in the order of the page, and each shows that it has the focus."""
    async with served.visit() as watched:
        page = watched.page
        await expect(page.locator("#server")).to_contain_text("fake")
        reached: list[str] = []
        while "run" not in reached:
            await page.keyboard.press("Tab")
            name, outline = await page.evaluate(
                """() => {
                    const it = document.activeElement;
                    const style = getComputedStyle(it);
                    return [it.id || it.ariaLabel || it.textContent, style.outlineStyle];
                }"""
            )
            assert outline != "none", f"{name} does not show that it has the focus"
            assert name not in reached, f"the focus goes round without reaching Run: {reached}"
            reached.append(name)
            if name == "prompt":
                await page.keyboard.type(PROMPT)
            if name == "max_capacity_prompt-a":
                await page.keyboard.press("Control+A")
                await page.keyboard.type("20")
        wanted = ["sample", "prompt", "profile-a", "Capacity, slider", "window_size-a", "run"]
        assert [name for name in reached if name in wanted] == wanted
        await page.keyboard.press("Control+Enter")
        await expect(page.locator(".panel-state").first).to_contain_text("Finished")
    assert served.engine.requests[0].compression.max_capacity_prompt == 20


async def test_sliders_and_numbers_follow_each_other(served: Served) -> None:
    async with served.visit() as watched:
        page = watched.page
        slider = page.get_by_label("Capacity, slider").first
        await page.fill("#max_capacity_prompt-a", "2048")
        assert await slider.input_value() == "1000"
        await slider.focus()
        await page.keyboard.press("Home")
        assert await page.input_value("#max_capacity_prompt-a") == "2"
        await page.keyboard.press("End")
        assert await page.input_value("#max_capacity_prompt-a") == "2048"
        kernel = page.get_by_label("Kernel, slider").first
        await kernel.focus()
        await page.keyboard.press("ArrowRight")
        assert int(await page.input_value("#kernel_size-a")) % 2 == 1


@pytest.mark.parametrize("is_pair", [False, True])
async def test_nothing_is_wider_than_a_phone(served: Served, is_pair: bool) -> None:
    async with served.visit(**PHONE) as watched:
        page = watched.page
        await fill(page, f"{PROMPT} {'x' * 300}")
        if is_pair:
            await page.check("#compare")
            await page.fill("#max_capacity_prompt-b", "8")
            await page.fill("#window_size-b", "4")
        await page.click("#run")
        await expect(page.locator(".panel-state").nth(int(is_pair))).to_contain_text("Finished")
        width, wider = await page.evaluate(
            """() => [document.documentElement.scrollWidth,
                [...document.querySelectorAll("body *")]
                    .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
                    .map((one) => one.className || one.id || one.tagName)]"""
        )
        assert (width, wider) == (360, [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read(served: Served, scheme: str) -> None:
    """Contrast is at least 4.5 to 1 everywhere, on each shade as well."""
    async with served.visit(color_scheme=scheme) as watched:
        page = watched.page
        await fill(page, kernel_size=3)
        await run(page)
        pairs = await page.evaluate(COLOURS)
        await page.fill("#kernel_size-a", "4")
        await page.click("#run")
        await expect(page.locator("#kernel_size-a-error")).to_be_visible()
        pairs += await page.evaluate(COLOURS)
    assert {name for name, _, _ in pairs} > {"panel-state", "hint", "readout", "error"}
    shades = {ground for name, _, ground in pairs if name.startswith("kept-")}
    assert len(shades) >= 10, "some shades look alike"
    poor = {name: ratio for name, *colours in pairs if (ratio := contrast(*colours)) < 4.5}
    assert not poor
    is_dark = luminance(pairs[0][2]) < 0.2
    assert is_dark == (scheme == "dark")


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(...)`, as WCAG defines it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (
        float(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
