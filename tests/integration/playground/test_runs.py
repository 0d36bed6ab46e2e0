"""The playground in a real browser: what a person does with keys and pointer, and what they see.

The engine behind it is the fake one, whose tokens are words and whose answer is the prompt.
"""

import re
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, expect

from tests.support.app_client import until
from tests.support.browser import opened
from tests.support.fake_answers import NUM_KV_HEADS, NUM_LAYERS
from tests.support.kept_text import expected_shades, read_shades
from tests.support.playground import KNOBS, PROMPT, Served, fill, run, serving_fake

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY, WRONG = "key-of-the-playground-1", "key-of-nobody-at-all-1"
#: Tells whether the shaded prompt consists of the same nodes as when this was asked last.
IS_SAME_TEXT = """() => {
    const before = window.nodes ?? [], now = [...document.querySelector(".kept-text").childNodes];
    window.nodes = now;
    return now.length === before.length && now.every((node, index) => node === before[index]);
}"""


async def test_it_loads_from_its_own_host_under_a_strict_policy(served: Served) -> None:
    async with served.visit() as watched:
        await expect(watched.page.locator("#server")).to_have_text("fake · context of 2,048 tokens")
        await fill(watched.page)
        await run(watched.page)
        assert watched.strangers() == set()
        assert watched.complaints == []
        assert len(watched.requests) > 8
        assert not any("word1" in url for url in watched.requests)


async def test_tokens_are_counted_while_one_writes(served: Served) -> None:
    async with served.visit() as watched:
        count = watched.page.locator("#count")
        await watched.page.fill("#prompt", "one two three")
        await expect(count).to_have_text("3 tokens")
        await watched.page.type("#prompt", " four")
        await expect(count).to_have_text("4 tokens")
        await watched.page.fill("#prompt", "w " * 2_100)
        await expect(count).to_have_text("2,100 tokens, of which the model takes 2,048")


async def test_samples_are_long_documents_with_a_question(served: Served) -> None:
    async with served.visit() as watched:
        page = watched.page
        titles = await page.locator("#sample option").all_inner_texts()
        assert len(titles) == 4
        for title in titles[1:]:
            before = await page.input_value("#prompt")
            await page.select_option("#sample", label=title)
            await expect(page.locator("#prompt")).not_to_have_value(before)
            text = await page.input_value("#prompt")
            assert re.search(r"\nQuestion: .+\?\nAnswer: .+ is$", text)
            await expect(page.locator("#count")).to_contain_text(f"{len(text.split()):,} tokens")
            assert len(text.split()) > 1_500


async def test_the_answer_appears_piece_by_piece_and_then_its_figures(served: Served) -> None:
    served.engine.behaviour.delay_s = 0.03
    async with served.visit() as watched:
        page = watched.page
        await fill(page)
        await page.evaluate(
            """() => {
                window.lengths = [];
                const answer = document.querySelector(".answer");
                new MutationObserver(() => window.lengths.push(answer.textContent.length))
                    .observe(answer, { childList: true });
            }"""
        )
        await page.fill("#max_new_tokens", "30")
        await run(page)
        lengths = [length for length in await page.evaluate("window.lengths") if length]
        assert len(set(lengths)) > 5
        assert lengths == sorted(lengths)
        assert await page.text_content(".answer") == " " + " ".join(PROMPT.split()[:30])
        figures = await page.locator(".figures").inner_text()
        for shown in (
            "60 → 16",
            "3.8 KB → 1.0 KB",
            "3.8 \u00d7",
            "90.0 %",
            "60 + 30",
            "21 ms",
            "966.7",
        ):
            assert shown in figures, figures
    (request,) = served.engine.requests
    assert request.explain
    assert request.compression.max_capacity_prompt == 16


