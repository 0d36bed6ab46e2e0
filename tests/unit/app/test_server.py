"""What the server does around its engine."""

import gc

from app.cli.server import settled
from app.telemetry.metrics import ServiceMetrics
from snapkv_core import EngineConfig, EngineObserver
from tests.support.fake_engine import FakeEngine


def test_what_is_there_after_loading_is_not_walked_through_again() -> None:
    """A full collection then has nothing of the modules and the model to look at."""
    engine = FakeEngine()

    def load(config: EngineConfig, observer: EngineObserver) -> FakeEngine:
        return engine.take_over(config, observer)

    try:
        assert settled(load)(EngineConfig(), ServiceMetrics(None).engine) is engine
        assert not any(tracked is engine.config for tracked in gc.get_objects())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
