"""Makes S3 clients whose calls end in bounded time, and says in a few words why a call failed.

It repeats nothing that S3 said: messages may quote keys, addresses and credentials.
"""

from collections.abc import Mapping
from typing import Any, Final

from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    LoginError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSOError,
    TokenRetrievalError,
)

from app.integrations.aws.error_code import error_code
from app.integrations.aws.sdk_session import sdk_session

_CONNECT_TIMEOUT_S: Final = 5.0
#: Between two pieces of an answer, not for the whole of it.
_READ_TIMEOUT_S: Final = 20.0
_MAX_ATTEMPTS: Final = 3

_DENIED: Final = "access is denied"
_MISSING: Final = "does not exist"
_CHANGED: Final = "was replaced in the meantime"
_BUSY: Final = "S3 asks for fewer requests"
_BAD_CREDENTIALS: Final = "the AWS credentials are refused"
_BY_CODE: Final[Mapping[str, str]] = {
    "403": _DENIED,
    "AccessDenied": _DENIED,
    "404": _MISSING,
    "NoSuchKey": _MISSING,
    "NoSuchBucket": "its bucket does not exist",
    "412": _CHANGED,
    "PreconditionFailed": _CHANGED,
    "503": _BUSY,
    "SlowDown": _BUSY,
    "ExpiredToken": _BAD_CREDENTIALS,
    "InvalidAccessKeyId": _BAD_CREDENTIALS,
    "InvalidToken": _BAD_CREDENTIALS,
    "SignatureDoesNotMatch": _BAD_CREDENTIALS,
}
_MISSING_CODES: Final = frozenset({"404", "NoSuchKey"})
_NO_CREDENTIALS: Final = (
    CredentialRetrievalError,
    LoginError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)


def create_s3_client(
    *,
    max_connections: int,
    connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    read_timeout_s: float = _READ_TIMEOUT_S,
    max_attempts: int = _MAX_ATTEMPTS,
) -> Any:
    """Make a client; credentials, region and endpoint come from the SDK's own chain.

    Args:
        max_connections: Calls that run at once.
        connect_timeout_s: How long connecting may take.
        read_timeout_s: How long an answer, or its next piece, may take to come.
        max_attempts: Tries of a call that is throttled or fails before its answer begins.

    Raises:
        BotoCoreError: The SDK's own configuration is not acceptable.
        ValueError: The endpoint is no URL.
    """
    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": max_attempts},
        max_pool_connections=max_connections,
        tcp_keepalive=True,
    )
    # As the default it bounds the calls for credentials too.
    return sdk_session(config).client("s3")


def is_missing(error: Exception) -> bool:
    """Tell whether a call failed because there is no such object."""
    return isinstance(error, ClientError) and error_code(error) in _MISSING_CODES


def describe_failure(error: BaseException) -> str:
    """Say why a call failed: what follows the name of the object in a sentence.

    Args:
        error: Whatever the client raised; on an answer that is no S3's, it may be anything.
    """
    if isinstance(error, Boto3Error):
        # An upload of several parts wraps what S3 answered.
        cause = error.__cause__ or error.__context__
        return describe_failure(cause) if cause is not None else "the transfer failed"
    if isinstance(error, ClientError):
        code = error_code(error)
        known = _BY_CODE.get(code)
        return f"{known} ({code})" if known else f"S3 refused the request ({code})"
    if isinstance(error, _NO_CREDENTIALS):
        return f"no usable AWS credentials ({type(error).__name__})"
    if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
        # S3, or whoever gives out the credentials.
        return f"AWS did not answer in time ({type(error).__name__})"
    if isinstance(error, BotoCoreError):
        return f"AWS cannot be reached ({type(error).__name__})"
    if isinstance(error, OSError):
        return f"the local file cannot be used: {error.strerror}"
    return f"the answer is not one of S3 ({type(error).__name__})"
