"""Sends commands to one node and reads their answers; it knows no blob and no topology."""

from collections.abc import Sequence
from typing import Any

#: A command as it is sent: its name and its arguments.
Command = Sequence[str | bytes | memoryview | int]


def exchange(client: Any, commands: Sequence[Command]) -> list[Any]:
    """Send commands at once and return their answers.

    Raises:
        ResponseError: The first that a command was answered with; all were sent.
        ConnectionError: The connection broke, or there was none.
        TimeoutError: The node or the call's time was too slow.
    """
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    # The library would put the command, and with it the value, into the error's text.
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def fetch(client: Any, keys: Sequence[str], values: Sequence[memoryview]) -> bool:
    """Ask for values of known lengths at once and read them into memory.

    Returns:
        Whether all of them were there and had their lengths.

    Raises:
        ResponseError: The node answered with an error.
        ConnectionError: The connection broke, or there was none.
        TimeoutError: The node or the call's time was too slow.
    """
    pool = client.connection_pool
    connection = pool.get_connection("GET")
    try:
        connection.send_packed_command(connection.pack_commands([("GET", key) for key in keys]))
        found: bool = connection.read_values(values)
    except BaseException:
        # What is left unread would be taken for the answers to the next commands.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return found
