"""The cache of weights: what is found again, what is removed for whom, and what never is."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.integrations.aws.weights.cache import HeldWeights, WeightsCache
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import build_manifest, verify_folder
from app.integrations.aws.weights.locks import FileLock
from app.integrations.aws.weights.manifest import Manifest

SIZE = 100_000


class Source:
    """A model that is copied instead of fetched."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder / f"source-{seed}"
        self.folder.mkdir()
        (self.folder / "model.safetensors").write_bytes(bytes([seed]) * SIZE)
        self.manifest: Manifest = build_manifest(self.folder)
        self.num_fills = 0

    def fill(self, staging: Path) -> None:
        """Copy it."""
        self.num_fills += 1
        assert (staging / "model.safetensors").stat().st_size == SIZE
        shutil.copyfile(self.folder / "model.safetensors", staging / "model.safetensors")

    def obtain(self, cache: WeightsCache) -> HeldWeights:
        """Get it from a cache."""
        return cache.obtain(self.manifest, self.fill)

    @property
    def total_bytes(self) -> int:
        """Bytes that it takes in a cache."""
        return SIZE + len(self.manifest.canonical)


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    """Return four models of one size."""
    return [Source(tmp_path, seed) for seed in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the cache's folder, which does not exist."""
    return tmp_path / "deep" / "cache"


def models_in(folder: Path) -> set[str]:
    """Return the names of whole and partial models."""
    return {path.name for path in folder.iterdir() if path.is_dir()}


def age(held: HeldWeights, days: int) -> None:
    """Make a model look unused for some days, and give it back."""
    now_s = held.folder.stat().st_mtime
    os.utime(held.folder, (now_s - days * 86_400,) * 2)
    held.release()


def test_model_is_fetched_once_and_found_again(folder: Path, sources: list[Source]) -> None:
    """Its folder has the fingerprint as its name, and agrees with its manifest."""
    source = sources[0]
    first = source.obtain(WeightsCache(folder, None))
    again = source.obtain(WeightsCache(folder, None))
    assert source.num_fills == 1
    assert first.folder == again.folder == folder / source.manifest.fingerprint
    assert verify_folder(first.folder) == source.manifest
    assert models_in(folder) == {source.manifest.fingerprint}


def test_least_recently_used_model_goes_first(folder: Path, sources: list[Source]) -> None:
    """Using a model counts, not fetching it."""
    cache = WeightsCache(folder, 3 * sources[0].total_bytes)
    for days, source in zip((3, 2, 1), sources[:3], strict=True):
        age(source.obtain(cache), days)
    sources[0].obtain(cache).release()
    sources[3].obtain(cache).release()
    left = models_in(folder)
    assert left == {sources[i].manifest.fingerprint for i in (0, 2, 3)}
    assert sources[0].num_fills == 1
    assert [path.name for path in folder.glob(".removed-*")] == []


def test_model_in_use_is_never_removed(folder: Path, sources: list[Source]) -> None:
    """However long ago it was last asked for; the error says all that is needed."""
    cache = WeightsCache(folder, 2 * sources[0].total_bytes)
    old = sources[0].obtain(cache)
    os.utime(old.folder, (0, 0))
    sources[1].obtain(cache).release()
    sources[2].obtain(cache)
    assert models_in(folder) == {sources[i].manifest.fingerprint for i in (0, 2)}
    with pytest.raises(WeightsError, match="models in use") as refused:
        sources[3].obtain(cache)
    assert f"{2 * sources[0].total_bytes:,}" in str(refused.value)
    assert models_in(folder) == {sources[i].manifest.fingerprint for i in (0, 2)}
    old.release()
    sources[3].obtain(cache)


def test_model_larger_than_the_limit_is_refused_with_both_numbers(
    folder: Path, sources: list[Source]
) -> None:
    """Nothing is removed for what can never fit."""
    sources[0].obtain(WeightsCache(folder, None)).release()
    with pytest.raises(WeightsError) as refused:
        sources[1].obtain(WeightsCache(folder, SIZE))
    assert f"{sources[1].total_bytes:,}" in str(refused.value)
    assert f"{SIZE:,}" in str(refused.value)
    assert models_in(folder) == {sources[0].manifest.fingerprint}
    assert sources[1].num_fills == 0


def test_download_under_way_counts_and_stays(folder: Path, sources: list[Source]) -> None:
    """Two processes that fetch at once do not exceed the limit together."""
    cache = WeightsCache(folder, 2 * sources[0].total_bytes)
    errors: list[str] = []

    def fill(staging: Path) -> None:
        sources[1].obtain(cache).release()
        # Only the whole model can make room, not the one that is being fetched.
        sources[2].obtain(cache).release()
        with pytest.raises(WeightsError) as refused:
            sources[3].obtain(WeightsCache(folder, sources[0].total_bytes))
        errors.append(str(refused.value))
        sources[0].fill(staging)

    cache.obtain(sources[0].manifest, fill)
    assert "models in use" in errors[0]
    # The refusal removed what it could before it knew that it was not enough.
    assert sources[0].manifest.fingerprint in models_in(folder)


def test_download_cut_short_is_gone_on_with(folder: Path, sources: list[Source]) -> None:
    """What has come stays, and is no model until it is whole."""
    cache = WeightsCache(folder, None)
    source = sources[0]

    def fill(staging: Path) -> None:
        with (staging / "model.safetensors").open("r+b") as file:
            file.write(b"half")
        raise WeightsError("cut")

    with pytest.raises(WeightsError, match="cut"):
        cache.obtain(source.manifest, fill)
    partial = folder / f"{source.manifest.fingerprint}.partial"
    assert models_in(folder) == {partial.name}
    found: list[bytes] = []

    def go_on(staging: Path) -> None:
        found.append((staging / "model.safetensors").read_bytes()[:4])
        source.fill(staging)

    cache.obtain(source.manifest, go_on)
    assert found == [b"half"]
    assert models_in(folder) == {source.manifest.fingerprint}


def test_abandoned_download_makes_room_last(folder: Path, sources: list[Source]) -> None:
    """Whole models that nobody uses go before what may still be gone on with."""
    cache = WeightsCache(folder, 2 * sources[0].total_bytes)

    def fail(*_: object) -> None:
        raise WeightsError("cut")

    with pytest.raises(WeightsError, match="cut"):
        cache.obtain(sources[0].manifest, fail)
    sources[1].obtain(cache).release()
    held = sources[2].obtain(cache)
    partial = f"{sources[0].manifest.fingerprint}.partial"
    assert models_in(folder) == {partial, held.fingerprint}
    sources[3].obtain(cache)
    assert models_in(folder) == {sources[3].manifest.fingerprint, held.fingerprint}


@pytest.mark.parametrize("damage", ["missing", "short", "extra", "manifest"])
def test_damaged_model_is_fetched_again(folder: Path, sources: list[Source], damage: str) -> None:
    """A folder that somebody changed is not what its name says."""
    cache, source = WeightsCache(folder, None), sources[0]
    held = source.obtain(cache)
    held.release()
    weights = held.folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(b"x")
    elif damage == "extra":
        (held.folder / "more.json").write_text("{}")
    else:
        (held.folder / "snapkv-manifest.json").write_text("{}")
    assert verify_folder(source.obtain(cache).folder) == source.manifest
    assert source.num_fills == 2


def test_disk_without_room_is_an_error_before_anything_is_fetched(
    folder: Path, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how much is needed and how much there is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE - 1))
    with pytest.raises(WeightsError, match="disk") as refused:
        sources[0].obtain(WeightsCache(folder, None))
    assert f"{SIZE:,}" in str(refused.value)
    assert f"{SIZE - 1:,}" in str(refused.value)
    assert sources[0].num_fills == 0


