"""Names a model by its content, so that two processes know whether theirs are the same."""

import hashlib
from pathlib import Path
from typing import Final

from snapkv_core.config import EngineConfig
from snapkv_core.errors import ModelLoadError
from snapkv_core.models.loader import locate_model

#: What answers depend on. Whatever is not read of it (optimiser states, say) does no harm.
_CONFIG: Final = "config.json"
_WEIGHTS: Final = ("*.safetensors", "*.bin")


def weights_fingerprint(config: EngineConfig) -> str:
    """Hash the weights of a model that was loaded; blocks for as long as reading them takes.

    Args:
        config: What it was loaded from.

    Returns:
        64 hex digits; the same for the same files, wherever they lie.

    Raises:
        ModelLoadError: There are no weights, or a file cannot be read any more.
    """
    folder = _folder_of(config)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not weights:
        raise ModelLoadError(f"{folder} holds no weights that could be told from others")
    whole = hashlib.sha256()
    try:
        # On the caller's thread: an executor's would keep the process from ending meanwhile.
        for path in (folder / _CONFIG, *weights):
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ModelLoadError(f"a file of the model in {folder} cannot be read: {error}") from error
    return whole.hexdigest()


def _folder_of(config: EngineConfig) -> Path:
    source, revision = locate_model(config)
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file  # late, as in loading

    # Of the hub's cache, into which loading has just put it.
    found = cached_file(source, _CONFIG, revision=revision, local_files_only=True)
    return Path(str(found)).parent
