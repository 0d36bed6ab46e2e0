"""Changes a model's logits as a request asks, before a token is chosen from them."""

from collections import Counter

import torch
from torch import Tensor

from snapkv_core.sequence import Sequence


def shaped(logits: Tensor, sequence: Sequence) -> Tensor:
    """Return logits with a sequence's bias, penalties and constraint.

    It depends on the sequence's tokens only, so an answer can be continued elsewhere. Penalties
    count the tokens of the answer, not those of the prompt.

    Args:
        logits: `[vocab_size]`, float32; not written to.
        sequence: Whose next token will be chosen.

    Raises:
        InvalidParameterError: The constraint allows no token.

    Source: the formula of OpenAI's API reference for presence and frequency penalty.
    """
    sampling = sequence.sampling
    if not sampling.changes_logits and sequence.constraint is None:
        return logits
    changed = logits.clone()
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        changed[torch.tensor(ids, device=logits.device)] += torch.tensor(
            biases, dtype=logits.dtype, device=logits.device
        )
    if sequence.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(sequence.output_ids)
        taken = [
            sampling.presence_penalty + sampling.frequency_penalty * count
            for count in counts.values()
        ]
        changed[torch.tensor(list(counts), device=logits.device)] -= torch.tensor(
            taken, dtype=logits.dtype, device=logits.device
        )
    if sequence.constraint is not None:
        allowed = torch.frombuffer(bytearray(sequence.constraint.allowed()), dtype=torch.bool)
        is_allowed = torch.zeros(len(logits), dtype=torch.bool)
        size = min(len(allowed), len(logits))  # masks come in whole words
        is_allowed[:size] = allowed[:size]
        changed.masked_fill_(~is_allowed.to(logits.device), -torch.inf)
    return changed
