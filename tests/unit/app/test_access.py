"""Who a key belongs to, and where the server refuses to be open."""

import hashlib

import pytest
from pydantic import SecretStr

from app.services.access import ANYBODY, AccessControl, AccessDeniedError, namespace_of
from app.settings import SettingsError, load_settings
from snapkv_core import check_namespace
from tests.support.app_client import settings_for_tests

KEY, OTHER = "key-of-team-a-0123", "key-of-team-b-4567"


def control(**keys: str) -> AccessControl:
    return AccessControl({name: SecretStr(key) for name, key in keys.items()})


def test_without_keys_everybody_is_the_same_caller() -> None:
    access = control()
    assert not access.asks_for_keys
    for headers in ([], ["Bearer x"], ["a", "b"]):
        assert access.caller_of(headers) == ANYBODY


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_a_key_names_its_caller(scheme: str) -> None:
    access = control(a=KEY, b=OTHER)
    assert access.caller_of([f"{scheme} {KEY}"]) == "a"
    assert access.caller_of([f"{scheme} {OTHER}"]) == "b"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        [KEY],
        [f"Basic {KEY}"],
        ["Bearer"],
        ["Bearer "],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer {KEY} {KEY}"],
        [f"Bearer {KEY.upper()}"],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        ["Bearer " + "x" * 600],
        [f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}"],
        [f"Bearer sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"],
    ],
)
def test_anything_else_is_denied_in_the_same_words(headers: list[str]) -> None:
    with pytest.raises(AccessDeniedError) as denied:
        control(a=KEY).caller_of(headers)
    assert str(denied.value) == str(AccessDeniedError())


def test_a_hash_stands_for_its_key() -> None:
    """Nobody who reads the settings can call."""
    access = control(a=f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}")
    assert access.caller_of([f"Bearer {KEY}"]) == "a"


def test_keys_can_be_replaced() -> None:
    access = control(a=KEY)
    access.use_keys({"b": SecretStr(OTHER)})
    assert access.caller_of([f"Bearer {OTHER}"]) == "b"
    with pytest.raises(AccessDeniedError):
        access.caller_of([f"Bearer {KEY}"])


def test_no_key_is_kept() -> None:
    assert KEY not in repr(vars(control(a=KEY)))


def test_callers_have_namespaces_that_stores_take() -> None:
    names = (ANYBODY, "team-a", "team.a", "x" * 64)
    namespaces = {namespace_of(name) for name in names}
    for namespace in namespaces:
        check_namespace(namespace)
    assert len(namespaces) == len(names)
    assert namespace_of(ANYBODY) == "default"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_may_be_open(host: str) -> None:
    settings_for_tests(host=host).require_access_control()
    settings_for_tests(host=host, auth="off", api_keys=[KEY]).require_access_control()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example", "localhost2"])
def test_other_addresses_need_keys(host: str) -> None:
    for settings in (
        settings_for_tests(host=host),
        settings_for_tests(host=host, auth="off", api_keys=[KEY]),
    ):
        with pytest.raises(SettingsError, match=r"SNAPKV_HOST: .* set SNAPKV_API_KEYS"):
            settings.require_access_control()
    settings_for_tests(host=host, api_keys=[KEY]).require_access_control()


def test_keys_that_are_asked_for_must_be_there() -> None:
    with pytest.raises(SettingsError, match="SNAPKV_AUTH: is keys, and SNAPKV_API_KEYS has none"):
        settings_for_tests(auth="keys").require_access_control()
    settings_for_tests(auth="KEYS", api_keys=[KEY]).require_access_control()


def test_no_other_way_of_asking_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPKV_AUTH", "basic")
    with pytest.raises(SettingsError, match="SNAPKV_AUTH"):
        load_settings(env_file=None)
