"""AWS clients of the report; every call of theirs ends within a time."""

from typing import Any, Final

from botocore.config import Config

from app.integrations.aws.cost.errors import CostReportError, aws_call
from app.integrations.aws.sdk_session import sdk_session

#: At most three tries of 18 s and two pauses of 1 and 2 s: a call ends within a minute.
CLIENT_CONFIG: Final = Config(
    connect_timeout=3,
    read_timeout=15,
    retries={"mode": "standard", "total_max_attempts": 3},
)


class AwsClients:
    """Opens clients with the credentials, endpoints and region of the SDK's own chain.

    They share a session: it reads the descriptions of services and endpoints once, which takes
    longer than anything else about a client.

    Raises:
        CostReportError: The chain holds something unusable.
    """

    def __init__(self) -> None:
        with aws_call("AWS"):
            # As the default it bounds the calls for credentials too.
            self._session = sdk_session(CLIENT_CONFIG)

    def open(self, service: str, *, region: str | None = None, fallback: str | None = None) -> Any:
        """Open a client.

        Args:
            service: Name of the service for the SDK.
            region: Region that wins over the chain's.
            fallback: Region to take when the chain knows none.

        Raises:
            CostReportError: No region is known, or the chain holds something unusable.
        """
        with aws_call(service):
            try:
                return self._session.client(
                    service,
                    region_name=region or self._session.region_name or fallback,
                )
            except ValueError:
                raise CostReportError(f"{service}: the endpoint or region is unusable") from None
