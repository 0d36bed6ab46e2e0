"""Names a model by its content, so that two processes know whether theirs are the same."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from transformers.utils.hub import cached_file

from snapkv_core.config import EngineConfig
from snapkv_core.errors import ModelLoadError
from snapkv_core.models.loader import locate_model

#: Files that say which KV a token has, in the order in which transformers looks for weights.
_CONFIG: Final = "config.json"
_WEIGHTS: Final = ("*.safetensors", "*.bin")
_BLOCK_BYTES: Final = 1 << 20
_NUM_THREADS: Final = 8


def weights_fingerprint(config: EngineConfig) -> str:
    """Hash the weights of a model that was loaded; blocks for as long as reading them takes.

    Args:
        config: What it was loaded from.

    Returns:
        64 hex digits; the same for the same files, wherever they lie and whatever they are called.

    Raises:
        ModelLoadError: A file cannot be read any more.
    """
    folder = _folder_of(config)
    try:
        return _hash_folder(folder)
    except OSError as error:
        raise ModelLoadError(f"a file of the model in {folder} cannot be read: {error}") from error


def _folder_of(config: EngineConfig) -> Path:
    source, revision = locate_model(config)
    if Path(source).is_dir():
        return Path(source)
    # Of the hub's cache, into which loading has just put it.
    found = cached_file(source, _CONFIG, revision=revision, local_files_only=True)
    return Path(str(found)).parent


def _hash_folder(folder: Path) -> str:
    weights: list[Path] = []
    for pattern in _WEIGHTS:
        weights = weights or sorted(folder.glob(pattern))
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fingerprint") as threads:
        digests = threads.map(_hash_file, (folder / _CONFIG, *weights))
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