async def test_shades_are_what_generate_explains(served: Served) -> None:
    """Of all layers together and of each alone; the layer filter changes them and nothing else."""
    body = {"prompt": PROMPT, **KNOBS, "max_new_tokens": 4, "explain": True}
    async with httpx.AsyncClient(base_url=served.url) as client:
        explain = (await client.post("/generate", json=body)).json()["explain"]
    async with served.visit() as watched:
        page = watched.page
        await fill(page)
        await run(page)
        seen = []
        for layer in range(NUM_LAYERS + 1):
            await page.fill(".layer", str(layer))
            found = await read_shades(page)
            assert found == expected_shades(PROMPT, explain, layer)
            assert await page.evaluate(IS_SAME_TEXT) is (layer > 0)
            seen.append(found)
        assert seen[0] != seen[1] != seen[2]
        await page.click(".all-layers")
        assert await read_shades(page) == seen[0]


async def test_a_tokens_number_is_shown_to_pointer_and_keys(served: Served) -> None:
    most = NUM_LAYERS * NUM_KV_HEADS
    async with served.visit() as watched:
        page = watched.page
        await fill(page)
        await run(page)
        readout = page.locator(".readout")
        box = await page.locator(".kept-text").bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + 20, box["y"] + 20)
        await expect(readout).to_have_text(
            f'Token 1 of 60, "word0": kept by 1 of {most} layer-heads'
        )
        await page.focus(".kept-text")
        await page.keyboard.press("ArrowRight")
        await expect(readout).to_contain_text('Token 2 of 60, " word1": kept by 3 of')
        await page.keyboard.press("End")
        await expect(readout).to_contain_text('Token 60 of 60, " word59":')
        await page.fill(".layer", "1")
        await expect(readout).to_contain_text(f"kept by 2 of {NUM_KV_HEADS} heads of this layer")


async def test_two_budgets_run_one_after_the_other(served: Served) -> None:
    async with served.visit() as watched:
        page = watched.page
        await fill(page)
        await page.check("#compare")
        await page.select_option("#method-b", "full")
        await page.fill("#window_size-b", "5")
        await page.fill("#max_capacity_prompt-b", "8")
        await page.click("#run")
        states = page.locator(".panel-state")
        await expect(states.nth(1)).to_contain_text("Finished")
        figures = [await one.inner_text() for one in await page.locator(".figures").all()]
        assert "60 → 16" in figures[0]
        assert "none: full method" in figures[1]
        assert await page.locator(".kept:visible").count() == 2
    knobs = [request.compression for request in served.engine.requests]
    assert [(one.method, one.max_capacity_prompt) for one in knobs] == [("snapkv", 16), ("full", 8)]


async def test_profiles_are_the_servers(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url) as client:
        config = (await client.get("/playground.json")).json()
    async with served.visit() as watched:
        page = watched.page
        options = await page.locator("#profile-a option").evaluate_all(
            "all => all.map(o => o.value)"
        )
        assert options[1:-1] == list(config["profiles"]) != []
        for name, values in config["profiles"].items():
            await page.select_option("#profile-a", name)
            shown = {knob: await page.input_value(f"#{knob}-a") for knob in values}
            assert shown == {knob: str(value) for knob, value in values.items()}
        await page.fill("#window_size-a", "9")
        assert await page.input_value("#profile-a") == "own"


async def test_a_bad_knob_gets_the_servers_words_beside_it(served: Served) -> None:
    async with served.visit() as watched:
        page = watched.page
        await fill(page, kernel_size=4)
        await page.click("#run")
        await expect(page.locator("#kernel_size-a-error")).to_contain_text("must be odd")
        assert await page.get_attribute("#kernel_size-a", "aria-invalid") == "true"
        await expect(page.locator("#kernel_size-a")).to_be_focused()
        await page.fill("#kernel_size-a", "3")
        await expect(page.locator("#kernel_size-a-error")).to_be_hidden()
        await page.fill("#window_size-a", "1.5")
        await page.fill("#max_new_tokens", "2.5")
        await page.click("#run")
        for name in ("window_size-a", "max_new_tokens"):
            await expect(page.locator(f"#{name}-error")).to_have_text("must be an integer")
        assert served.engine.requests == []


