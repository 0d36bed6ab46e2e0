"""Connections to Valkey on which no call waits longer than it may, and which log in again in time.

It knows no blob and no topology. The client library limits each read and write of a socket by
itself; a server that sends a byte now and then could hold a call for ever.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from valkey import Connection, SSLConnection, exceptions

_Received = TypeVar("_Received", bytes, int)

#: ElastiCache ends a connection 12 hours after its last login with IAM.
LOGIN_AGE_S: Final = 11 * 3_600.0
#: Bytes offered to a socket at once, so that a server which takes none is noticed.
_SEND_BYTES: Final = 1 << 18
#: Bytes asked for where a line is expected; a value follows it, which is read without a copy.
_LINE_BYTES: Final = 1 << 12
_MAX_LINE_BYTES: Final = 1 << 16
_LINE_END: Final = b"\r\n"


class Credentials(Protocol):
    """Says who logs in; asked anew for every login."""

    def get_credentials(self) -> tuple[str, str]:
        """Return user and password."""
        ...


class CallDeadline(threading.local):
    """When the call that runs on a thread must be over; each thread has its own."""

    def __init__(self) -> None:
        self._ends_s = math.inf

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Run a call that may take so many seconds."""
        self._ends_s = time.monotonic() + timeout_s
        try:
            yield
        finally:
            self._ends_s = math.inf

    def left_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: There are none.
        """
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the call has used up its time")
        return left_s


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a connection may take, and be used.

    Attributes:
        deadline: When the calls end.
        connect_timeout_s: Seconds until an attempt to connect is given up.
        login_age_s: Seconds after which a login is renewed.
        clock: Seconds since some moment, for the age of logins.
    """

    deadline: CallDeadline
    connect_timeout_s: float
    login_age_s: float = LOGIN_AGE_S
    clock: Callable[[], float] = time.monotonic


class BoundedSocket:
    """A socket whose reads and writes end with the call that makes them.

    It has what the client library uses of a socket. Only the thread that holds its connection
    calls it.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, deadline: CallDeadline) -> None:
        """Wrap a connected socket.

        Args:
            sock: The socket, plain or TLS.
            timeout_s: Seconds of silence after which a read or write fails.
            deadline: When the calls end.
        """
        self._sock = sock
        self._timeout_s = timeout_s
        self._deadline = deadline

    def settimeout(self, timeout_s: float) -> None:
        """Set the seconds of silence; 0 reads what is there and does not wait."""
        self._timeout_s = timeout_s

    def recv(self, num_bytes: int) -> bytes:
        """Read up to so many bytes."""
        self._arm()
        return self._sock.recv(num_bytes)

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Read into a buffer; return the number of bytes."""
        self._arm()
        return self._sock.recv_into(buffer)

    def sendall(self, data: bytes | memoryview) -> None:
        """Write all of it, a piece at a time."""
        left = memoryview(data)
        while left:
            self._arm()
            left = left[self._sock.send(left[:_SEND_BYTES]) :]

    def shutdown(self, how: int) -> None:
        """End both directions."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close it."""
        self._sock.close()

    def _arm(self) -> None:
        self._sock.settimeout(min(self._timeout_s, self._deadline.left_s()))


class _Answers:
    """What the server sends, as lines and values."""

    def __init__(self, sock: BoundedSocket) -> None:
        self._sock = sock
        self._ahead = b""  # read and not yet asked for

    def line(self) -> bytes:
        """Return what comes before the next end of a line."""
        while _LINE_END not in self._ahead:
            if len(self._ahead) > _MAX_LINE_BYTES:
                raise exceptions.InvalidResponse("a line does not end")
            self._ahead += self._some(self._sock.recv(_LINE_BYTES))
        line, _, self._ahead = self._ahead.partition(_LINE_END)
        return line

    def fill(self, value: memoryview) -> None:
        """Read a value of a known length."""
        num_bytes = min(len(value), len(self._ahead))
        value[:num_bytes] = self._ahead[:num_bytes]
        self._ahead = self._ahead[num_bytes:]
        while num_bytes < len(value):
            num_bytes += self._some(self._sock.recv_into(value[num_bytes:]))

    def _some(self, received: _Received) -> _Received:
        if not received:
            raise exceptions.ConnectionError("the server closed the connection")
        return received


class BoundedConnection(Connection):  # type: ignore[misc]
    """A connection that respects the limits of the call it is used for."""

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        """Take what the library's connection takes, and the limits."""
        self._limits = limits
        self._logged_in_s = -math.inf
        super().__init__(**options)

    def connect(self) -> None:
        """Connect and log in, unless that is done; log in again where the login has grown old."""
        age_s = self._limits.clock() - self._logged_in_s
        if self._sock is not None and self.credential_provider and age_s > self._limits.login_age_s:
            self._log_in_again()
        super().connect()

    def on_connect(self) -> None:
        """Log in."""
        try:
            super().on_connect()
        except BaseException:
            # The library closes after its own errors only; others would leave it without a login.
            self.disconnect()
            raise
        self._logged_in_s = self._limits.clock()

    def read_values(self, values: Sequence[memoryview]) -> bool:
        """Read the answers to as many GETs, of known lengths, straight into memory.

        The library's parser copies a value four times, and holds up all threads of Python with it.

        Returns:
            Whether every value was there and had its length. If not, the connection is closed,
            since the rest of the answers is on it.

        Raises:
            ResponseError: The server answered with an error; close the connection then.
            InvalidResponse: The answer is not one of Valkey; likewise.
        """
        answers = _Answers(self._sock)
        for value in values:
            header = answers.line()
            if header.startswith(b"-"):
                raise exceptions.ResponseError(header[1:].decode(errors="replace"))
            if not header.startswith(b"$"):
                raise exceptions.InvalidResponse("no value")
            if header != b"$%d" % len(value):
                self.disconnect()
                return False
            answers.fill(value)
            if answers.line():
                raise exceptions.InvalidResponse("a value does not end where it should")
        return True

    def _connect(self) -> BoundedSocket:
        deadline = self._limits.deadline
        self.socket_connect_timeout = min(self._limits.connect_timeout_s, deadline.left_s())
        return BoundedSocket(super()._connect(), self.socket_timeout, deadline)

    def _log_in_again(self) -> None:
        try:
            self.send_command(
                "AUTH", *self.credential_provider.get_credentials(), check_health=False
            )
            self.read_response()
        except Exception:
            # The caller connects anew, and fails with the reason if it still holds.
            self.disconnect()
        else:
            self._logged_in_s = self._limits.clock()


class BoundedTlsConnection(BoundedConnection, SSLConnection):  # type: ignore[misc]
    """The same over TLS."""
