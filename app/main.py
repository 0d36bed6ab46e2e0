"""The one place where the parts of the service are put together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from app.api.dependencies import AppParts
from app.api.errors import install_error_handlers, response_for
from app.api.routes import docs, generate, health, metrics, openai, playground, tokenize
from app.integrations.aws.request_log import FLUSH_TIMEOUT_S, RequestLog, open_request_log
from app.integrations.aws.weights.models import S3Models, s3_models
from app.integrations.snapshot_tiers import open_snapshot_tiers
from app.middleware.access import AccessMiddleware
from app.middleware.body_limit import BodyLimitMiddleware
from app.middleware.rate_limits import RateLimitHeadersMiddleware
from app.middleware.request_id import RequestIdMiddleware
from app.middleware.request_log import RequestLogMiddleware
from app.middleware.security_headers import SecurityHeadersMiddleware
from app.middleware.tracing import TracingMiddleware
from app.middleware.unhandled import UnhandledErrorMiddleware
from app.records import RecordSink
from app.services.access import AccessControl
from app.services.engine_host import EngineHost
from app.services.generation import GenerationService
from app.services.ports import GenerationEngine
from app.services.rate_limits import Quotas
from app.services.settings_refresh import SettingsRefresh
from app.services.tokenizing import TokenizingService
from app.settings import Settings
from app.telemetry.emf import EmfMetrics
from app.telemetry.generation_log import GenerationLog
from app.telemetry.metrics import ServiceMetrics
from app.telemetry.tracing.build import build_tracer
from app.telemetry.tracing.trace import GenerationTraces, RequestTracer
from snapkv_core import AsyncEngine, EngineConfig, EngineObserver, weights_fingerprint

LoadEngine = Callable[[EngineConfig, EngineObserver], GenerationEngine]


def create_app(
    settings: Settings,
    engine: GenerationEngine | None = None,
    *,
    load_engine: LoadEngine = AsyncEngine.load,
    on_load_failed: Callable[[str], None] | None = None,
    reload_settings: Callable[[], Settings] | None = None,
) -> FastAPI:
    """Build the service.

    The model is loaded in the background once the app runs, so health checks are answered from
    the start.

    Args:
        settings: Settings, as `load_settings` returns them.
        engine: An engine that is loaded and not started, instead of loading one; what it
            observes, and where its snapshots are, is its owner's business.
        load_engine: Loads the engine; blocking, called on a thread of its own.
        on_load_failed: Called with one line when loading failed; whoever runs the server ends
            it. Without it the app lives on and reports that it is dead.
        reload_settings: Reads the settings anew; blocking, called on a thread of its own. Without
            it they stay as they are.

    Returns:
        The app; it owns the engine from its start to its shutdown.

    Raises:
        SettingsError: A setting is not acceptable.
    """
    engine_config = settings.to_engine_config()
    default_compression = settings.default_compression()
    service_metrics = ServiceMetrics(settings.price_per_hour)
    emf = EmfMetrics(settings.service_name) if settings.emf == "stdout" else None
    tracer = build_tracer(settings, service_metrics.count_lost_traces)
    models = s3_models(
        settings.weights_cache_dir,
        settings.weights_cache_max_bytes,
        lambda state: service_metrics.weights.on_progress(state.received_bytes, state.elapsed_s),
    )

    snapshots = service_metrics.snapshots
    # An engine that was given has whatever store its owner gave it.
    store = None
    if engine is None:
        store = open_snapshot_tiers(settings, snapshots.on_store_error)

    def load() -> GenerationEngine:
        if engine is not None:
            return engine
        config = models.localise(engine_config)
        loaded = load_engine(config, service_metrics.engine)
        if store is not None:
            fingerprint = models.fingerprint or weights_fingerprint(config)
            loaded.use_snapshots(store, fingerprint, settings.snapshot_policy(), snapshots)
        return loaded  # which closes the store at its end

    def on_ready(loaded: GenerationEngine) -> None:
        service_metrics.engine.watch(loaded.stats, loaded.model_name)
        snapshots.watch(lambda: loaded.stats().snapshots)
        if emf is not None:
            emf.watch(loaded.stats, loaded.model_name)

    host = EngineHost(
        load,
        on_ready=on_ready,
        on_failed=on_load_failed or (lambda _reason: None),
        default_compression=default_compression,
        stall_timeout_s=settings.stall_timeout_s,
    )
    request_log = open_request_log(settings, service_metrics.aws.count_request_log_items)
    sinks: tuple[RecordSink | None, ...] = (GenerationLog(), GenerationTraces(), emf, request_log)
    quotas = Quotas(settings.key_limits)
    generation = GenerationService(
        host.engine, default_compression, [sink for sink in sinks if sink is not None], quotas
    )
    access = AccessControl(settings.keys_in_force)

    def on_change(found: Settings) -> None:
        generation.use_default_compression(found.default_compression())
        access.use_keys(found.keys_in_force)
        quotas.use_limits(found.key_limits)

    refresh = SettingsRefresh(
        settings,
        reload_settings,
        on_change=on_change,
        count_outcome=service_metrics.aws.count_settings_refresh,
    )

    app = FastAPI(
        title="SnapKV inference",
        summary="LLM inference with a KV-cache budget per request.",
        lifespan=_lifespan(host, refresh, models, emf, request_log, tracer),
        redirect_slashes=False,
        # FastAPI's own pages load what they are made of from other machines.
        docs_url=None,
        redoc_url=None,
    )
    app.state.parts = AppParts(
        engine_host=host,
        generation=generation,
        tokenizing=TokenizingService(host.engine),
        metrics=service_metrics,
    )
    _include_routes(app, with_metrics=settings.admin_port is None)
    if settings.playground:
        app.include_router(playground.router)
    install_error_handlers(app)
    _add_middleware(app, settings, service_metrics, access, quotas, tracer)
    return app


def create_admin_app(parts: AppParts) -> FastAPI:
    """Build what the second port serves: health and metrics of an app, whoever asks.

    Args:
        parts: Those of the app that is looked at, which starts and ends them.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.parts = parts
    app.include_router(health.router)
    app.include_router(metrics.router)
    install_error_handlers(app)
    app.add_middleware(UnhandledErrorMiddleware, to_response=response_for)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(RequestLogMiddleware, on_request=parts.metrics.count_request)
    app.add_middleware(RequestIdMiddleware)
    return app


