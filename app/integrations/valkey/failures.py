"""Says in a few words why a call to Valkey failed.

It repeats nothing that the server or the library said: messages may quote keys and addresses.
"""

import ssl
from typing import Final

from valkey import exceptions

#: The first kind that fits: the later ones are wider.
_REASONS: Final[tuple[tuple[tuple[type[BaseException], ...], str], ...]] = (
    ((exceptions.OutOfMemoryError,), "it is out of memory"),
    ((exceptions.AuthenticationError,), "the user or the password is refused"),
    ((exceptions.NoPermissionError,), "the user may not run a command or use a key"),
    ((exceptions.BusyLoadingError,), "it is still loading its data"),
    ((exceptions.ReadOnlyError,), "it is a replica, which takes no writes"),
    ((exceptions.TimeoutError, TimeoutError), "it did not answer in time"),
    ((exceptions.ConnectionError, OSError), "it cannot be reached, or broke the connection off"),
    ((exceptions.ResponseError,), "it refused a command"),
)


def describe_failure(error: BaseException) -> str:
    """Say why a call failed.

    Args:
        error: Whatever the client raised; on an answer that is no Valkey's, it may be anything.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "its certificate is not one that is trusted for this host"
        if isinstance(cause, ssl.SSLError):
            return f"TLS fails ({type(cause).__name__})"
        cause = cause.__cause__ or cause.__context__
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return f"{reason} ({type(error).__name__})"
    return f"the answer is not one of Valkey ({type(error).__name__})"