def test_what_is_not_the_caches_own_is_left_alone(folder: Path, sources: list[Source]) -> None:
    """A folder that was named by mistake loses nothing."""
    (folder / "photos").mkdir(parents=True)
    (folder / "photos" / "one.jpg").write_bytes(b"x" * SIZE)
    (folder / "notes.txt").write_text("x")
    cache = WeightsCache(folder, sources[0].total_bytes)
    sources[0].obtain(cache).release()
    sources[1].obtain(cache).release()
    assert models_in(folder) == {"photos", sources[1].manifest.fingerprint}
    assert (folder / "photos" / "one.jpg").exists()
    assert (folder / "notes.txt").exists()


def test_removal_cut_short_is_finished(folder: Path, sources: list[Source]) -> None:
    """A folder that lost its name is no model, and goes with the next download."""
    (folder / ".removed-x").mkdir(parents=True)
    sources[0].obtain(WeightsCache(folder, None))
    assert models_in(folder) == {sources[0].manifest.fingerprint}


def test_two_that_want_one_model_fetch_it_once(folder: Path, sources: list[Source]) -> None:
    """The second waits for the first."""
    source = sources[0]
    is_filling, may_go_on = threading.Event(), threading.Event()

    def fill(staging: Path) -> None:
        is_filling.set()
        assert may_go_on.wait(10)
        source.fill(staging)

    found: list[Path] = []
    fillers: list[Callable[[Path], None]] = [fill, source.fill]

    def obtain(index: int) -> None:
        found.append(WeightsCache(folder, None).obtain(source.manifest, fillers[index]).folder)

    first = threading.Thread(target=obtain, args=(0,))
    second = threading.Thread(target=obtain, args=(1,))
    first.start()
    assert is_filling.wait(10)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    may_go_on.set()
    first.join(10)
    second.join(10)
    assert found == [folder / source.manifest.fingerprint] * 2
    assert source.num_fills == 1


def test_failed_download_lets_the_next_one_try(folder: Path, sources: list[Source]) -> None:
    """No lock is left behind."""

    def fail(*_: object) -> None:
        raise WeightsError("cut")

    cache = WeightsCache(folder, None)
    with pytest.raises(WeightsError, match="cut"):
        cache.obtain(sources[0].manifest, fail)
    sources[0].obtain(cache)


def test_user_without_a_home_is_told_which_setting_helps(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only when weights are asked for."""

    def expand(path: Path) -> Path:
        raise RuntimeError(f"no home for {path}")

    monkeypatch.setattr(Path, "expanduser", expand)
    cache = WeightsCache("~/weights", None)
    with pytest.raises(WeightsError, match="SNAPKV_WEIGHTS_CACHE_DIR"):
        sources[0].obtain(cache)


def test_lock_of_a_removed_file_keeps_nobody_out(tmp_path: Path) -> None:
    """Who takes a lock takes the one that others see."""
    path = tmp_path / "lock"
    first, second, third = FileLock(path), FileLock(path), FileLock(path)
    assert first.try_acquire(shared=False)
    assert not second.try_acquire(shared=True)
    first.release(remove=True)
    assert not path.exists()
    assert second.try_acquire(shared=True)
    assert third.try_acquire(shared=True)
    assert not first.try_acquire(shared=False)
    third.release()
    assert second.try_acquire(shared=False)
    assert not third.try_acquire(shared=True)
    second.release()
    second.release()
    assert third.try_acquire(shared=True)
