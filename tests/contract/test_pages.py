"""Pages and headers: nothing from other machines, nothing for other sites, no key anywhere."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, Request, async_playwright

from app.api.pages import folder_of
from app.main import create_admin_app, create_app
from tests.support.app_client import fake_service, listening, running, settings_for_tests
from tests.support.fake_engine import FakeEngine
from tests.support.tools import require_tool

KEY = "key-of-team-a-0123"
BODY = {"prompt": "a b", "max_new_tokens": 2}
FILES = sorted(path.name for path in folder_of("docs").iterdir())


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with a key."""
    async with fake_service(engine, api_keys=[KEY]) as client:
        yield client


async def test_the_page_carries_a_policy_without_anything_inline(
    guarded: httpx.AsyncClient,
) -> None:
    answer = await guarded.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", FILES)
async def test_what_a_page_is_made_of_needs_no_key_and_names_no_other_machine(
    guarded: httpx.AsyncClient, name: str
) -> None:
    answer = await guarded.get(f"/docs/{name}")
    assert answer.status_code == 200
    assert not re.search(r"https?:|//[a-z]|\bon[a-z]+=|style=|innerHTML|eval\(", answer.text)
    assert KEY not in answer.text
    assert (await guarded.head(f"/docs/{name}")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/docs/", "/docs/no.js", "/docs/../docs.py", "/docs/%2e%2e/%2e%2e/main.py", "/redoc"]
)
async def test_nothing_else_is_served_as_a_file(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_every_answer_is_taken_for_what_it_says_it_is(guarded: httpx.AsyncClient) -> None:
    bearer = {"Authorization": f"Bearer {KEY}"}
    answers = [
        await guarded.post("/generate", json=BODY, headers=bearer),
        await guarded.post("/generate", json={**BODY, "stream": True}, headers=bearer),
        await guarded.post("/generate", json=BODY),
        await guarded.post("/generate", content=b"{", headers=bearer),
        await guarded.get("/v1/models", headers=bearer),
        await guarded.get("/none", headers=bearer),
        await guarded.get("/health/ready"),
        await guarded.get("/metrics"),
        await guarded.get("/openapi.json"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 415, 200, 404, *[200] * 3]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "content-security-policy" not in answer.headers
    for path in ("/docs", "/docs/docs.js", "/docs/docs.css"):
        assert (await guarded.get(path)).headers["x-content-type-options"] == "nosniff"


async def test_a_fault_of_the_server_has_the_headers_as_well(engine: FakeEngine) -> None:
    engine.behaviour.crash_on_submit = True
    async with fake_service(engine) as client:
        answer = await client.post("/generate", json=BODY)
    assert answer.status_code == 500
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_second_port_has_the_headers_as_well(engine: FakeEngine) -> None:
    app = create_app(settings_for_tests(admin_port=0), engine)
    admin = httpx.ASGITransport(create_admin_app(app.state.parts))
    async with running(app), httpx.AsyncClient(transport=admin, base_url="http://admin") as client:
        assert (await client.get("/metrics")).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/models", "/docs"])
async def test_other_sites_get_no_leave_to_ask(engine: FakeEngine, path: str) -> None:
    """Neither before a request nor with its answer, with and without keys."""
    origin = {"Origin": "https://elsewhere.example"}
    asks = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    for keys in ([], [KEY]):
        async with fake_service(engine, api_keys=keys) as client:
            preflight = await client.options(path, headers=asks)
            answers = [
                preflight,
                await client.get(path, headers=origin),
                await client.post(path, json=BODY, headers=origin),
            ]
        assert preflight.status_code in (401, 405)
        for answer in answers:
            allowed = [name for name in answer.headers if name.startswith("access-control-")]
            assert allowed == []


# ---------------------------------------------------------------------- in a browser


async def opened(page: Page, url: str) -> list[str]:
    """Open the page; returns the list that complaints and foreign addresses are added to."""
    problems: list[str] = []

    def note_foreign(sent: Request) -> None:
        if not sent.url.startswith((url, "data:")):
            problems.append(sent.url)

    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", note_foreign)
    await page.goto(f"{url}/docs")
    await page.wait_for_selector(".operation")
    return problems


@pytest.mark.slow
async def test_a_reader_finds_every_operation_with_the_keyboard(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """In a real browser that enforces the policy, where keys are asked for."""
    executable = require_tool("chromium", "CHROMIUM")
    app = create_app(settings_for_tests(api_keys=[KEY]), engine)
    async with listening(app) as url, async_playwright() as playwright:
        async with httpx.AsyncClient() as client:
            openapi = (await client.get(f"{url}/openapi.json")).json()
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=executable, args=flags)
        page = await browser.new_page(color_scheme="dark", viewport={"width": 390, "height": 800})
        page.set_default_timeout(60_000)
        problems = await opened(page, url)

        expected = {
            f"{method.upper()} {path}" for path, item in openapi["paths"].items() for method in item
        }
        assert set(await page.locator("#contents a").all_inner_texts()) == expected
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(17, 22, 27)"
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390

        # Skip link, link, box, button, then the first operation.
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.locator("#filter").focus()
        await page.keyboard.type("generate")
        assert await page.locator(".operation:visible").count() == 1
        await page.locator(".operation:visible summary").focus()
        await page.keyboard.press("Enter")
        shown = await page.locator(".operation:visible").inner_text()
        body = openapi["components"]["schemas"]["GenerateRequest"]["properties"]
        for field in body:
            assert field in shown
        assert "messages[].role" in shown
        assert "kv_cache.compression_ratio" in shown
        assert all(status in shown for status in openapi["paths"]["/generate"]["post"]["responses"])
        await page.screenshot(path=tmp_path / "docs.png", full_page=True)

        await page.goto(f"{url}/docs#get-health-ready")
        await page.reload()
        await page.wait_for_selector("#get-health-ready[open]")
        assert problems == []
        await browser.close()
