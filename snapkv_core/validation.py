"""Checks shared by the frozen parameter classes; each names the field and the reason."""

import math

from snapkv_core.errors import InvalidParameterError


def require_int(field: str, value: object, low: int, high: int) -> None:
    """Raise `InvalidParameterError` unless `value` is an int (bool is not) in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameterError(
            field, f"must be an integer from {low} to {high}, got {value!r:.80}"
        )
    if not low <= value <= high:
        # Python refuses to print integers of more than 4,300 digits.
        shown = value if abs(value) < 10**40 else "a number of more than 40 digits"
        raise InvalidParameterError(field, f"must be an integer from {low} to {high}, got {shown}")


def require_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `InvalidParameterError` unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidParameterError(
            field, f"must be one of {', '.join(choices)}, got {str(value)[:80]!r}"
        )


def require_number(field: str, value: object, *, low: float, high: float) -> None:
    """Raise `InvalidParameterError` unless `value` is a finite number in [low, high]."""
    # The range is compared first: isfinite() overflows on an integer beyond float's range.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or not math.isfinite(value):  # type: ignore[operator, arg-type]
        raise InvalidParameterError(
            field, f"must be a finite number from {low:g} to {high:g}, got {value!r:.80}"
        )
