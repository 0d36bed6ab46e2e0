"""The page about OpenAI's fields says of every field what the service does with it."""

import pytest

from tests.support.compatibility import PAGE, PROBES, client_fields, compatibility_page


@pytest.mark.parametrize("path", sorted(PROBES))
def test_every_field_of_openais_client_is_asked_for(path: str) -> None:
    assert set(PROBES[path]) == client_fields(path)


async def test_the_page_is_what_the_service_does() -> None:
    """`python -m tests.support.compatibility > docs/openai-compatibility.md` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == await compatibility_page()
