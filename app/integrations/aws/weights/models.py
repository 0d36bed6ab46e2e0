"""Lets an engine load `s3://` models: fetches them first, and keeps them while they are in use."""

from dataclasses import replace
from pathlib import Path

from app.integrations.aws.weights.cache import HeldWeights, WeightsCache
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.location import S3Location, is_s3_url
from app.integrations.aws.weights.progress import ProgressCallback
from app.integrations.aws.weights.pull import Puller
from snapkv_core import EngineConfig, ModelLoadError


class S3Models:
    """Turns the S3 locations of engine configurations into local folders."""

    def __init__(self, cache: WeightsCache, puller: Puller) -> None:
        self._cache = cache
        self._puller = puller
        self._held: list[HeldWeights] = []

    def localise(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration whose model lies on this machine; blocks while it is fetched.

        Any other model is left as it is. The name it is served under stays the one of its place
        in S3.

        Raises:
            ModelLoadError: The weights cannot be had; one line that names the object.
            InvalidParameterError: The model is no place in S3.
        """
        if not is_s3_url(config.model):
            return config
        location = S3Location.parse(config.model)
        try:
            held = self._puller.to_cache(location, self._cache)
        except WeightsError as error:
            raise ModelLoadError(str(error)) from error
        self._held.append(held)
        return replace(
            config,
            model=str(held.folder),
            revision=None,
            served_model_name=config.served_model_name or location.model_name,
        )

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of the manifest of the model fetched last; None when none came from S3."""
        return self._held[-1].fingerprint if self._held else None

    def release(self) -> None:
        """Let the folders be removed when others need room."""
        while self._held:
            self._held.pop().release()


def s3_models(
    cache_dir: str | Path, cache_max_bytes: int | None, on_progress: ProgressCallback
) -> S3Models:
    """Put the parts together for a process that loads models.

    Args:
        cache_dir: Where models are kept.
        cache_max_bytes: Bytes they may have together; None sets no limit.
        on_progress: Told a few times a second how far a download is.
    """
    return S3Models(WeightsCache(cache_dir, cache_max_bytes), Puller(on_progress))
