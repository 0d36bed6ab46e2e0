"""The servers behind one address: a single one, or the primaries of a cluster."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from valkey import BlockingConnectionPool, Valkey, exceptions

from app.integrations.valkey.cluster import Address, ClusterNodes
from app.integrations.valkey.config import ValkeyConfig
from app.integrations.valkey.connection import (
    BoundedConnection,
    BoundedTlsConnection,
    ConnectionLimits,
    Credentials,
)

_Result = TypeVar("_Result")


class Nodes(Protocol):
    """Runs work on the node it belongs to; any thread may call."""

    def run(self, key: str, work: Callable[[Any], _Result]) -> _Result:
        """Call `work` with the client of the node that holds `key`; it may be called twice."""
        ...

    def primaries(self) -> list[Any]:
        """Return the clients of all nodes that take writes."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def open_nodes(
    config: ValkeyConfig, limits: ConnectionLimits, credentials: Credentials | None
) -> Nodes:
    """Return the nodes of a configuration; connects to nothing."""

    def create_client(address: Address) -> Any:
        return Valkey(connection_pool=_pool(config, address, limits, credentials))

    address = (config.host, config.port)
    if config.is_cluster:
        return ClusterNodes(address, create_client, limits.deadline)
    return SingleNode(create_client(address))


def _pool(
    config: ValkeyConfig,
    address: Address,
    limits: ConnectionLimits,
    credentials: Credentials | None,
) -> Any:
    options: dict[str, Any] = {
        "limits": limits,
        "host": address[0],
        "port": address[1],
        "db": config.db,
        "socket_timeout": config.idle_timeout_s,
        "socket_keepalive": True,
    }
    if credentials is not None:
        options["credential_provider"] = credentials
    else:
        options |= {"username": config.username, "password": config.password}
    if config.has_tls:
        # The library's default takes a valid certificate of any other host.
        options["ssl_check_hostname"] = True
        if config.ca_file is not None:
            options["ssl_ca_certs"] = str(config.ca_file)
    return BlockingConnectionPool(
        connection_class=BoundedTlsConnection if config.has_tls else BoundedConnection,
        max_connections=config.max_connections,
        timeout=config.connect_timeout_s,
        **options,
    )


class SingleNode:
    """One server, or what stands for several and looks like one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, key: str, work: Callable[[Any], _Result]) -> _Result:
        """See `Nodes.run`."""
        del key  # all of them are here
        try:
            return work(self._client)
        except exceptions.ReadOnlyError:
            # Another server may have taken over the name: the next connections find it.
            self._client.connection_pool.disconnect()
            raise

    def primaries(self) -> list[Any]:
        """See `Nodes.primaries`."""
        return [self._client]

    def close(self) -> None:
        """See `Nodes.close`."""
        self._client.connection_pool.disconnect()
