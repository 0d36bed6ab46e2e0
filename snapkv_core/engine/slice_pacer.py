"""How much prefill work fits a step, from what earlier steps took; it reads no clock itself."""

from typing import Final

#: Weight of one full step in a running estimate: old steps fade within about ten new ones.
_WEIGHT: Final = 0.25
#: One observation counts as at most this many times the estimate, or as little as its inverse,
#: so that a stall of the machine does not halve the slices of the next seconds.
_MAX_RATIO: Final = 4.0


class SlicePacer:
    """Estimates the speed of prefill and the time of a decode step, and budgets from them.

    Work is counted in FLOPs, since a token late in a long prompt costs far more than an early
    one: its attention spans everything before it. Budgets change when a token comes, never which
    token it is. Only the engine thread calls it, but for `slice_flops` and `expected_s`.
    """

    def __init__(
        self,
        *,
        linear_flops_per_token: float,
        attention_flops_per_pair: float,
        target_s: float,
        initial_flops_per_s: float,
    ) -> None:
        """Start from a guess.

        Args:
            linear_flops_per_token: Work of one layer's projections for one token.
            attention_flops_per_pair: Work of one layer's attention for one query and one key.
            target_s: Seconds within which running sequences should get their next token.
            initial_flops_per_s: Guessed speed of prefill; the first steps correct it.
        """
        self._linear_flops_per_token = linear_flops_per_token
        self._attention_flops_per_pair = attention_flops_per_pair
        self._target_s = target_s
        self._flops_per_s = initial_flops_per_s
        self._decode_s: float | None = None

    def slice_flops(self, token_start: int, token_end: int) -> float:
        """Return the work of tokens `[token_start, token_end)` in one layer, in FLOPs.

        The token at position p attends to p + 1 tokens, itself included, so the pairs of the
        slice are the difference of two triangular numbers.
        """
        num_pairs = (token_end * (token_end + 1) - token_start * (token_start + 1)) // 2
        return (
            self._linear_flops_per_token * (token_end - token_start)
            + self._attention_flops_per_pair * num_pairs
        )

    def expected_s(self, num_tokens: int, num_layers: int) -> float:
        """Return the seconds that reading a prompt should take when nothing else runs.

        Any thread may call it.
        """
        return num_layers * self.slice_flops(0, num_tokens) / self._flops_per_s

    def observe(self, flops: float, seconds: float) -> None:
        """Learn from the prefill slices of one step; a time or work of nothing is ignored."""
        if not (flops > 0.0 and seconds > 0.0):
            return
        # Launching a few small layers costs more time than their work explains, so a step counts
        # by how full it was: in time, or in work when the estimate is far too low.
        fullness = max(seconds / self._target_s, flops / (self._flops_per_s * self._target_s))
        weight = _WEIGHT * min(1.0, fullness)
        self._flops_per_s = _moved(self._flops_per_s, flops / seconds, weight)

    def observe_decode(self, seconds: float) -> None:
        """Learn from one decode step; a time of nothing is ignored."""
        if not seconds > 0.0:
            return
        before = seconds if self._decode_s is None else self._decode_s
        self._decode_s = _moved(before, seconds, _WEIGHT)

    def budget_flops(self, has_decode: bool) -> float:
        """Return the prefill work that fits the next step, in FLOPs.

        Args:
            has_decode: Whether sequences decode in that step, which takes its time as well.
        """
        # Without decoding the target still holds: arrivals and aborts wait for the step to end.
        left_s = self._target_s
        if has_decode and self._decode_s is not None:
            # Prompts must end as well: a decode step that leaves little of the target leaves
            # prefill as much time as it takes itself.
            left_s = max(left_s - self._decode_s, min(self._decode_s, self._target_s))
        return self._flops_per_s * left_s


def _moved(estimate: float, observed: float, weight: float) -> float:
    """Move an estimate towards an observation, by ratios: too fast and too slow count alike."""
    ratio = min(max(observed / estimate, 1.0 / _MAX_RATIO), _MAX_RATIO)
    return float(estimate * ratio**weight)
