"""Reads the settings again while the service runs, and hands on those that may change by then."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from app.settings import Settings, SettingsError

#: Fields that are asked for anew with each request; a change of any other one needs a new start.
LIVE_FIELDS: Final = (
    "api_keys",
    "kernel_size",
    "key_limits",
    "max_capacity_prompt",
    "method",
    "pooling",
    "window_size",
)

UNCHANGED: Final = "unchanged"
APPLIED: Final = "applied"
RESTART_NEEDED: Final = "restart_needed"
FAILED: Final = "failed"

#: Replicas that started together shall not read together for ever.
_JITTER: Final = 0.1

_log = structlog.get_logger("snapkv.settings")


class SettingsRefresh:
    """Reads settings on a daemon thread, which owns all state; changes arrive on the event loop."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings] | None,
        *,
        on_change: Callable[[Settings], None],
        count_outcome: Callable[[str], None],
    ) -> None:
        """Remember how to read.

        Args:
            settings: Those that are in force.
            load: Returns the settings a new process would start with; blocking. None never reads.
            on_change: Called on the event loop with those in force from now on.
            count_outcome: Told what came of each time, on the thread.
        """
        self._settings = settings
        self._load = load
        self._on_change = on_change
        self._count_outcome = count_outcome
        self._pending: dict[str, object] = {}
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to read every `secret_refresh_s`, more or less; nothing without a secret."""
        if self._load is None or self._settings.secret_id is None:
            return
        if self._settings.secret_refresh_s == 0:
            return
        # A daemon thread: the end of the process must not wait for a call to AWS.
        threading.Thread(
            target=self._run,
            args=(self._load, asyncio.get_running_loop()),
            name="snapkv-settings",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """Read no more; what is being read is not waited for."""
        self._stopping.set()

    def _run(self, load: Callable[[], Settings], loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping.wait(
            self._settings.secret_refresh_s * random.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        ):
            try:
                outcome = self._take(load(), loop)
            except SettingsError as error:
                outcome = FAILED
                _log.warning("settings_refresh_failed", reason=str(error))
            except Exception:
                outcome = FAILED
                _log.exception("settings_refresh_crashed")
            self._count_outcome(outcome)

    def _take(self, found: Settings, loop: asyncio.AbstractEventLoop) -> str:
        """Take over what may change; keeps everything when any of it is not acceptable.

        Raises:
            SettingsError: They do not go together with those that stay in force.
        """
        changed = {
            name: getattr(found, name)
            for name in Settings.model_fields
            if getattr(found, name) != getattr(self._settings, name)
        }
        live = {name: value for name, value in changed.items() if name in LIVE_FIELDS}
        if "api_keys" in live and not live["api_keys"]:
            # Without keys nobody is asked for one: no slip in a secret may open a running service.
            del live["api_keys"]
        pending = {name: value for name, value in changed.items() if name not in live}
        if live:
            kept = {name: getattr(self._settings, name) for name in pending}
            settings = found.model_copy(update=kept)
            settings.default_compression()
            settings.require_usable_limits()
            self._settings = settings
            # The loop is closed when the process did not wait for this thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(partial(self._on_change, settings))
            _log.info("settings_refreshed", fields=sorted(live))
        if pending and pending != self._pending:
            _log.warning("settings_restart_needed", fields=sorted(pending))
        self._pending = pending
        if live:
            return APPLIED
        return RESTART_NEEDED if pending else UNCHANGED
