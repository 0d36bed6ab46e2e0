"""Builds the SDK's clients, so that no call to AWS can take for ever.

Region, credentials and endpoints come from the SDK's own chain; this file reads no environment.
"""

import logging
from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import BotoCoreError, NoRegionError

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
    except NoRegionError as error:
        raise SettingsError(f"AWS {service}: no region is configured; set AWS_REGION") from error
    except (BotoCoreError, ValueError) as error:
        raise SettingsError(f"AWS {service}: {' '.join(str(error).split())}") from error
