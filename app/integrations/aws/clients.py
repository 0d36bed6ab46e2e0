"""Builds the SDK's clients, so that no call to AWS can take for ever.

Region, credentials and endpoints come from the SDK's own chain; this file reads no environment.
"""

import logging
from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    InvalidRegionError,
    NoRegionError,
    ProfileNotFound,
)

from app.integrations.aws.sdk_session import sdk_session
from app.settings import SettingsError

CONNECT_TIMEOUT_S: Final = 2.0
READ_TIMEOUT_S: Final = 5.0
#: Of one call, the first one counted in.
MAX_ATTEMPTS: Final = 3


def aws_client(
    service: str,
    *,
    read_timeout_s: float = READ_TIMEOUT_S,
    max_attempts: int = MAX_ATTEMPTS,
) -> Any:
    """Return a client whose calls, those for its credentials included, are bounded in time.

    Args:
        service: The SDK's name of the service, such as `dynamodb`.
        read_timeout_s: Seconds of silence after which an attempt has failed.
        max_attempts: Attempts of one call; 1 leaves retrying to the caller.

    Raises:
        SettingsError: The SDK's configuration names no region or is broken.
    """
    # At level debug the SDK logs answers as they came, a secret's text included.
    for name in ("boto3", "botocore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": max_attempts},
    )
    try:
        return sdk_session(config).client(service)
    except (BotoCoreError, ValueError) as error:
        # Without its words and the chain of causes: an endpoint may hold a password.
        raise SettingsError(f"AWS {service}: {_reason_of(error)}") from None


def _reason_of(error: BotoCoreError | ValueError) -> str:
    if isinstance(error, NoRegionError):
        return "no region is configured; set AWS_REGION"
    if isinstance(error, InvalidRegionError):
        return "the region of AWS_REGION, or of the profile, is none"
    if isinstance(error, ProfileNotFound):
        return "AWS_PROFILE names a profile that is not there"
    if type(error) is ValueError and str(error).startswith("Invalid endpoint"):
        return "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_<SERVICE> or the profile's endpoint is no URL"
    return f"the configuration of the AWS SDK is not acceptable ({type(error).__name__})"
