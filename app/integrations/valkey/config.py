"""What the Valkey store has to be told; it opens nothing."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from snapkv_core import InvalidParameterError
from snapkv_core.validation import require_int, require_number

#: Scheme of a URL, and whether it means TLS. Redis's names mean the same.
_SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_DEFAULT_PORT: Final = 6379
_DB: Final = re.compile(r"[0-9]{1,6}")
#: So that no manifest makes a reader ask for chunks without end.
MIN_CHUNK_BYTES: Final = 1 << 10
#: The largest string of the servers is 512 MiB; chunks stay far below.
_MAX_CHUNK_BYTES: Final = 64 << 20
_MAX_TIMEOUT_S: Final = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElastiCacheLogin:
    """Logs in to ElastiCache as an IAM identity instead of with a password.

    Attributes:
        cache_name: Id of the replication group, or name of the serverless cache; lower case.
        user_id: Id of the ElastiCache user, which IAM requires to be its name as well.
        is_serverless: Whether it is a serverless cache.
    """

    cache_name: str
    user_id: str
    is_serverless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig:
    """Where Valkey is, how to log in, what to keep there and for how long.

    Attributes:
        host: Name or address; any node of a cluster.
        port: TCP port.
        db: Number of the database; 0 in a cluster.
        has_tls: Whether connections are encrypted and the server's certificate is checked.
        username: User of the server's access control list; None for the default user.
        password: Its password; None where none is asked for.
        elasticache: Logs in with IAM; neither username nor password is given then.
        ca_file: Certificates, in PEM, that sign the server's; None trusts the system's.
        is_cluster: Whether the server runs in cluster mode.
        ttl_s: Seconds after which a blob expires, counted from when it was put.
        chunk_bytes: Bytes of one value; blobs are cut into such chunks.
        num_chunks_per_trip: Chunks that are sent or asked for before answers are read.
        max_blob_bytes: Bytes of the largest blob that is put or read.
        max_connections: Connections to one node, and calls that use it at once; others wait.
        connect_timeout_s: Seconds until a connection is given up.
        idle_timeout_s: Seconds of silence, or without a byte taken, after which a call fails.
        get_timeout_s: Seconds that `get` may take.
        put_timeout_s: Seconds that `put` may take.
        delete_timeout_s: Seconds that `delete_namespace` may take.
    """

    host: str
    port: int = _DEFAULT_PORT
    db: int = 0
    has_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    elasticache: ElastiCacheLogin | None = None
    ca_file: Path | None = None
    is_cluster: bool = False
    ttl_s: int = 86_400
    chunk_bytes: int = 8 << 20
    num_chunks_per_trip: int = 4
    max_blob_bytes: int = 1 << 30
    max_connections: int = 8
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 5.0
    get_timeout_s: float = 10.0
    put_timeout_s: float = 60.0
    delete_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Check what can be checked without a connection.

        Raises:
            InvalidParameterError: A value is out of range, or two do not go together.
        """
        if not self.host:
            raise InvalidParameterError("host", "is empty")
        require_int("port", self.port, 1, 65_535)
        require_int("db", self.db, 0, 0 if self.is_cluster else 1_000_000)
        require_int("ttl_s", self.ttl_s, 1, 10 * 366 * 86_400)
        require_int("chunk_bytes", self.chunk_bytes, MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES)
        require_int("num_chunks_per_trip", self.num_chunks_per_trip, 1, 64)
        require_int("max_blob_bytes", self.max_blob_bytes, 1, 1 << 36)
        require_int("max_connections", self.max_connections, 1, 1_024)
        for name in ("connect", "idle", "get", "put", "delete"):
            timeout = f"{name}_timeout_s"
            require_number(timeout, getattr(self, timeout), low=0.01, high=_MAX_TIMEOUT_S)
        if self.ca_file is not None and not self.has_tls:
            raise InvalidParameterError("ca_file", "is for TLS: the scheme is valkeys://")
        if self.ca_file is not None and not self.ca_file.is_file():
            raise InvalidParameterError("ca_file", f"is no file: {self.ca_file}")
        if self.elasticache is not None and not self.has_tls:
            raise InvalidParameterError("elasticache", "needs TLS: the scheme is valkeys://")
        if self.elasticache is not None and (self.username or self.password):
            raise InvalidParameterError("elasticache", "comes without username and password")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Read host, port, database, TLS, user and password from a URL.

        Args:
            url: `valkey://[[user]:password@]host[:port][/db]`, `valkeys://` for TLS; `redis://`
                and `rediss://` mean the same. User and password are percent-encoded.
            options: Other fields.

        Raises:
            InvalidParameterError: It is no such URL, or a field is not acceptable. The message
                does not repeat the URL, which may hold a password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORT
        except ValueError:
            raise InvalidParameterError("url", "is no URL with a host and a port") from None
        if parts.scheme not in _SCHEMES:
            schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise InvalidParameterError("url", f"must begin with one of {schemes}")
        if not parts.hostname:
            raise InvalidParameterError("url", "names no host")
        db = parts.path.removeprefix("/") or "0"
        if not _DB.fullmatch(db) or parts.query or parts.fragment:
            raise InvalidParameterError("url", "may end in /number of the database, nothing else")
        return cls(
            host=parts.hostname,
            port=port,
            db=int(db),
            has_tls=_SCHEMES[parts.scheme],
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            **options,
        )
