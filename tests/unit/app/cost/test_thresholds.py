"""Thresholds: how they are written, and when a day is over, within, or cannot be judged."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.integrations.aws.cost.checks import ThresholdCheck, check_thresholds
from app.setting_groups.thresholds import CostThresholds, parse_thresholds
from app.settings import SettingsError, load_settings

AMOUNTS = st.decimals("0.01", "1000000", places=2)
TIERS = st.text("abcdefgh-", min_size=1, max_size=8)


@given(
    st.none() | AMOUNTS,
    st.dictionaries(TIERS, AMOUNTS, min_size=1, max_size=3),
    st.sampled_from([",", " , "]),
)
def test_thresholds_are_read_as_they_are_written(
    total: Decimal | None, by_tier: dict[str, Decimal], separator: str
) -> None:
    """The total, tiers, or both, in the order given and without losing a digit."""
    parts = [] if total is None else [str(total)]
    parts += [f"{tier}={amount}" for tier, amount in by_tier.items()]
    found = parse_thresholds(separator.join(parts))
    assert found == CostThresholds(total, by_tier)
    assert list(found.by_tier) == list(by_tier)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("abc", "'abc'"),
        ("-5", "'-5'"),
        ("0", "'0'"),
        ("medium=0.00", "'medium=0.00'"),
        ("nan", "'nan'"),
        ("1e3", "'1e3'"),
        ("1 000", "'1 000'"),
        ("100,", "''"),
        ("=5", "'=5'"),
        ("medium=", "'medium='"),
        ("\u0665", "'\u0665'"),
        ("1,2", "the total twice"),
        ("a=1,a=2", "tier a twice"),
    ],
)
def test_what_is_no_threshold_is_named(text: str, part: str) -> None:
    """One line says which part is wrong, here and in the settings."""
    with pytest.raises(ValueError, match=r"must be amounts|twice") as caught:
        parse_thresholds(text)
    assert part in str(caught.value)
    with pytest.raises(SettingsError, match=r"^SNAPKV_COST_DAILY_THRESHOLD: "):
        load_settings({"cost_daily_threshold": text}, env_file=None)


@pytest.mark.parametrize(
    ("amounts", "verdict"),
    [
        (("80", "80"), "within"),
        (("80.000001", "80.000001"), "over"),
        (("0", "80"), "within"),
        (("0", "80.01"), "unknown"),
        (("81", "90"), "over"),
        (("-5", "-5"), "within"),
    ],
)
def test_verdict(amounts: tuple[str, str], verdict: str) -> None:
    """Equal is within; an amount that may be another's is no reason for an alarm."""
    least, most = map(Decimal, amounts)
    assert ThresholdCheck(None, Decimal(80), least, most).verdict == verdict


def test_tiers_are_checked_on_their_own() -> None:
    """What carries no tier may be any tier's, so a tier's cost lies between two amounts."""
    by_tier = {"medium": Decimal(70), "small": Decimal(2), "": Decimal(15)}
    thresholds = parse_thresholds("100,medium=80,small=1,large=20")
    checks = check_thresholds(thresholds, Decimal(87), by_tier, is_attributed=True)
    found = [(c.tier, int(c.at_least), int(c.at_most), str(c.verdict)) for c in checks]
    assert found == [
        (None, 87, 87, "within"),
        ("medium", 70, 85, "unknown"),
        ("small", 2, 17, "over"),
        ("large", 0, 15, "within"),
    ]


def test_the_whole_accounts_cost_is_never_called_over() -> None:
    """It may be another project's; below the threshold ours is too."""
    thresholds = parse_thresholds("50,medium=90,small=5")
    by_tier = {"medium": Decimal(70), "": Decimal(10)}
    checks = check_thresholds(thresholds, Decimal(80), by_tier, is_attributed=False)
    assert [check.verdict for check in checks] == ["unknown", "within", "unknown"]
