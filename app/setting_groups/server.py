"""Settings of the HTTP server: where it listens, what it accepts and how it ends."""

import re
from typing import Final, Literal

from pydantic import BaseModel, Field, field_validator

#: Kubernetes and Docker inject these for a service called `snapkv` or `snapkv-...`.
SERVICE_LINK: Final = re.compile(
    r"SNAPKV_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)


class ServerSettings(BaseModel):
    """How the HTTP server runs."""

    host: str = Field("127.0.0.1", min_length=1, description="Address the server listens on.")
    port: int = Field(
        8000, ge=0, le=65_535, description="Port the server listens on; 0 takes a free one."
    )
    admin_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of the second port, if there is one."
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="Second port, with `/metrics` and `/health` and without keys; `/metrics` is "
        "then on no other.",
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1_024, description="Largest request body; more is answered with 413."
    )
    body_timeout_s: int = Field(
        60, ge=1, le=3_600, description="Seconds that a request's body may take to arrive."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    shutdown_timeout_s: int = Field(
        30,
        ge=0,
        le=3_600,
        description="Seconds that requests in flight get to finish on SIGTERM or SIGINT.",
    )
    stall_timeout_s: int = Field(
        60,
        ge=1,
        le=86_400,
        description="Seconds that one engine step may take before `/health/ready` answers 503 with "
        "status `stalled`.",
    )

    @field_validator("port", "admin_port", mode="before")
    @classmethod
    def _reject_service_link(cls, value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "must be a port number; this looks like the link that Kubernetes injects for a "
                "Service named snapkv or snapkv-admin: set enableServiceLinks to false or rename "
                "the Service"
            )
        return value
