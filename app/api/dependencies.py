"""What routes get handed: the parts that `create_app` built."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from app.services.engine_host import EngineHost
from app.services.generation import GenerationService
from app.telemetry.metrics import ServiceMetrics


@dataclass(frozen=True, slots=True)
class AppParts:
    """The objects of one app, made once and shared by its requests."""

    engine_host: EngineHost
    generation: GenerationService
    metrics: ServiceMetrics


def get_parts(request: Request) -> AppParts:
    """Return the parts of the app that serves this request."""
    parts: AppParts = request.app.state.parts
    return parts


Parts = Annotated[AppParts, Depends(get_parts)]
