"""Losses are counted one by one and logged now and then."""

import io
import json
from functools import partial

from app.losses import REPORT_INTERVAL_S, LossCount
from app.telemetry.tracing.trace import log_lost
from tests.support.logs import captured_log


def reported(log: io.StringIO) -> list[tuple[int, str]]:
    """Return number and reason of each report."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [(line["num_lost"], line["reason"]) for line in lines if line["event"] == "traces_lost"]


def test_first_loss_is_logged_and_the_rest_is_summed_up() -> None:
    now_s = 0.0
    counted: list[int] = []
    losses = LossCount(partial(log_lost, "xray"), counted.append, clock=lambda: now_s)
    with captured_log() as log:
        losses.add(1, "OSError")
        losses.add(2, "OSError")
        losses.add(3, "queue_full")
        assert reported(log) == [(1, "OSError")]
        now_s = REPORT_INTERVAL_S
        losses.add(4, "queue_full")
        assert reported(log)[1:] == [(9, "queue_full")]
        losses.report()
        assert len(reported(log)) == 2
        losses.add(5, "OSError")
        losses.report()
        assert reported(log)[2:] == [(5, "OSError")]
    assert losses.num_lost == 15
    assert counted == [1, 2, 3, 4, 5]
