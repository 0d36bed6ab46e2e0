"""What can go wrong with a report, in words that hold no secret."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError

from app.integrations.aws.error_code import error_code

#: What botocore's parsers and ours raise when an answer has another form than it should.
_MALFORMED: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    ResponseParserError,
    TypeError,
    ValueError,
)

_UNREACHED: Final[Mapping[type[BotoCoreError], str]] = {
    NoCredentialsError: "found no AWS credentials",
    NoRegionError: "knows no region; set AWS_DEFAULT_REGION",
    ConnectTimeoutError: "cannot be reached in time",
    ReadTimeoutError: "did not answer in time",
    EndpointConnectionError: "cannot be reached",
}

_DENIED: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation"}
)
_THROTTLED: Final = frozenset(
    {"LimitExceededException", "Throttled", "Throttling", "ThrottlingException"}
)
_UNAVAILABLE: Final = "DataUnavailableException"
_BAD_CREDENTIALS: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)


class CostReportError(Exception):
    """The report, or a part of it, cannot be made or sent; the message is one line.

    Attributes:
        code: AWS's code of the error; None when AWS did not answer with one.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def aws_call(action: str) -> Iterator[None]:
    """Turn whatever calling AWS and reading its answer raises into a `CostReportError`.

    AWS's own words are left out, from the chain of causes too: when a signature does not match
    they hold the session token of the request.

    Args:
        action: The action as IAM policies name it, such as `ce:GetCostAndUsage`.

    Raises:
        CostReportError: The call failed or its answer has another form than it should.
    """
    try:
        yield
    except ClientError as error:
        code = error_code(error)
        raise CostReportError(f"{action}: {_reason(code, action)}", code) from None
    except BotoCoreError as error:
        known = (words for kind, words in _UNREACHED.items() if isinstance(error, kind))
        words = next(known, f"failed ({type(error).__name__})")
        raise CostReportError(f"{action}: {words}") from None
    except _MALFORMED:
        raise CostReportError(f"{action}: the answer cannot be understood") from None


def _reason(code: str, action: str) -> str:
    if code in _DENIED:
        enabled = ", with Cost Explorer enabled in the account" if action.startswith("ce:") else ""
        return f"denied ({code}); the role needs this action{enabled}"
    if code in _THROTTLED:
        return f"throttled ({code}); try again later"
    if code in _BAD_CREDENTIALS:
        return f"the AWS credentials are not accepted ({code})"
    if code == _UNAVAILABLE:
        return f"AWS has no data for it yet ({code})"
    return f"failed ({code})"
