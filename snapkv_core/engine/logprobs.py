"""Log-probabilities of tokens, from a model's logits."""

from torch import Tensor

from snapkv_core.engine.step_plan import RawLogprobs


def raw_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[RawLogprobs]:
    """Return what a model thought of some tokens.

    Args:
        logits: `[num_tokens, vocab_size]`, float32, of the positions before them.
        token_ids: `[num_tokens]`.
        num_top: How many of the likeliest tokens are named for each.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_top, logits.shape[1]))
    return [
        RawLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids.tolist(), chosen, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
