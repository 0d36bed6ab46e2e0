"""How limits of callers are given, and what is refused without being shown."""

import json

import pytest

from app.setting_groups.key_limits import KeyLimits, parse_key_limits
from app.settings import SettingsError, load_settings
from tests.support.app_client import settings_for_tests

KEY = "key-of-team-a-0123"


def test_own_limits_win_over_those_of_everybody_and_null_lifts_one() -> None:
    text = json.dumps(
        {
            "team-a": {"requests_per_minute": 5},
            "default": {"requests_per_minute": 60, "tokens_per_minute": 1_000},
            "team-b": {"tokens_per_minute": None},
        }
    )
    assert parse_key_limits(text) == {
        "team-a": KeyLimits(requests_per_minute=5, tokens_per_minute=1_000),
        "default": KeyLimits(requests_per_minute=60, tokens_per_minute=1_000),
        "team-b": KeyLimits(requests_per_minute=60),
    }


def test_without_the_setting_nobody_is_limited() -> None:
    assert settings_for_tests().key_limits == {}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of names of keys and their limits"),
        ("3", "must be an object of names of keys and their limits"),
        ({"a b": {}}, "the name of entry 1 can be no key's"),
        ({"": {}}, "the name of entry 1 can be no key's"),
        ({"a": {}, "b": 5}, "entry 2: must be an object of limits"),
        ({"a": {"requests_per_minuet": 5}}, "entry 1: has an unknown limit; known are requests"),
        ({"a": {"requests_per_minute": 0}}, "entry 1: requests_per_minute must be an integer"),
        ({"a": {"tokens_per_minute": -1}}, "entry 1: tokens_per_minute must be an integer"),
        ({"a": {"tokens_per_minute": 1.5}}, "entry 1: tokens_per_minute must be an integer"),
        ({"a": {"tokens_per_minute": "5"}}, "entry 1: tokens_per_minute must be an integer"),
        ({"a": {"tokens_per_minute": True}}, "entry 1: tokens_per_minute must be an integer"),
    ],
)
def test_what_is_no_limit_is_refused_by_its_place(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_key_limits(value)


def test_limits_for_no_key_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is misspelt would leave its caller without limits."""
    monkeypatch.setenv("SNAPKV_API_KEYS", json.dumps({"team-a": KEY}))
    monkeypatch.setenv("SNAPKV_KEY_LIMITS", json.dumps({"default": {}, "team-a": {}}))
    assert set(load_settings(env_file=None).key_limits) == {"default", "team-a"}
    monkeypatch.setenv("SNAPKV_KEY_LIMITS", json.dumps({"default": {}, "team-aa": {}}))
    with pytest.raises(SettingsError, match="SNAPKV_KEY_LIMITS: entry 2 is for no key"):
        load_settings(env_file=None)


def test_a_key_in_the_wrong_place_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    misplaced: list[object] = [{KEY: {}}, {KEY: 1}, {"default": {KEY: 1}}, {"default": {"n": KEY}}]
    for limits in misplaced:
        monkeypatch.setenv("SNAPKV_KEY_LIMITS", json.dumps(limits))
        with pytest.raises(SettingsError, match="SNAPKV_KEY_LIMITS") as caught:
            load_settings(env_file=None)
        assert KEY not in str(caught.value)


def test_a_secret_may_hold_limits() -> None:
    secret: dict[str, object] = {"key_limits": parse_key_limits({"nobody": {}})}
    with pytest.raises(SettingsError, match="secret s: key_limits: entry 1 is for no key"):
        load_settings({"secret_id": "s"}, env_file=None, read_secret=lambda _: secret)


def test_a_ceiling_below_the_default_window_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that name no knob could not be answered."""
    monkeypatch.setenv("SNAPKV_KEY_LIMITS", json.dumps({"default": {"max_capacity_prompt": 16}}))
    with pytest.raises(SettingsError, match=r"SNAPKV_KEY_LIMITS: entry 1: .* greater than .* \(16"):
        load_settings(env_file=None)
    monkeypatch.setenv("SNAPKV_WINDOW_SIZE", "15")
    load_settings(env_file=None)
