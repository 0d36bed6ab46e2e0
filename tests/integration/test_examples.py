"""Every example of `examples/` finds the fact that is planted in its text."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.markdown import ROOT
from tests.support.served import example_environment, serving
from tests.support.tools import require_tool

EXAMPLES = ROOT / "examples"
KEY_BOX, RADIO = "48213", "31774"
#: What each must print.
FACTS = {
    "batch_summaries.py": [rf"Key box: .*\b{KEY_BOX}\b", rf"Radio: .*\b{RADIO}\b"],
    "curl.sh": [rf'"content":"[^"]*\b{KEY_BOX}\b', r"data: \[DONE\]"],
    "langchain_client.py": [rf"Chat: .*\b{RADIO}\b", rf"Completion: .*\b{RADIO}\b"],
    "library.py": [rf"Answer: {KEY_BOX}\b"],
    "long_document_qa.py": [rf"Answer: {KEY_BOX}\b"],
    "openai_client.py": [rf"Answer: .*\b{KEY_BOX}\b", rf"Stream: .*\b{KEY_BOX}\b"],
    "rag.py": [rf"Answer: .*\b{RADIO}\b"],
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a reader."""
    return example_environment(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def url(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model for all examples."""
    with serving(environment, tmp_path_factory.mktemp("served") / "server.log") as address:
        yield f"http://{address}"


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FACTS)
def test_example_prints_the_planted_fact_and_what_was_kept(
    name: str, url: str, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    if name.endswith(".sh"):
        require_tool("curl")
        command = ["sh", str(EXAMPLES / name)]
    done = subprocess.run(
        command if name == "library.py" else [*command, url],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for pattern in FACTS[name]:
        assert re.search(pattern, done.stdout), f"{pattern}\n{done.stdout}"
    ratios = re.findall(r"compression_ratio\D{1,4}(\d+\.\d+)", done.stdout)
    assert max(map(float, ratios)) > 1.0, done.stdout


def test_each_example_is_run_listed_and_short() -> None:
    """None escapes the test above or the table, and none outgrows a screen or two."""
    programs = {path.name: path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert set(programs) == set(FACTS)
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name, path in programs.items():
        text = path.read_text(encoding="utf-8")
        assert f"| [{name}]({name}) |" in table
        assert text.count("\n") <= 80
        if path.suffix == ".py":
            assert f"examples/{name}" in (ast.get_docstring(ast.parse(text)) or "")
