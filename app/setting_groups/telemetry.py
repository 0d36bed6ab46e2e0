"""Settings of traces, log lines and metrics."""

from typing import Literal

from pydantic import BaseModel, Field


class TelemetrySettings(BaseModel):
    """What is told to whom about each request."""

    service_name: str = Field(
        "snapkv-inference",
        min_length=1,
        max_length=200,
        description="Name of the service in traces and CloudWatch metrics.",
    )
    tracing: Literal["off", "xray", "otlp"] = Field(
        "off",
        description="Where traces go: `xray` sends segments to the X-Ray daemon, `otlp` spans to a "
        "collector.",
    )
    trace_reservoir_per_s: int = Field(
        1,
        ge=0,
        le=10_000,
        description="Requests traced each second whatever the rate, unless the caller decided.",
    )
    trace_sampling_rate: float = Field(
        0.05, ge=0.0, le=1.0, description="Share of the further requests that is traced."
    )
    xray_daemon_address: str = Field(
        "127.0.0.1:2000",
        pattern=r"^[^\s:]+:[0-9]{1,5}$",
        description="Host and UDP port of the X-Ray daemon.",
    )
    otlp_endpoint: str = Field(
        "http://127.0.0.1:4318/v1/traces",
        pattern=r"^https?://\S+$",
        description="Address that takes OTLP traces over HTTP.",
    )
    emf: Literal["off", "stdout"] = Field(
        "stdout",
        description="Whether log lines that CloudWatch reads as metrics are written.",
    )
    price_per_hour: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="What the machine costs per hour, for the cost of tokens in metrics.",
    )
