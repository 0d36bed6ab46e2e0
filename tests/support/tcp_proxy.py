"""A line between a client and a server on loopback, which a test can hold or slow down."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_PIECE_BYTES: Final = 1 << 14


class TcpProxy:
    """Passes connections on to a port; use it as a context.

    Attributes:
        hold_after_bytes: Bytes towards the server after which none pass, over all connections;
            None for no limit.
        trickle_s: Seconds between two bytes towards the client; None for no delay.
        is_holding: Set once bytes are held back.
    """

    def __init__(
        self, port: int, *, hold_after_bytes: int | None = None, trickle_s: float | None = None
    ) -> None:
        self.hold_after_bytes = hold_after_bytes
        self.trickle_s = trickle_s
        self.is_holding = threading.Event()
        self._server_port = port
        self._num_sent = 0
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def port(self) -> int:
        """Where clients connect."""
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> "TcpProxy":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for sock in (self._listener, *self._sockets):
            _close(sock)
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                _close(client)
                continue
            self._sockets += [client, server]
            self._start(self._pass_to_server, client, server)
            self._start(self._pass_to_client, server, client)

    def _pass_to_server(self, client: socket.socket, server: socket.socket) -> None:
        while piece := _read(client):
            if self.hold_after_bytes is not None:
                piece = piece[: max(0, self.hold_after_bytes - self._num_sent)]
            self._num_sent += len(piece)
            if not _write(server, piece):
                break
            if self._num_sent == self.hold_after_bytes:
                self.is_holding.set()
                self._closing.wait()
        _close(server)

    def _pass_to_client(self, server: socket.socket, client: socket.socket) -> None:
        while piece := _read(server):
            size = len(piece) if self.trickle_s is None else 1
            for start in range(0, len(piece), size):
                if self.trickle_s is not None and self._closing.wait(self.trickle_s):
                    break
                if not _write(client, piece[start : start + size]):
                    break
        _close(client)


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_PIECE_BYTES)
    except OSError:
        return b""


def _write(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def _close(sock: socket.socket) -> None:
    with suppress(OSError):  # its other end was faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
