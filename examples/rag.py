"""Finds the passages that fit a question, and lets the model answer from them.

Run it with `python examples/rag.py [URL]`, where URL is the service's address. The search is
plain BM25 over the sections of one text; a real corpus wants a search engine.
"""

import math
import re
import sys
from collections import Counter
from pathlib import Path

import httpx

CORPUS = Path(__file__).with_name("handbook.txt")
QUESTION = "On which channel does the radio listen in an emergency?"


def words_of(text: str) -> list[str]:
    """Split a text into its words in small letters."""
    return re.findall(r"[a-z0-9]+", text.lower())


def search(question: str, passages: list[str], num_results: int) -> list[str]:
    """Return the passages that fit best, the best one last: next to the question."""
    counts = [Counter(words_of(passage)) for passage in passages]
    mean_length = sum(map(Counter.total, counts)) / len(counts)

    def score(count: Counter[str]) -> float:
        total = 0.0
        for word in set(words_of(question)):
            num_with = sum(word in other for other in counts)
            rarity = math.log(1 + (len(counts) - num_with + 0.5) / (num_with + 0.5))
            length = 0.25 + 0.75 * count.total() / mean_length
            total += rarity * 2.2 * count[word] / (count[word] + 1.2 * length)
        return total

    ranked = sorted(range(len(passages)), key=lambda index: score(counts[index]))
    return [passages[index] for index in ranked[-num_results:]]


def main(url: str) -> None:
    """Search, ask, and print the answer and what was kept."""
    titles_and_texts = CORPUS.read_text(encoding="utf-8").split("\n\n")
    passages = [
        f"{title.strip()}\n{text.strip()}"
        for title, text in zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True)
    ]
    found = "\n\n".join(search(QUESTION, passages, num_results=3))
    body = {
        "model": "demo",
        "prompt": f"{found}\n\nQuestion: {QUESTION}\nAnswer: The emergency channel is",
        "max_tokens": 12,
        "temperature": 0,
        "stop": ["\n"],
        "profile": "rag",  # a named set of knobs
        "max_capacity_prompt": 128,  # a knob beside it wins
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    answer = response.json()
    print("Answer: The emergency channel is" + answer["choices"][0]["text"])
    print("kv_cache:", answer["kv_cache"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
