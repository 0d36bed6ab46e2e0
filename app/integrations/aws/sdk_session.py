"""Makes the SDK's sessions; it imports nothing of the service, so small functions can use it."""

from typing import Final

import boto3
from botocore.config import Config
from botocore.session import Session

#: Name in a profile, variables, default, conversion. Of the two variables this SDK by itself reads
#: only the second, while containers and functions on AWS are given the first.
_REGION: Final = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)


def sdk_session(default_config: Config | None = None) -> boto3.session.Session:
    """Return a session with region, credentials and endpoints of the SDK's own chain.

    Args:
        default_config: Also holds for the clients that the SDK makes for itself, such as the one
            that turns a pod's token into credentials.

    Raises:
        BotoCoreError: The chain names a profile that is not there.
    """
    session = Session(session_vars={"region": _REGION})
    if default_config is not None:
        session.set_default_client_config(default_config)
    return boto3.session.Session(botocore_session=session)
