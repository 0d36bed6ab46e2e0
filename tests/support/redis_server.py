"""Real Redis servers on loopback: a single one, with a list of users or TLS, or a cluster."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import valkey

from tests.support.served import free_port

#: What the stores need and no more, as docs/snapshots.md tells operators.
USER: Final = "snapkv"
PASSWORD: Final = "p@ss:w/rd"
USERS: Final = (
    "user default off",
    "user admin on >admin ~* &* +@all",
    f"user {USER} on >{PASSWORD} ~snapkv:* resetchannels -@all "
    "+get +set +unlink +scan +cluster|slots",
)
_READY_WITHIN_S: Final = 20.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server that runs.

    Attributes:
        port: Its port on 127.0.0.1.
        process: Its process.
    """

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where it listens, without TLS."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        """Return a client for what a test itself wants to see and do."""
        return valkey.Valkey(host="127.0.0.1", port=self.port, **options)


@contextmanager
def redis_server(
    program: str, folder: Path, *lines: str, port: int | None = None, port_name: str = "port"
) -> Iterator[RedisServer]:
    """Run a server that keeps nothing on disk.

    Args:
        program: Path of `redis-server`.
        folder: Empty folder for its configuration and log.
        lines: Further lines of its configuration.
        port: Where it listens; None for a port that is free.
        port_name: `port`, or `tls-port`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    config = [
        "bind 127.0.0.1",
        f"{port_name} {port}",
        'save ""',
        "appendonly no",
        f"dir {folder}",
        f"logfile {folder / 'redis.log'}",
        *lines,
    ]
    (folder / "redis.conf").write_text("\n".join(config) + "\n", encoding="utf-8")
    process = subprocess.Popen(
        [program, str(folder / "redis.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: _listens(port), process, folder / "redis.log")
        yield RedisServer(port, process)
    finally:
        process.kill()  # it has nothing to save
        process.wait()


@contextmanager
def redis_cluster(
    program: str, cli: str, folder: Path, num_nodes: int = 3
) -> Iterator[Sequence[RedisServer]]:
    """Run a cluster of primaries without replicas.

    Args:
        program: Path of `redis-server`.
        cli: Path of `redis-cli`.
        folder: Empty folder.
        num_nodes: Number of servers.
    """
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                redis_server(
                    program,
                    folder / str(number),
                    "cluster-enabled yes",
                    "cluster-config-file nodes.conf",
                    "cluster-node-timeout 2000",
                    # A node that dies must not take the others' slots with it.
                    "cluster-require-full-coverage no",
                    # By itself it is the port and 10,000, which may be no port.
                    f"cluster-port {free_port()}",
                )
            )
            for number in range(num_nodes)
        ]
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(
            [cli, "--cluster", "create", *addresses, "--cluster-yes"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=True,
        )
        for number, node in enumerate(nodes):
            with node.client() as client:
                _wait_until(
                    lambda client=client: (
                        len(client.execute_command("CLUSTER SLOTS")) == num_nodes
                        and client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
                    ),
                    node.process,
                    folder / str(number) / "redis.log",
                )
        yield nodes


def keys_in(server: RedisServer, **options: Any) -> dict[str, int]:
    """Return all keys of a server, with the seconds that each has to live; -1 for ever."""
    with server.client(**options) as client:
        return {key.decode(): client.ttl(key) for key in sorted(client.keys("*"))}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(is_ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        if is_ready():
            return
        time.sleep(_POLL_S)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    raise RuntimeError(f"redis-server is not ready:\n{text[-4_000:]}")
