"""The exception tree of the core; it knows no HTTP status and imports nothing.

```text
SnapKVError
├── InvalidParameterError   a caller's value is wrong (also a ValueError)
│   ├── PromptTooLongError  the prompt does not fit the model's context
│   └── RequestTooLargeError  its KV cache can never fit the memory there is
├── QueueFullError          no room to wait; try again later
├── EngineStoppedError      the engine is draining, stopped or dead
├── GenerationFailedError   a step raised while this sequence was in it
├── DeadlineExceededError   the request's time was up before its answer was complete
├── ModelLoadError          the model cannot be served; raised at start only
├── SnapshotError           a snapshot, or bytes given as one, is not what it has to be
├── StoreError              a store of snapshots cannot say, or did not take, what it was asked
└── KVCacheError            an invariant of the KV store was broken: our bug
```
"""


class SnapKVError(Exception):
    """Base of everything the core raises on purpose."""


class InvalidParameterError(SnapKVError, ValueError):
    """A value that the caller sent is not acceptable.

    Attributes:
        field: Name of the offending parameter, as the caller spelled it.
        reason: What is wrong with it, in one sentence.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PromptTooLongError(InvalidParameterError):
    """The prompt, or the prompt and the tokens asked for, exceed the model's context.

    Attributes:
        num_prompt_tokens: Tokens of the prompt as the model counts them, or fewer.
        max_model_len: Tokens that prompt and answer may have together.
    """

    def __init__(
        self,
        field: str,
        *,
        num_prompt_tokens: int,
        max_new_tokens: int,
        max_model_len: int,
        is_counted: bool = True,
    ) -> None:
        """Describe it; a prompt that was not counted has at least `num_prompt_tokens`."""
        amount = num_prompt_tokens if is_counted else f"at least {num_prompt_tokens}"
        super().__init__(
            field,
            f"the prompt has {amount} tokens and {max_new_tokens} more were asked for; "
            f"the model's context holds {max_model_len}",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_model_len = max_model_len


class RequestTooLargeError(InvalidParameterError):
    """The memory that a request needs exceeds what the engine has, however long it waits.

    Attributes:
        needed_bytes: Bytes of KV cache for the kept prompt and the longest answer, all choices.
        available_bytes: Bytes of the whole pool.
    """

    def __init__(self, field: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            field,
            f"the kept prompt and the answer asked for need {needed_bytes} bytes of KV cache; "
            f"this server has {available_bytes}. Ask for a smaller max_capacity_prompt, "
            "max_new_tokens or n",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class QueueFullError(SnapKVError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: Seconds after which trying again is sensible.
    """

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again later")
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


class EngineStoppedError(SnapKVError):
    """The engine takes no requests: it is draining, stopped, or its thread died."""


class GenerationFailedError(SnapKVError):
    """A step failed while this request was part of it; other requests are untouched."""


class DeadlineExceededError(SnapKVError):
    """A request was ended because its time was up; all it held is free."""


class ModelLoadError(SnapKVError):
    """The model cannot be served; the message says what to change."""


class StoreError(SnapKVError):
    """A store of snapshots could not be reached, or answered wrongly.

    The text holds no key, address or answer of the store, so it may be logged.

    Attributes:
        store: Short name of the store.
        reason: What is wrong, in a few words.
    """

    def __init__(self, store: str, reason: str) -> None:
        super().__init__(f"{store}: {reason}")
        self.store = store
        self.reason = reason


class KVCacheError(SnapKVError):
    """The KV store was asked for something its bookkeeping forbids; a bug of ours, not load."""


class SnapshotError(SnapKVError):
    """A snapshot, or bytes given as one, is not what it has to be; the message says in what."""
