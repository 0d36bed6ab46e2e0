"""Generates on a running server, over its streaming endpoint."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
from pydantic import ValidationError
from rich.console import Console

from app.api.schemas.generate import GenerateResponse
from snapkv_core import GenerationFailedError, SnapKVError

#: Reading a long prompt takes minutes, and the server sends a comment every 15 s meanwhile.
_TIMEOUT: Final = httpx.Timeout(10.0, read=60.0)
_DATA: Final = "data: "


def generate_there(
    url: str, fields: Mapping[str, Any], console: Console, api_key: str | None = None
) -> GenerateResponse:
    """Ask a server, with a key if it wants one, and show how many pieces have come.

    Raises:
        GenerationFailedError: The server refused or failed the request, or cannot be reached.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with (
            httpx.Client(base_url=url, timeout=_TIMEOUT, headers=headers) as client,
            client.stream("POST", "/generate", json={**fields, "stream": True}) as response,
            console.status("waiting for the first token") as status,
        ):
            if response.status_code != httpx.codes.OK:
                raise GenerationFailedError(_refusal(response))
            pieces: list[str] = []
            for event in _events(response):
                if "error" in event:
                    raise GenerationFailedError(str(event["error"]["message"]))
                pieces.append(event["text"])
                if "usage" in event:
                    return GenerateResponse(**{**event, "text": "".join(pieces)})
                status.update(f"{len(pieces)} pieces of the answer")
    except (json.JSONDecodeError, ValidationError):
        raise SnapKVError(f"{url} does not answer as this service does") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        # ValueError: proxy settings and host names that cannot be encoded.
        raise GenerationFailedError(f"{url}: {str(error) or type(error).__name__}") from None
    except (KeyError, TypeError, RecursionError) as error:
        raise SnapKVError(f"{url} does not answer as this service does ({error!r:.100})") from None
    raise GenerationFailedError(f"{url}: the answer ended before its last event")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(_DATA) and line != "data: [DONE]":
            yield json.loads(line.removeprefix(_DATA))


def _refusal(response: httpx.Response) -> str:
    response.read()
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
