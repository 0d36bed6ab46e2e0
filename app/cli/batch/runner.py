"""Keeps as many lines in flight as the service takes, and writes their results in order."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from app.cli.batch.figures import BatchProgress, Figures
from app.cli.batch.lines import (
    BatchRequest,
    LineError,
    RawLine,
    SeenIds,
    read_request,
    to_json_bytes,
)
from app.cli.batch.results import ResultFile, error_record
from app.cli.batch.service import Service

#: What may wait for the result of an earlier line; the next lines are not begun before that.
MAX_HELD_LINES: Final = 1_024
_MAX_HELD_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Result:
    text: bytes
    figures: Figures


@dataclass(frozen=True, slots=True)
class _Begun:
    """A line whose result is not written yet; the future gives None where there will be none."""

    end: int
    result: asyncio.Future[_Result | None]


class BatchRunner:
    """One run over the lines that have no result yet.

    Lines are begun in the order of the input and end in any order. A result is held until all
    earlier ones are written, so the output is a beginning of the whole one at any moment: that is
    all a later run needs to know.
    """

    def __init__(self, results: ResultFile, seen: SeenIds, progress: BatchProgress) -> None:
        """Take the parts; whoever made them closes them."""
        self._results = results
        self._seen = seen
        self._progress = progress
        self._begun: deque[_Begun] = deque()
        self._running: set[asyncio.Future[_Result | None]] = set()
        self._held_bytes = 0

    async def run(self, service: Service, lines: Iterator[RawLine]) -> None:
        """Answer all lines, or those in flight once the run is to end.

        Raises:
            BatchStoppedError: The run cannot go on; what was answered up to there is written.
        """
        try:
            while True:
                are_all_begun = self._begin(service, lines)
                self._write_finished()
                if are_all_begun and not self._running:
                    return
                await self._next_change()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _begin(self, service: Service, lines: Iterator[RawLine]) -> bool:
        """Begin lines while there is room; true when there are no more to begin."""
        while not service.ending.is_set():
            if not self._has_room(service.max_in_flight):
                return False
            line = next(lines, None)
            if line is None:
                return True
            request = read_request(line, self._seen)
            if isinstance(request, LineError):
                result: asyncio.Future[_Result | None] = asyncio.Future()
                result.set_result(self._held(error_record(request)))
            else:
                result = asyncio.create_task(self._answer(service, request))
                self._running.add(result)
            self._begun.append(_Begun(line.end, result))
        return True

    def _has_room(self, max_in_flight: int) -> bool:
        num_held = len(self._begun) - len(self._running)
        return (
            len(self._running) < max_in_flight
            and num_held < MAX_HELD_LINES
            and self._held_bytes < _MAX_HELD_BYTES
        )

    async def _answer(self, service: Service, request: BatchRequest) -> _Result | None:
        record = await service.answer(request)
        return None if record is None else self._held(record)

    def _held(self, record: dict[str, Any]) -> _Result:
        figures = Figures()
        figures.add(record)
        text = to_json_bytes(record) + b"\n"
        self._held_bytes += len(text)
        return _Result(text, figures)

    def _write_finished(self) -> None:
        while self._begun and self._begun[0].result.done():
            result = self._begun[0].result.result()
            if result is None:
                return  # and later lines would leave a gap
            self._results.write(result.text)
            self._held_bytes -= len(result.text)
            self._progress.on_written(result.figures, self._begun.popleft().end)

    async def _next_change(self) -> None:
        if not self._running:
            await asyncio.sleep(0)  # for signals, where thousands of lines are refused at once
            return
        done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        failures = [failure for result in done if (failure := result.exception()) is not None]
        if failures:
            self._write_finished()  # what need not wait for a line that failed
            raise failures[0]
