"""Builds the tracer that the settings ask for."""

from collections.abc import Callable

from app.settings import Settings
from app.telemetry.tracing.headers import ReadParent, read_amazon, read_w3c
from app.telemetry.tracing.sampling import LocalSampler
from app.telemetry.tracing.trace import RequestTracer, TraceExporter


def build_tracer(settings: Settings, count_lost: Callable[[int], None]) -> RequestTracer | None:
    """Return the tracer, to be closed by the caller; None when tracing is off.

    Args:
        settings: Settings, as `load_settings` returns them.
        count_lost: Told of segments or spans that never reached their collector.

    Raises:
        SettingsError: The daemon's address cannot be read.
    """
    if settings.tracing == "off":
        return None
    exporter: TraceExporter
    read_parent: ReadParent
    # Imported when chosen: each SDK takes a while, and X-Ray's writes files when it sees Lambda.
    if settings.tracing == "xray":
        from app.telemetry.tracing.xray import XRayExporter

        exporter = XRayExporter(settings.service_name, settings.xray_daemon_address, count_lost)
        read_parent = read_amazon
    else:
        from app.telemetry.tracing.otlp import OtlpExporter

        exporter = OtlpExporter(settings.service_name, settings.otlp_endpoint, count_lost)
        read_parent = read_w3c
    sampler = LocalSampler(settings.trace_reservoir_per_s, settings.trace_sampling_rate)
    return RequestTracer(exporter, sampler, read_parent)
