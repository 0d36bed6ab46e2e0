"""Whether the process lives, and whether it can serve."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from app.api.dependencies import Parts

router = APIRouter(prefix="/health", tags=["health"])


class Alive(BaseModel):
    """The process needs no restart."""

    status: Literal["alive"]


class Dead(BaseModel):
    """Only a restart helps."""

    status: Literal["dead"]


class Ready(BaseModel):
    """What is served."""

    status: Literal["ready"]
    model: str
    max_model_len: int
    device: str
    dtype: str


class NotReady(BaseModel):
    """Why requests would be refused."""

    status: str


@router.get(
    "/live",
    summary="Is the process alive?",
    response_model=Alive,
    responses={503: {"model": Dead, "description": "Only a restart helps."}},
)
async def live(parts: Parts) -> JSONResponse:
    """Answer 200 while the process loads, serves or drains, 503 when only a restart helps."""
    if parts.engine_host.is_alive:
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "dead"}, status_code=503)


@router.get(
    "/ready",
    summary="Can it serve?",
    response_model=Ready,
    responses={503: {"model": NotReady, "description": "Not now; the status says why."}},
)
async def ready(parts: Parts) -> JSONResponse:
    """Answer 200 with the model once it is warm, 503 with the reason otherwise."""
    host = parts.engine_host
    if (status := host.readiness) != "ready":
        return JSONResponse({"status": status}, status_code=503, headers={"Retry-After": "5"})
    engine = host.engine()
    return JSONResponse(
        {
            "status": "ready",
            "model": engine.model_name,
            "max_model_len": engine.max_model_len,
            "device": engine.device,
            "dtype": engine.dtype,
        }
    )
