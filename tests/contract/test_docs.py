"""The documentation does what it says: examples run as printed, links lead somewhere.

Every `bash` and `python` block runs against a real server on the demo model, in the order of the
page. A `json` block is the output of the block above it (`<!-- docs: output -->`: same keys, same
kinds of value) or a body to send (`<!-- docs: post /generate 422 -->`). What cannot run here says
why: `<!-- docs: skip, reason -->`. The comment stands on the line above the fence.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.settings import Settings, env_name
from tests.support.markdown import ROOT, Block, blocks_of, pages, prose_of, shape
from tests.support.served import example_environment, serving

RUNNABLE = ("bash", "python")
DATA = ("json", "text", "toml", "mermaid", "makefile", "dockerfile", "hcl", "yaml")
DIRECTIVES = re.compile(r"skip, .{10,}|output|post /\S* [1-5]\d\d")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@dataclass(frozen=True, slots=True)
class Running:
    """What examples need: the server's address and their environment."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve the demo model for all examples."""
    folder = tmp_path_factory.mktemp("docs")
    environment = example_environment(folder)
    with serving(environment, folder / "server.log") as address:
        yield Running(address, environment)


def examples() -> list[tuple[Block, Block | None]]:
    """Pair each block that does something with the output printed below it, if any."""
    pairs: list[tuple[Block, Block | None]] = []
    for block in BLOCKS:
        if block.directive == "output" and pairs:
            pairs[-1] = (pairs[-1][0], block)
        elif is_example(block):
            pairs.append((block, None))
    return pairs


def is_example(block: Block) -> bool:
    """Tell whether a block is run or sent."""
    runs = block.language in RUNNABLE and not block.directive.startswith("skip")
    return runs or block.directive.startswith("post ")


def run(block: Block, running: Running) -> str:
    """Run a block as a reader would, from the root of the repository; return what it printed."""
    text = block.text.replace("127.0.0.1:8000", running.address)
    interpreter = {"bash": ["bash", "-euo", "pipefail"], "python": [sys.executable]}
    done = subprocess.run(
        [*interpreter[block.language], "-c", text],
        cwd=ROOT,
        env=running.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def send(block: Block, running: Running) -> str:
    """Post a block's body to the path of its directive; return the answer."""
    _, path, status = block.directive.split()
    headers = {"Content-Type": "application/json"}
    url = f"http://{running.address}{path}"
    answer = httpx.post(url, content=block.text, headers=headers, timeout=240)
    assert answer.status_code == int(status), f"{block.name}\n{answer.text}"
    return answer.text


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.parametrize(
    ("block", "printed"), [pytest.param(*pair, id=pair[0].name) for pair in examples()]
)
def test_example_runs_and_prints_what_the_page_shows(
    block: Block, printed: Block | None, running: Running
) -> None:
    """A reader who copies an example gets an answer, in the form the page shows."""
    output = send(block, running) if block.directive.startswith("post ") else run(block, running)
    if printed is not None and printed.language == "json":
        assert shape(json.loads(output)) == shape(json.loads(printed.text)), printed.name


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in BLOCKS])
def test_block_says_how_it_is_checked(block: Block) -> None:
    """No example escapes by an unknown language or directive, and skipping takes a reason."""
    assert block.language in (*RUNNABLE, *DATA), f"{block.name}: language {block.language!r}"
    assert not block.directive or DIRECTIVES.fullmatch(block.directive), block.directive
    if block.language == "json":
        assert block.directive, f"{block.name}: say what the JSON is: output, post or skip"
        json.loads(block.text)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_relative_links_lead_to_files(page: Path) -> None:
    """A link within the repository names a file that exists."""
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(prose_of(page))]
    local = [target for target in targets if target and "://" not in target]
    broken = [target for target in local if not (page.parent / target).exists()]
    assert not broken, f"{page.name}: {broken}"


def test_make_targets_in_prose_exist() -> None:
    """Every `make something` that a page names is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`make ([a-z]+)`", page.read_text(encoding="utf-8"))
    }
    assert named <= targets


def test_env_example_names_every_setting() -> None:
    """The example of a `.env` file lists each setting once and no other."""
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    named = re.findall(r"^#?(SNAPKV_\w+)=", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(env_name(field) for field in Settings.model_fields)
