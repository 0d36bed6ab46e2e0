"""Runs tasks on several threads that nobody has to wait for when the process ends.

The threads of `concurrent.futures` are joined at exit after all that is queued was done: a server
told to stop would first finish its download.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

_Task = TypeVar("_Task")

_TICK_S: Final = 0.25
#: How long threads get to see that they are not needed any more; they may hang in a read.
_FAREWELL_S: Final = 1.0


def run_parallel(
    tasks: Iterable[_Task],
    work: Callable[[_Task, threading.Event], None],
    *,
    num_threads: int,
    on_tick: Callable[[], None],
    tick_s: float = _TICK_S,
) -> None:
    """Do all tasks, or none further as soon as one fails.

    Args:
        tasks: What to do, in order.
        work: Does one task on one of the threads. The event is set when it should give up.
        num_threads: Tasks that run at once.
        on_tick: Called on the calling thread while it waits; what it raises ends the work.
        tick_s: Seconds between two such calls.

    Raises:
        Exception: What the first failing task raised.
    """
    queue, guard = iter(tasks), threading.Lock()
    stop, ended = threading.Event(), threading.Event()
    failures: list[Exception] = []
    num_running = num_threads

    def run_tasks() -> None:
        nonlocal num_running
        try:
            while not stop.is_set():
                with guard:
                    task = next(queue, None)
                if task is None:
                    break
                work(task, stop)
        except Exception as error:
            failures.append(error)
            ended.set()
        finally:
            with guard:
                num_running -= 1
                if num_running == 0:
                    ended.set()

    threads = [
        threading.Thread(target=run_tasks, name=f"snapkv-transfer-{number}", daemon=True)
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        while not ended.wait(tick_s):
            on_tick()
    finally:
        stop.set()
        for thread in threads:
            thread.join(_FAREWELL_S / num_threads)
    if failures:
        raise failures[0]
