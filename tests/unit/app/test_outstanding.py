"""What a sender has taken ends once: sent, lost, or given up when the sender closes."""

from aws_xray_sdk.core.models.segment import Segment

from app.losses import LossCount
from app.telemetry.tracing.outstanding import Outstanding
from app.telemetry.tracing.xray_sender import SegmentSender
from tests.support.xray_daemon import XRayDaemon


def outstanding(limit: int | None = None) -> tuple[Outstanding, LossCount, list[str]]:
    """Return a count, what it adds to, and the reasons that will be said."""
    reasons: list[str] = []
    losses = LossCount(lambda num, reason: reasons.append(f"{num} {reason}"))
    return Outstanding(losses, limit), losses, reasons


def test_what_is_left_at_the_end_is_lost() -> None:
    count, losses, reasons = outstanding()
    assert all(count.take() for _ in range(5))
    count.settle(2)
    count.settle(1, "refused")
    count.give_up()
    assert (losses.num_lost, reasons) == (3, ["1 refused", "2 not_sent_at_close"])


def test_nothing_is_lost_twice() -> None:
    """A call that hung until after the end may yet succeed or fail."""
    count, losses, _ = outstanding()
    count.take()
    count.give_up()
    count.settle(1, "refused")
    assert losses.num_lost == 1


def test_beyond_the_limit_the_queue_has_dropped() -> None:
    count, losses, _ = outstanding(limit=2)
    for _ in range(5):
        assert count.take()
    assert losses.num_lost == 3
    count.settle(2)
    count.give_up()
    assert losses.num_lost == 3


def test_what_comes_late_is_lost_while_the_rest_is_sent() -> None:
    count, losses, _ = outstanding()
    count.take()
    count.stop_taking()
    assert not count.take()
    count.settle(1)
    count.give_up()
    assert losses.num_lost == 1


def test_segment_after_the_end_is_lost() -> None:
    """A request that outlives the shutdown closes its segment when nobody sends any more."""
    counted: list[int] = []
    with XRayDaemon() as daemon:
        sender = SegmentSender(daemon.address, counted.append)
        sender.send(Segment("early"))
        sender.close()
        sender.send(Segment("late"))
    assert (counted, sender.losses.num_lost) == ([1], 1)
