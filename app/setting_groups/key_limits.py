"""Settings of how much each caller may ask for, and how they are read.

No message of this file quotes what it was given: a key may have been put into the wrong place.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import NoDecode

from app.setting_groups.access import KEY_NAME

#: Whose limits hold for every caller that has none of its own.
EVERYBODY: Final = "default"

Limit = Annotated[int | None, Field(ge=1, le=1_000_000_000)]


class KeyLimits(BaseModel):
    """What one caller may ask for; None is no limit.

    Attributes:
        requests_per_minute: Requests that are taken in any 60 seconds.
        tokens_per_minute: Tokens in any 60 seconds, prompts and answers together.
        max_capacity_prompt: Prompt tokens that a request may keep per layer and KV head.
        max_prompt_tokens: Tokens of a prompt.
        max_new_tokens: Tokens of an answer.
        max_choices: Answers of a request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_capacity_prompt: Limit = None
    max_prompt_tokens: Limit = None
    max_new_tokens: Limit = None
    max_choices: Limit = None


NO_LIMITS: Final = KeyLimits()


def parse_key_limits(value: object) -> object:
    """Return limits by the caller's name from an object, or from its JSON text.

    What a caller's own limits do not name comes from those of `EVERYBODY`; null lifts a limit.

    Raises:
        ValueError: It is something else, or a limit is not acceptable; says which by its position.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of names of keys and their limits")
    given = {}
    for number, (name, limits) in enumerate(value.items(), 1):
        if not isinstance(name, str) or KEY_NAME.fullmatch(name) is None:
            raise ValueError(f"the name of entry {number} can be no key's")
        # Checked one by one, so that a fault is found where it was made.
        given[name] = _checked(number, limits).model_dump(exclude_unset=True)
    base = given.get(EVERYBODY, {})
    return {name: KeyLimits(**{**base, **limits}) for name, limits in given.items()}


def _checked(number: int, limits: object) -> KeyLimits:
    if isinstance(limits, KeyLimits):
        return limits
    reason = ""
    try:
        return KeyLimits.model_validate(limits)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        if detail["type"] == "extra_forbidden":
            reason = f"has an unknown limit; known are {', '.join(KeyLimits.model_fields)}"
        elif detail["loc"]:
            reason = f"{detail['loc'][0]} must be an integer from 1 to 1000000000, or null"
        else:
            reason = "must be an object of limits"
    # Out here, so that the error keeps none of the values.
    raise ValueError(f"entry {number}: {reason}")


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The decoder's error holds the text.
        reason = "is not JSON"
    raise ValueError(reason)


class KeyLimitSettings(BaseModel):
    """How much callers may ask for."""

    key_limits: Annotated[dict[str, KeyLimits], NoDecode, BeforeValidator(parse_key_limits)] = (
        Field(
            {},
            description="Limits as JSON, an object of names of keys and their limits, `default` "
            'for all others, such as `{"default": {"requests_per_minute": 60}}`; see '
            "[api.md](api.md#limits-of-a-key).",
        )
    )

    def limits_problem(self, names: Mapping[str, object], window_size: int) -> str | None:
        """Return what is wrong with the limits, given the keys by name and the default window."""
        for number, (name, limits) in enumerate(self.key_limits.items(), 1):
            if name != EVERYBODY and name not in names:
                return f"entry {number} is for no key that there is"
            if (limits.max_capacity_prompt or window_size + 1) <= window_size:
                return (
                    f"entry {number}: max_capacity_prompt must be greater than the window_size of "
                    f"requests that name none ({window_size})"
                )
        return None
