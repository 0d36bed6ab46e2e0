"""Stands where the X-Ray daemon stands: takes segment documents from a real UDP socket."""

import json
import socket
import threading
from types import TracebackType
from typing import Any

from tests.support.app_client import until


class XRayDaemon:
    """Listens on a free port of 127.0.0.1 for as long as it is entered."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
        self._socket.bind(("127.0.0.1", 0))
        host, port = self._socket.getsockname()
        self.address = f"{host}:{port}"
        self._datagrams: list[bytes] = []
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> "XRayDaemon":
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def documents(self) -> list[dict[str, Any]]:
        """Return what has arrived: each datagram is a header line and one JSON document."""
        documents = []
        for datagram in list(self._datagrams):
            header, _, document = datagram.partition(b"\n")
            assert json.loads(header) == {"format": "json", "version": 1}
            documents.append(json.loads(document))
        return documents

    async def segments(self, num: int, within_s: float = 10.0) -> list[dict[str, Any]]:
        """Return the documents once there are `num` of them, and no more."""
        await until(lambda: len(self._datagrams) >= num, within_s)
        documents = self.documents()
        assert len(documents) == num, f"{len(documents)} documents instead of {num}"
        return documents

    async def segment(self) -> dict[str, Any]:
        """Return the only document."""
        return (await self.segments(1))[0]

    def _receive(self) -> None:
        while datagram := self._socket.recv(65_536):
            self._datagrams.append(datagram)


def free_udp_address() -> str:
    """Return host and port of 127.0.0.1 that no daemon listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
        return f"{host}:{port}"
