"""Whether the process lives, and whether it can serve."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.api.dependencies import Parts

router = APIRouter(prefix="/health", tags=["health"])


@router.get("/live", summary="Is the process alive?")
async def live(parts: Parts) -> JSONResponse:
    """Answer 200 while the process loads, serves or drains, 503 when only a restart helps."""
    if parts.engine_host.is_alive:
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "dead"}, status_code=503)


@router.get("/ready", summary="Can it serve?")
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
