"""The metrics page for Prometheus."""

from fastapi import APIRouter, Response

from app.api.dependencies import Parts
from app.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}},
        }
    },
)
async def metrics(parts: Parts) -> Response:
    """Answer with every metric in Prometheus' text format."""
    return Response(parts.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
