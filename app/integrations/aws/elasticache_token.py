"""Signs the tokens that stand for a password where ElastiCache logs in with IAM.

A token is the address of a request that is never made, signed for 15 minutes and without its
scheme. It is checked as a connection logs in and not again, so each login gets a new one.
"""

import logging
from typing import Any, Final

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from app.integrations.aws.clients import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from app.integrations.aws.sdk_session import sdk_session
from snapkv_core import StoreError

#: The longest that ElastiCache takes.
TOKEN_LIFE_S: Final = 900
_SERVICE: Final = "elasticache"
_SCHEME: Final = "https://"
_STORE: Final = "valkey"


class ElastiCacheTokens:
    """Says who logs in to one cache; any thread may ask.

    AWS credentials come from the SDK's own chain, which renews them; asking for them may call AWS,
    within the SDK's limits.
    """

    def __init__(self, cache_name: str, user_id: str, *, is_serverless: bool) -> None:
        """Find the region and the credentials of the SDK.

        Args:
            cache_name: Id of the replication group, or name of the serverless cache.
            user_id: Id, and name, of the ElastiCache user.
            is_serverless: Whether it is a serverless cache.

        Raises:
            StoreError: There is no region, or the SDK's configuration is broken.
        """
        # At level debug the SDK logs what it signs, and the signature.
        logging.getLogger("botocore").setLevel(logging.WARNING)
        self._user_id = user_id
        query = {"Action": "connect", "User": user_id}
        if is_serverless:
            query["ResourceType"] = "ServerlessCache"
        # ElastiCache knows names in lower case only, and the name is what is signed.
        self._address = f"{_SCHEME}{cache_name.lower()}/"
        self._query = query
        limits = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        try:
            self._session: Any = sdk_session(limits)
            self._region: str | None = self._session.region_name
        except BotoCoreError as error:
            raise StoreError(_STORE, f"the AWS SDK: {type(error).__name__}") from error
        if not self._region:
            raise StoreError(_STORE, "the AWS SDK has no region; set AWS_REGION")

    def get_credentials(self) -> tuple[str, str]:
        """Return the user and a token that is good for the next 15 minutes.

        Raises:
            StoreError: There are no AWS credentials, or they cannot be renewed.
        """
        try:
            credentials = self._session.get_credentials()
            frozen = credentials and credentials.get_frozen_credentials()
        except Exception as error:
            # Renewing them may ask AWS, and fail in any way a network can.
            raise StoreError(
                _STORE, f"no usable AWS credentials ({type(error).__name__})"
            ) from error
        if not frozen:
            raise StoreError(_STORE, "there are no AWS credentials")
        request = AWSRequest(method="GET", url=self._address, params=self._query)
        SigV4QueryAuth(frozen, _SERVICE, self._region, expires=TOKEN_LIFE_S).add_auth(request)
        return self._user_id, request.url.removeprefix(_SCHEME)
