"""Pulls from a fake S3 by rights and wrongs: the calls that tests of downloads share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from app.integrations.aws.weights.download import DownloadLimits
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.manifest import Manifest
from app.integrations.aws.weights.progress import TransferProgress
from app.integrations.aws.weights.pull import Puller
from tests.support.s3 import LOCATION, client_maker

WEIGHTS: Final = "model.safetensors"
NUM_PARTS: Final = 8
LIMITS: Final = DownloadLimits(max_parallel=4, max_attempts=3, retry_delay_s=0.001)


def pull(
    folder: Path,
    limits: DownloadLimits = LIMITS,
    on_progress: Callable[[TransferProgress], None] = lambda _: None,
    **client: Any,
) -> Manifest:
    """Pull the model into a folder."""
    puller = Puller(on_progress, create_client=client_maker(**client), limits=limits)
    return puller.to_folder(LOCATION, folder)


def refusal(folder: Path, limits: DownloadLimits = LIMITS, **client: Any) -> str:
    """Return the one line with which a pull fails; it leaves no folder."""
    with pytest.raises(WeightsError) as refused:
        pull(folder, limits, **client)
    assert not folder.exists()
    text = str(refused.value)
    assert "\n" not in text
    assert "secret" not in text
    return text


def staging_of(folder: Path) -> Path:
    """Return where a pull into a folder keeps what has come."""
    return folder.with_name(f".{folder.name}.partial")
