"""What an engine computed on the way to its answers: the logits each token was chosen from."""

from collections import defaultdict
from collections.abc import Sequence as SequenceOf

import pytest
import torch
from torch import Tensor

from snapkv_core import Engine
from snapkv_core.engine.model_runner import Sampled
from snapkv_core.sequence import Sequence

#: Request and choice.
Answer = tuple[str, int]


def record_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[Answer, list[Tensor]]:
    """Keep the logits of every token that an engine chooses from now on, by answer."""
    runner = engine.parts.runner
    recorded: dict[Answer, list[Tensor]] = defaultdict(list)
    honest = runner.sample

    def sample(logits: Tensor, sequences: SequenceOf[Sequence], sampled: Sampled) -> None:
        for row, sequence in zip(logits, sequences, strict=True):
            recorded[sequence.request_id, sequence.choice_index].append(row.clone())
        honest(logits, sequences, sampled)

    monkeypatch.setattr(runner, "sample", sample)
    return recorded


def differing_answers(
    found: dict[Answer, list[Tensor]], expected: dict[Answer, list[Tensor]]
) -> dict[Answer, int]:
    """Return the first token of each answer whose logits differ in any bit."""
    assert found.keys() == expected.keys()
    differing = {}
    for answer, rows in expected.items():
        assert len(found[answer]) == len(rows), answer
        equal = [torch.equal(*pair) for pair in zip(found[answer], rows, strict=True)]
        if not all(equal):
            differing[answer] = equal.index(False)
    return differing
