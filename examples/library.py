"""Compresses the KV cache of a transformers model in this process, without the service.

Run it with `python examples/library.py [MODEL]`, where MODEL is a folder or the id of a model on
the hub; without it the small demo model is taken.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapkv_core import (
    CompressionConfig,
    Engine,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
    ensure_demo_model,
)

DOCUMENT = Path(__file__).with_name("handbook.txt")
QUESTION = "Question: What is the code of the key box?\nAnswer: The code of the key box is"


def main(name: str) -> None:
    """Load the model, ask about the document, and print the answer and what was kept."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    engine = Engine.from_transformers(model, tokenizer, EngineConfig(model=name))
    output = engine.generate(
        GenerationRequest(
            "example",
            prompt=f"{DOCUMENT.read_text(encoding='utf-8')}\n{QUESTION}",
            sampling=SamplingParams(max_new_tokens=12, stop=("\n",)),
            compression=CompressionConfig(
                max_capacity_prompt=128, window_size=16, kernel_size=15, pooling="max"
            ),
        )
    )
    report = output.summary.compression
    assert report is not None, "the prompt was read"
    print("Answer:", output.texts[0].strip())
    print(f"KV cache: {report.original_entries} -> {report.compressed_entries:.0f} tokens")
    print(f"compression_ratio {report.compression_ratio:.1f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model("~/.cache/snapkv")))
