"""Asks a question about a long document, and keeps a seventh of the document's KV cache.

Run it with `python examples/long_document_qa.py [URL]`, where URL is the service's address.
"""

import sys
from pathlib import Path

import httpx

DOCUMENT = Path(__file__).with_name("handbook.txt")
QUESTION = "Question: What is the code of the key box?\nAnswer: The code of the key box is"


def main(url: str) -> None:
    """Send the document with the question, and print the answer and what was kept."""
    body = {
        # The question stands at the end, because the end of the prompt decides what is kept.
        "prompt": f"{DOCUMENT.read_text(encoding='utf-8')}\n{QUESTION}",
        "max_new_tokens": 12,
        "stop": ["\n"],
        "max_capacity_prompt": 128,  # prompt tokens that stay in the cache
        "window_size": 16,  # so many at the end score the others
        "kernel_size": 15,  # a small model needs wide pooling
        "pooling": "max",
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=600)
    response.raise_for_status()
    answer = response.json()
    kv_cache = answer["kv_cache"]
    print("Answer:", answer["text"].strip())
    print(
        f"KV cache: {kv_cache['original_entries']} -> {kv_cache['compressed_entries']:.0f} tokens, "
        f"compression_ratio {kv_cache['compression_ratio']:.1f}, "
        f"{kv_cache['kept_attention_mass']:.0%} of the attention kept"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
