"""The one place where the parts of the service are put together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from app.api.dependencies import AppParts
from app.api.errors import install_error_handlers, response_for
from app.api.routes import generate, health, metrics, openai
from app.middleware.body_limit import BodyLimitMiddleware
from app.middleware.request_id import RequestIdMiddleware
from app.middleware.request_log import RequestLogMiddleware
from app.middleware.tracing import TracingMiddleware
from app.middleware.unhandled import UnhandledErrorMiddleware
from app.services.engine_host import EngineHost
from app.services.generation import GenerationService
from app.services.ports import GenerationEngine
from app.settings import Settings
from app.telemetry.generation_log import GenerationLog
from app.telemetry.metrics import ServiceMetrics
from app.telemetry.tracing.build import build_tracer
from app.telemetry.tracing.trace import GenerationTraces
from snapkv_core import AsyncEngine, EngineConfig, EngineObserver

LoadEngine = Callable[[EngineConfig, EngineObserver], GenerationEngine]


def create_app(
    settings: Settings,
    engine: GenerationEngine | None = None,
    *,
    load_engine: LoadEngine = AsyncEngine.load,
    on_load_failed: Callable[[str], None] | None = None,
) -> FastAPI:
    """Build the service.

    The model is loaded in the background once the app runs, so health checks are answered from
    the start.

    Args:
        settings: Settings, as `load_settings` returns them.
        engine: An engine that is loaded and not started, instead of loading one; what it
            observes is its owner's business.
        load_engine: Loads the engine; blocking, called on a thread of its own.
        on_load_failed: Called with one line when loading failed; whoever runs the server ends
            it. Without it the app lives on and reports that it is dead.

    Returns:
        The app; it owns the engine from its start to its shutdown.

    Raises:
        SettingsError: A setting is not acceptable.
    """
    engine_config = settings.to_engine_config()
    default_compression = settings.default_compression()
    service_metrics = ServiceMetrics()
    tracer = build_tracer(settings)

    def load() -> GenerationEngine:
        return engine if engine is not None else load_engine(engine_config, service_metrics.engine)

    host = EngineHost(
        load,
        on_ready=lambda loaded: service_metrics.engine.watch(loaded.stats, loaded.model_name),
        on_failed=on_load_failed or (lambda _reason: None),
        default_compression=default_compression,
        stall_timeout_s=settings.stall_timeout_s,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app  # the parts are in the closure
        host.start()
        try:
            yield
        finally:
            await host.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    app = FastAPI(
        title="SnapKV inference",
        summary="LLM inference with a KV-cache budget per request.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.parts = AppParts(
        engine_host=host,
        generation=GenerationService(
            host.engine, default_compression, (GenerationLog(), GenerationTraces())
        ),
        metrics=service_metrics,
    )
    for router in (
        generate.router,
        openai.router,
        openai.models_router,
        health.router,
        metrics.router,
    ):
        app.include_router(router)
    install_error_handlers(app)
    # Added last is outermost: a request gets its name first and is logged under it.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(UnhandledErrorMiddleware, to_response=response_for)
    app.add_middleware(RequestLogMiddleware, on_request=service_metrics.count_request)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    app.add_middleware(RequestIdMiddleware)
    return app
