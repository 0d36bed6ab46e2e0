"""Uses the service from LangChain, which only needs its address as the base URL.

Run it with `python examples/langchain_client.py [URL]`, where URL is the service's address.
"""

import sys
from pathlib import Path

import httpx
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

DOCUMENT = Path(__file__).with_name("handbook.txt")
KNOBS = {"max_capacity_prompt": 128, "window_size": 16, "kernel_size": 15, "pooling": "max"}


def show_kv_cache(response: httpx.Response) -> None:
    """Print what LangChain does not hand on."""
    response.read()
    print("kv_cache:", response.json()["kv_cache"])


def main(url: str) -> None:
    """Ask as a chat and as a completion, and print the answers and what was kept."""
    sections = DOCUMENT.read_text(encoding="utf-8").split("\n\n")
    radio = sections[sections.index("Radio") + 1]
    with httpx.Client(event_hooks={"response": [show_kv_cache]}, timeout=600) as http_client:
        chat = ChatOpenAI(
            base_url=f"{url}/v1",
            api_key=SecretStr("none"),  # a key, where the service asks for one
            model="demo",
            temperature=0,
            max_completion_tokens=24,
            extra_body=KNOBS,
            http_client=http_client,
        )
        print("Chat:", chat.invoke(f"{radio}\n\nWhat is the emergency channel?").content)

        completion = OpenAI(
            base_url=f"{url}/v1",
            api_key=SecretStr("none"),
            model="demo",
            temperature=0,
            max_tokens=8,
            extra_body=KNOBS,
            http_client=http_client,
        )
        text = completion.invoke(f"{radio}\n\nQuestion: Which channel?\nAnswer: The channel is")
        print("Completion: The channel is", text.strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
