"""The folder that a download fills, and how it becomes a model's folder in one step.

It holds the manifest and every file in full length, with holes where parts are missing. Which
parts are there is known by hashing them, so no journal can disagree with the disk.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import read_manifest
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest

WRITE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE: Final = 0o644
_REMOVED_PREFIX: Final = ".removed-"
_BLOCK_BYTES: Final = 512  # the unit of `st_blocks`, whatever the file system's own


def prepare_staging(staging: Path, manifest: Manifest) -> None:
    """Make the folder, or take over what an earlier attempt at the same weights left in it.

    Raises:
        OSError: It cannot be written.
    """
    if not _is_for(staging, manifest):
        remove_folder(staging)
    staging.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        path = staging / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, WRITE_FLAGS, _FILE_MODE)
        try:
            if os.fstat(descriptor).st_size != file.size:
                os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)
    # Last: a folder without it is begun anew.
    (staging / MANIFEST_NAME).write_bytes(manifest.canonical)


def require_free_space(staging: Path, manifest: Manifest) -> None:
    """Refuse a download that the disk has no room for.

    Raises:
        WeightsError: It has not; says how much is needed and how much there is.
        OSError: The folder cannot be read.
    """
    written = sum(min(file.size, written_bytes(staging / file.name)) for file in manifest.files)
    needed, free = manifest.total_bytes - written, shutil.disk_usage(staging).free
    if needed > free:
        raise WeightsError(
            f"{staging.parent}: the disk is too full: the weights need {needed:,} more bytes and "
            f"{free:,} are free"
        )


def written_bytes(path: Path) -> int:
    """Return how much of a file with holes is on disk, in whole blocks."""
    return os.stat(path, follow_symlinks=False).st_blocks * _BLOCK_BYTES


def publish(staging: Path, target: Path) -> None:
    """Give a folder whose files were all verified its final name.

    Raises:
        OSError: It cannot be renamed.
    """
    _sync_folder(staging)
    staging.rename(target)
    _sync_folder(target.parent)


def remove_folder(folder: Path) -> int:
    """Remove a folder if it is there; return the bytes of its files.

    It loses its name first, so that a removal that is cut short leaves no half of a model behind.

    Raises:
        OSError: It cannot be removed.
    """
    removed = folder.with_name(_REMOVED_PREFIX + folder.name)
    if removed.exists():
        shutil.rmtree(removed)
    if not folder.exists():
        return 0
    num_bytes = folder_bytes(folder)
    folder.rename(removed)
    shutil.rmtree(removed)
    return num_bytes


def sweep_removed(parent: Path) -> None:
    """Finish removals that were cut short.

    Raises:
        OSError: Something cannot be removed.
    """
    for leftover in parent.glob(f"{_REMOVED_PREFIX}*"):
        shutil.rmtree(leftover)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, holes counted in: they will be filled."""
    return sum(
        os.stat(os.path.join(path, name), follow_symlinks=False).st_size
        for path, _, names in os.walk(folder)
        for name in names
    )


def _is_for(staging: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(staging) == manifest
    except WeightsError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