def _lifespan(
    host: EngineHost,
    refresh: SettingsRefresh,
    models: S3Models,
    emf: EmfMetrics | None,
    request_log: RequestLog | None,
    tracer: RequestTracer | None,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return what starts the parts with the server, and ends them in the order of what they need.

    Records and traces outlast the engine: the last answers end with it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app  # the parts are in the closure
        host.start()
        if request_log is not None:
            request_log.start()
        refresh.start()
        try:
            yield
        finally:
            refresh.stop()
            if emf is not None:
                await emf.stop()
            await host.stop()
            if request_log is not None:
                await asyncio.to_thread(request_log.close, FLUSH_TIMEOUT_S)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            models.release()

    return lifespan


def _include_routes(app: FastAPI, *, with_metrics: bool) -> None:
    for router in (
        generate.router,
        tokenize.router,
        openai.router,
        openai.models_router,
        health.router,
        docs.router,
    ):
        app.include_router(router)
    if with_metrics:
        app.include_router(metrics.router)


def _add_middleware(
    app: FastAPI,
    settings: Settings,
    service_metrics: ServiceMetrics,
    access: AccessControl,
    quotas: Quotas,
    tracer: RequestTracer | None,
) -> None:
    # Added last is outermost: a request gets its name first and is logged under it.
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
    )
    app.add_middleware(RateLimitHeadersMiddleware, states_of=quotas.states_of)
    app.add_middleware(AccessMiddleware, access=access, to_response=response_for)
    app.add_middleware(UnhandledErrorMiddleware, to_response=response_for)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(RequestLogMiddleware, on_request=service_metrics.count_request)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    app.add_middleware(RequestIdMiddleware)