async def test_a_prompt_that_is_refused_is_told_beside_it(served: Served) -> None:
    async with served.visit() as watched:
        page = watched.page
        await fill(page, "w " * 2_047)
        await page.fill("#max_new_tokens", "100")
        await page.click("#run")
        await expect(page.locator("#prompt-error")).to_contain_text("2047 tokens and 100 more")


async def test_a_key_is_asked_for_and_stays_out_of_sight(browser: Browser) -> None:
    async with serving_fake(browser, api_keys=[KEY]) as served, served.visit() as watched:
        page = watched.page
        await expect(page.locator("#key-error")).to_contain_text("API key is needed")
        await expect(page.locator("#key")).to_be_focused()
        await page.keyboard.type(WRONG)
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_contain_text("Refused: a known API key")
        await page.fill("#key", KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#server")).to_contain_text("fake")
        await fill(page)
        await run(page)
        await page.fill("#key", WRONG)
        await page.click("#run")
        await expect(page.locator("#key-error")).to_contain_text("Refused: a known API key")
        await expect(page.locator(".panel-state").first).to_have_text("Not run")
        assert len(served.engine.requests) == 1
        assert not any(key in url for key in (KEY, WRONG) for url in watched.requests)
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0


async def test_html_in_a_prompt_stays_text(served: Served) -> None:
    prompt = '<img src=x onerror="window.hit=1"> <b>bold</b> <script>window.hit=1</script> &amp;'
    async with served.visit() as watched:
        page = watched.page
        await fill(page, prompt)
        await run(page)
        assert await page.text_content(".kept-text") == prompt
        assert prompt.split()[0] in (await page.text_content(".answer") or "")
        assert await page.locator("#results :is(img, b, script)").count() == 0
        assert await page.evaluate("window.hit") is None
        assert watched.complaints == []


async def test_stop_and_escape_abort_on_the_server(served: Served) -> None:
    served.engine.behaviour.delay_s = 0.05
    async with served.visit() as watched:
        page = watched.page
        await fill(page)
        for stop in ("button", "key"):
            served.engine.aborted.clear()
            await page.click("#run")
            await expect(page.locator(".answer")).to_contain_text("word1")
            await (page.click("#stop") if stop == "button" else page.keyboard.press("Escape"))
            await expect(page.locator(".panel-state").first).to_have_text("Stopped")
            await until(lambda: served.engine.aborted)


async def test_it_waits_for_the_model(browser: Browser) -> None:
    """Errors that will pass are told, and asked about again."""
    async with serving_fake(browser) as served:
        loading: list[int] = []

        async with opened(browser, "about:blank") as watched:
            page = watched.page

            async def answer(route: Any) -> None:
                loading.append(1)
                if len(loading) > 1:
                    await route.continue_()
                    return
                error = {"code": "engine_loading", "message": "the model is still loading"}
                await route.fulfill(status=503, json={"error": error}, headers={"Retry-After": "5"})

            await page.route("**/playground.json", answer)
            await page.goto(f"{served.url}/")
            await expect(page.locator("#notice")).to_have_text(
                "the model is still loading (try again in 5 s)"
            )
            await expect(page.locator("#server")).to_contain_text("fake")
            await expect(page.locator("#notice")).to_be_hidden()


async def test_a_full_queue_a_failure_and_a_dead_network_are_told(served: Served) -> None:
    behaviour = served.engine.behaviour
    async with served.visit() as watched:
        page = watched.page
        error = page.locator(".panel-error").first
        await fill(page)
        behaviour.queue_full = True
        await page.click("#run")
        await expect(error).to_contain_text("64 requests are waiting already; try again later")
        await expect(error).to_contain_text("(try again in 3 s)")
        behaviour.queue_full, behaviour.fail_after = False, 3
        await page.click("#run")
        await expect(error).to_contain_text("the model failed while generating")
        await expect(page.locator(".answer").first).to_contain_text("word2")
        behaviour.fail_after = None
        await page.context.set_offline(True)
        await page.click("#run")
        await expect(error).to_contain_text("The server cannot be reached")
        await page.context.set_offline(False)
        await run(page)
        await expect(error).to_be_hidden()
