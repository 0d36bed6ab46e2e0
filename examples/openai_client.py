"""Talks to the service with OpenAI's own client, whole and as a stream.

Run it with `python examples/openai_client.py [URL]`, where URL is the service's address.
"""

import sys
from pathlib import Path

from openai import OpenAI

DOCUMENT = Path(__file__).with_name("handbook.txt")
#: What OpenAI's API does not have goes into `extra_body`.
KNOBS = {"max_capacity_prompt": 128, "window_size": 16, "kernel_size": 15, "pooling": "max"}


def main(url: str) -> None:
    """Ask twice and print both answers and what was kept."""
    sections = DOCUMENT.read_text(encoding="utf-8").split("\n\n")
    key_box = sections[sections.index("Key box") + 1]
    # The client insists on a key; it matters where the service asks for one.
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{key_box}\n\nWhat is the code of the key box?"}],
        max_tokens=24,
        temperature=0,
        extra_body=KNOBS,
    )
    print("Answer:", answer.choices[0].message.content)
    print("kv_cache:", (answer.model_extra or {})["kv_cache"])

    stream = client.completions.create(
        model=model,
        prompt=f"{key_box}\n\nQuestion: What is the code?\nAnswer: The code is",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=KNOBS,
    )
    print("Stream: The code is", end="")
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text.rstrip("\n"), end="", flush=True)
        if chunk.usage is not None:  # the last chunk
            print(f"\n{chunk.usage.prompt_tokens} tokens read")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
