"""A model's folder on this machine: listed, hashed into a manifest, compared with one."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.hashing import hash_file, hash_with_parts
from app.integrations.aws.weights.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    PART_BYTES,
    Manifest,
    ManifestFile,
    make_manifest,
    parse_manifest,
    refusal_of,
)

_MAX_PROBLEMS_TOLD: Final = 5

#: Size and time of the last change, by name.
Listing = dict[str, tuple[int, int]]


def ignore_bytes(num_bytes: int) -> None:
    """Take a count that nobody wants to see."""


def list_model_files(folder: Path) -> Listing:
    """List the files of a model's folder that belong in a manifest.

    Hidden files and folders, such as those of version control, and a manifest are left out.

    Raises:
        WeightsError: It cannot be read, or something in it may not be part of a model: a link, a
            pickled file, code.
    """
    listing: Listing = {}
    try:
        for entry, name in _walk(folder, ""):
            reason = _refusal_of_entry(entry, name)
            if reason is not None:
                raise WeightsError(f"{folder / name}: {reason}")
            found = entry.stat(follow_symlinks=False)
            listing[name] = (found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise WeightsError(f"{error.filename or folder}: {error.strerror}") from None
    return listing


def build_manifest(
    folder: Path, *, part_size: int = PART_BYTES, on_bytes: Callable[[int], None] = ignore_bytes
) -> Manifest:
    """Hash a model's folder.

    Args:
        folder: A folder with safetensors weights.
        part_size: Bytes that readers will fetch and check at once.
        on_bytes: Told how many more bytes were read.

    Raises:
        WeightsError: The folder is no model that may be stored, or cannot be read.
    """
    try:
        files = [
            {"name": name, **hash_with_parts(folder / name, part_size, on_bytes)}
            for name in sorted(list_model_files(folder))
        ]
    except OSError as error:
        raise WeightsError(f"{error.filename or folder}: {error.strerror}") from None
    return make_manifest(files, part_size, str(folder))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest that lies in a folder.

    Raises:
        WeightsError: There is none, or it is not acceptable.
    """
    path = folder / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    return parse_manifest(raw, str(path))


def is_intact(folder: Path, manifest: Manifest) -> bool:
    """Tell at little cost whether a finished folder still has its files, all in their sizes."""
    try:
        if (folder / MANIFEST_NAME).read_bytes() != manifest.canonical:
            return False
        sizes = {name: size for name, (size, _) in list_model_files(folder).items()}
    except (OSError, WeightsError):
        return False
    return sizes == {file.name: file.size for file in manifest.files}


def verify_folder(folder: Path, on_bytes: Callable[[int], None] = ignore_bytes) -> Manifest:
    """Compare every byte of a folder with its manifest.

    Args:
        folder: A folder with a manifest, as it was pulled.
        on_bytes: Told how many more bytes were read.

    Returns:
        The manifest, which the folder agrees with.

    Raises:
        WeightsError: A file is missing, changed or not in the manifest; names the first few.
    """
    manifest = read_manifest(folder)
    sizes = {name: size for name, (size, _) in list_model_files(folder).items()}
    expected = {file.name: file for file in manifest.files}
    problems = [f"{name} is not in the manifest" for name in sorted(sizes.keys() - expected)]
    for name, file in expected.items():
        problem = _problem_of(folder / name, sizes.get(name), file)
        if problem is not None:
            problems.append(f"{name} {problem}")
        on_bytes(file.size)
    if problems:
        more = len(problems) - _MAX_PROBLEMS_TOLD
        told = "; ".join(problems[:_MAX_PROBLEMS_TOLD]) + (f"; and {more} more" if more > 0 else "")
        raise WeightsError(f"{folder}: {told}")
    return manifest


def _problem_of(path: Path, size: int | None, file: ManifestFile) -> str | None:
    if size is None:
        return "is missing"
    if size != file.size:
        return f"has {size} bytes instead of {file.size}"
    try:
        return None if hash_file(path) == file.sha256 else "has another SHA-256"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _walk(folder: Path, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.name.startswith(".") or name == MANIFEST_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/")
            else:
                yield entry, name


def _refusal_of_entry(entry: os.DirEntry[str], name: str) -> str | None:
    mode = entry.stat(follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        return "is a link; only plain files are taken"
    if not stat.S_ISREG(mode):
        return "is no plain file"
    return refusal_of(name)
