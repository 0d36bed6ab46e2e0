"""A server whose engine costs nothing: `python -m benchmarks.telemetry_server on|off`.

Settings come from the environment. `off` also keeps the Prometheus metrics from counting, which no
setting does.
"""

import sys
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from tests.support.fake_server import main


def silence_prometheus() -> None:
    """Make each metric of this process take and keep nothing."""

    def ignore(*_: Any, **__: Any) -> None:
        pass

    for kind, names in (
        (Counter, ("inc",)),
        (Gauge, ("inc", "dec", "set")),
        (Histogram, ("observe",)),
    ):
        for name in names:
            setattr(kind, name, ignore)
    # Looking a label up is a cost of its own.
    MetricWrapperBase.labels = lambda metric, *_, **__: metric  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:] == ["off"]:
        silence_prometheus()
    sys.exit(main(load_s=0.0, delay_s=0.0))
