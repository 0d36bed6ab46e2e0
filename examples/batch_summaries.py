"""Sums up every section of a text with `snapkv batch`.

Run it with `python examples/batch_summaries.py [URL]`, where URL is the service's address. Without
`--url`, `snapkv batch` would load the model itself.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

DOCUMENT = Path(__file__).with_name("handbook.txt")
TASK = "Summarise the text above in one short sentence, with its number."


def write_requests(path: Path, sections: dict[str, str]) -> None:
    """Write one request for each section, in the format of OpenAI's batches."""
    with path.open("w", encoding="utf-8") as file:
        for title, text in sections.items():
            request = {
                "custom_id": title,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "demo",
                    # What is wanted stands at the end, because that decides what is kept.
                    "messages": [{"role": "user", "content": f"{title}\n\n{text}\n\n{TASK}"}],
                    "max_tokens": 32,
                    "temperature": 0,
                    "max_capacity_prompt": 112,
                },
            }
            file.write(json.dumps(request) + "\n")


def main(url: str) -> None:
    """Write the requests, run the batch, and print each summary and what was kept."""
    parts = DOCUMENT.read_text(encoding="utf-8").strip().split("\n\n")
    with tempfile.TemporaryDirectory() as folder:
        requests, results = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        write_requests(requests, dict(zip(parts[::2], parts[1::2], strict=True)))
        subprocess.run(["snapkv", "batch", str(requests), str(results), "--url", url], check=True)
        for line in results.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            answer = result["response"]["body"]
            ratio = answer["kv_cache"]["compression_ratio"]
            print(f"{result['custom_id']}: {answer['choices'][0]['message']['content'].strip()}")
            print(f"    compression_ratio {ratio:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
