"""`GET /`: a page on which prompts can be tried out and the compression be seen.

The page itself asks the API for everything that is not in its files.
"""

from app.api.dependencies import Caller, Parts
from app.api.pages import page_router
from app.api.schemas.playground import PlaygroundConfig, playground_config

router = page_router("playground", "/")


@router.get("/playground.json")
async def config(parts: Parts, caller: Caller) -> PlaygroundConfig:
    """Answer with what the server takes; 503 while the model loads."""
    del caller  # the page learns here whether it needs a key
    return playground_config(parts.engine_host.engine(), parts.generation.default_compression)
