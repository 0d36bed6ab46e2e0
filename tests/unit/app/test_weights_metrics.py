"""Metrics of downloads: one after the other in one process."""

from prometheus_client import CollectorRegistry

from app.telemetry.weights_metrics import WeightsMetrics


def test_bytes_of_several_downloads_add_up() -> None:
    """Each begins at zero; the counter does not."""
    registry = CollectorRegistry()
    metrics = WeightsMetrics(registry)
    for received_bytes, elapsed_s in [(0, 0.0), (60, 1.0), (100, 2.0), (30, 0.5), (40, 0.75)]:
        metrics.on_progress(received_bytes, elapsed_s)
    assert registry.get_sample_value("snapkv_weights_bytes_total") == 140
    assert registry.get_sample_value("snapkv_weights_download_seconds") == 0.75
