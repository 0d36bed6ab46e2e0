"""Sends segments to the X-Ray daemon, on a thread of its own: its name may take time to resolve."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aws_xray_sdk.core.daemon_config import DaemonConfig
from aws_xray_sdk.core.emitters.udp_emitter import PROTOCOL_DELIMITER, PROTOCOL_HEADER
from aws_xray_sdk.core.exceptions.exceptions import InvalidDaemonAddressException

from app.losses import LossCount
from app.settings import SettingsError
from app.telemetry.tracing.outstanding import Outstanding
from app.telemetry.tracing.trace import log_lost

#: Segments that may wait; about 2 KB each.
MAX_QUEUED: Final = 2_048
#: How long an address that was looked up is used; a daemon may move.
RESOLVE_AGAIN_S: Final = 60.0
SEND_TIMEOUT_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 2.0


class SegmentSender:
    """Takes closed segments from any thread and sends each in one datagram.

    It never waits and never raises: what cannot be sent is counted in `losses`.
    """

    def __init__(self, daemon_address: str, count_lost: Callable[[int], None]) -> None:
        """Send to `daemon_address`, host and port, unless `AWS_XRAY_DAEMON_ADDRESS` names another.

        `count_lost` is told of segments that cannot be sent.

        Raises:
            SettingsError: The address cannot be read.
        """
        self._host, self._port = _parse(daemon_address)
        self.losses = LossCount(partial(log_lost, "xray"), count_lost)
        self._outstanding = Outstanding(self.losses)
        self._queue: queue.Queue[Any] = queue.Queue(MAX_QUEUED)
        self._socket: socket.socket | None = None
        self._resolve_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="xray-sender", daemon=True)
        self._thread.start()

    def send(self, entity: Any) -> None:
        """Queue a closed segment or subsegment; one that comes after `close` is lost."""
        if not self._outstanding.take():
            return
        try:
            self._queue.put_nowait(entity)
        except queue.Full:
            self._outstanding.settle(1, "queue_full")

    def close(self) -> None:
        """Send what is queued, for a bounded time, and count the rest as lost; blocks."""
        self._outstanding.stop_taking()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            pass  # the thread ends at the next segment it takes
        else:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._outstanding.give_up()

    def _run(self) -> None:
        while (entity := self._queue.get()) is not None and not self._outstanding.is_over:
            try:
                document = f"{PROTOCOL_HEADER}{PROTOCOL_DELIMITER}{entity.serialize()}"
                self._send(document.encode("utf-8"))
            except Exception as error:
                self._outstanding.settle(1, type(error).__name__)
            else:
                self._outstanding.settle(1)
        if self._socket is not None:
            self._socket.close()

    def _send(self, datagram: bytes) -> None:
        connected = self._connected()
        try:
            connected.send(datagram)
        except ConnectionRefusedError as error:
            # It tells of the datagram before, which nobody took; this one was not tried yet.
            self.losses.add(1, type(error).__name__)
            connected.send(datagram)

    def _connected(self) -> socket.socket:
        # A connected socket learns that nobody listens; an unconnected one sends into the void.
        if self._socket is not None and time.monotonic() < self._resolve_at_s:
            return self._socket
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_DGRAM
        )[0]
        connected = socket.socket(family, kind, protocol)
        connected.settimeout(SEND_TIMEOUT_S)
        self._socket = connected
        connected.connect(address)
        self._resolve_at_s = time.monotonic() + RESOLVE_AGAIN_S
        return connected


def _parse(daemon_address: str) -> tuple[str, int]:
    try:
        # The SDK's own rule: Lambda and ECS set the variable, and it wins.
        config = DaemonConfig(daemon_address)
    except InvalidDaemonAddressException:
        # Its message quotes the address, which may hold a password.
        raise SettingsError(
            "SNAPKV_XRAY_DAEMON_ADDRESS or AWS_XRAY_DAEMON_ADDRESS: must be host:port"
        ) from None
    if not 0 < config.udp_port < 65_536:
        raise SettingsError(
            f"SNAPKV_XRAY_DAEMON_ADDRESS or AWS_XRAY_DAEMON_ADDRESS: no port {config.udp_port}"
        )
    return config.udp_ip, config.udp_port
