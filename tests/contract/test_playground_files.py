"""The playground's files, what its page learns of the server, and how it is switched off."""

import re
from typing import Any

import httpx
import pytest

from app.api.pages import folder_of
from tests.support.app_client import fake_service
from tests.support.fake_engine import FakeEngine

FOLDER = folder_of("playground")
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*"))


async def test_the_page_and_its_files_are_served(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    assert page.text == (FOLDER / "index.html").read_text(encoding="utf-8")
    kinds = {"js": "javascript", "css": "text/css", "svg": "image/svg", "txt": "text/plain"}
    for name in FILES:
        answer = await client.get(f"/playground/{name}")
        assert answer.content == (FOLDER / name).read_bytes()
        assert kinds.get(name.rpartition(".")[2], "html") in answer.headers["content-type"]
    again = await client.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, (await client.head("/")).status_code) == (304, 200)


@pytest.mark.parametrize(
    "path", ["../api/errors.py", "%2e%2e/%2e%2e/settings.py", "", "nothing.js", "samples"]
)
async def test_nothing_else_is(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(f"/playground/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_nothing_in_the_files_needs_another_host_or_a_looser_policy() -> None:
    """No address of another host, and no script or style written into the page."""
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not hosts, name
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
            assert not re.search(r"\beval\(|new Function|setAttribute\(\"style\"", text)


async def test_it_can_be_switched_off(engine: FakeEngine) -> None:
    async with fake_service(engine, playground=False) as client:
        for path in ("/", "/playground/main.js", "/playground.json"):
            assert (await client.get(path)).status_code == 404


async def test_it_learns_what_the_server_takes_by_default(engine: FakeEngine) -> None:
    async with fake_service(engine, max_capacity_prompt=77, pooling="avg") as client:
        config = (await client.get("/playground.json")).json()
    assert (config["model"], config["max_model_len"]) == ("fake", 2_048)
    assert config["knobs"]["max_capacity_prompt"]["default"] == 77
    assert config["knobs"]["pooling"] == {"choices": ["avg", "max"], "default": "avg"}
    assert config["sampling"]["max_new_tokens"]["maximum"] == 4_096


async def test_the_ends_of_each_range_are_those_that_generate_draws(
    client: httpx.AsyncClient,
) -> None:
    """The ends are taken, and what lies beyond is refused by name."""
    config = (await client.get("/playground.json")).json()
    # A window of one leaves every capacity possible, and the widest one every window.
    wide = {"window_size": 1, "kernel_size": 1, "max_capacity_prompt": 1_048_576}

    async def refused(name: str, value: float) -> str | None:
        number = int(value) if float(value).is_integer() else value
        body: dict[str, Any] = {"prompt": "a", "max_new_tokens": 1, **wide, name: number}
        answer = await client.post("/generate", json=body)
        error = answer.json().get("error", {})
        # That the prompt and the answer fit as well is no matter of the range.
        is_range = answer.status_code == 422
        return error["param"] if is_range else None

    for name, span in {**config["knobs"], **config["sampling"]}.items():
        if "choices" in span:
            continue
        step = 2 if name == "kernel_size" else 1
        assert await refused(name, span["minimum"]) is None, name
        assert await refused(name, span["maximum"]) is None, name
        assert await refused(name, span["minimum"] - step) == name
        assert await refused(name, span["maximum"] + step) == name
