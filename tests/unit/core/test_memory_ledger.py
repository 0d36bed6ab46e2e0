"""The ledger promises exactly the worst case of a request, and takes all of it back."""

import pytest

from snapkv_core import CompressionConfig, SamplingParams
from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.errors import InvalidParameterError, KVCacheError, RequestTooLargeError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.sequence import Sequence

#: 2 layers x 3 KV heads = 6 page tables; a page is 4 tokens of 2 x 8 x 2 = 32 bytes, 128 bytes.
_LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, element_bytes=2, page_size=4)
_PAGE_BYTES = 128
_WORKSPACE_PER_TOKEN = 10


def new_ledger(*, num_pages: int = 100, workspace_bytes: int = 1_000) -> MemoryLedger:
    """Build an empty ledger."""
    return MemoryLedger(
        _LAYOUT,
        num_pages=num_pages,
        workspace_bytes=workspace_bytes,
        workspace_for=lambda num_tokens: _WORKSPACE_PER_TOKEN * num_tokens,
    )


def new_group(
    num_prompt_tokens: int,
    *,
    first_id: int = 1,
    num_choices: int = 1,
    max_new_tokens: int = 5,
    capacity: int = 1_000,
    method: str = "snapkv",
) -> tuple[Sequence, ...]:
    """Build the sequences of one request."""
    return tuple(
        Sequence(
            seq_id=first_id + index,
            request_id=f"request-{first_id}",
            prompt_ids=(7,) * num_prompt_tokens,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            compression=CompressionConfig(
                method=method,  # type: ignore[arg-type]
                max_capacity_prompt=capacity,
                window_size=1,
            ),
            arrival_s=0.0,
            choice_index=index,
        )
        for index in range(num_choices)
    )


# By page table: shared pages are those the kept prompt fills, a tail is the rest of the longest.
@pytest.mark.parametrize(
    ("group", "pages_per_table"),
    [
        (new_group(8, max_new_tokens=4), 3),  # 2 shared, 12 tokens
        (new_group(8, max_new_tokens=5), 4),  # 2 shared, 13 tokens
        (new_group(7, max_new_tokens=5), 3),  # 1 shared, 12 tokens
        (new_group(7, max_new_tokens=5, num_choices=3), 1 + 3 * 2),
        (new_group(8, max_new_tokens=4, num_choices=3), 2 + 3 * 1),
        (new_group(3, max_new_tokens=1, num_choices=3), 0 + 3 * 1),
        (new_group(50, max_new_tokens=5, capacity=7), 3),  # compressed to 7
        (new_group(50, max_new_tokens=5, capacity=7, num_choices=3), 1 + 3 * 2),
        (new_group(7, max_new_tokens=5, capacity=7), 3),  # fits its capacity exactly
        (new_group(6, max_new_tokens=2, capacity=7), 2),  # below its capacity: 8 tokens
        (new_group(50, max_new_tokens=2, capacity=7, method="full"), 13),  # keeps all 50
    ],
)
def test_pages_of_a_request_are_shared_ones_and_a_tail_for_each_choice(
    group: tuple[Sequence, ...], pages_per_table: int
) -> None:
    ledger = new_ledger(num_pages=6 * pages_per_table)
    ledger.require_possible(group, "prompt")
    assert ledger.fits(group)
    ledger.reserve(group)
    assert ledger.num_pages_reserved == ledger.num_pages_total == 6 * pages_per_table
    assert ledger.workspace_bytes_reserved == 10 * group[0].num_prompt_tokens
    ledger.check_integrity()

    one_short = new_ledger(num_pages=6 * pages_per_table - 1)
    assert not one_short.fits(group)
    with pytest.raises(RequestTooLargeError):
        one_short.require_possible(group, "prompt")


def test_a_choice_gives_back_its_tail_and_the_last_one_the_rest() -> None:
    ledger = new_ledger()
    group = new_group(7, num_choices=3)
    ledger.reserve(group)
    assert ledger.num_pages_reserved == 6 * (1 + 3 * 2)
    for sequence, left in zip(group, (6 * (1 + 2 * 2), 6 * (1 + 2), 0), strict=True):
        assert ledger.workspace_bytes_reserved == 70
        ledger.release(sequence)
        ledger.release(sequence)
        assert ledger.num_pages_reserved == left
        ledger.check_integrity()
    assert ledger.workspace_bytes_reserved == 0
    assert ledger.reserved_ids == frozenset()


def test_workspace_goes_back_once_and_the_pages_stay() -> None:
    ledger = new_ledger()
    read, other = new_group(7, num_choices=2), new_group(20, first_id=10)
    ledger.reserve(read)
    ledger.reserve(other)
    assert ledger.workspace_bytes_reserved == 70 + 200
    ledger.release(read[0])
    ledger.release_workspace(read)
    ledger.release_workspace(read)
    assert ledger.workspace_bytes_reserved == 200
    assert ledger.num_pages_reserved == 6 * (1 + 2) + 6 * 7
    assert ledger.reserved_ids == {2, 10}
    ledger.release(read[1])
    assert ledger.workspace_bytes_reserved == 200
    ledger.check_integrity()


def test_releasing_what_was_never_reserved_changes_nothing() -> None:
    ledger = new_ledger()
    ledger.reserve(new_group(7))
    stranger = new_group(7, first_id=9)
    ledger.release(stranger[0])
    ledger.release_workspace(stranger)
    assert ledger.num_pages_reserved == 18
    assert ledger.workspace_bytes_reserved == 70


def test_requests_fit_up_to_the_last_page_and_the_last_byte() -> None:
    ledger = new_ledger(num_pages=36, workspace_bytes=140)
    ledger.reserve(new_group(7, first_id=1))
    assert ledger.fits(new_group(7, first_id=2))
    assert not ledger.fits(new_group(7, first_id=2, max_new_tokens=6))  # one page per table more
    assert not ledger.fits(new_group(8, first_id=2, max_new_tokens=4))  # ten bytes more
    ledger.reserve(new_group(7, first_id=2))
    assert not ledger.fits(new_group(1, first_id=3, max_new_tokens=1))


def test_a_request_that_can_never_fit_is_told_both_numbers() -> None:
    ledger = new_ledger(num_pages=41)
    group = new_group(7, num_choices=3)
    with pytest.raises(RequestTooLargeError) as caught:
        ledger.require_possible(group, "messages")
    assert caught.value.field == "messages"
    assert caught.value.needed_bytes == 42 * _PAGE_BYTES
    assert caught.value.available_bytes == 41 * _PAGE_BYTES


def test_a_prompt_beyond_the_workspace_is_told_both_numbers() -> None:
    ledger = new_ledger(workspace_bytes=79)
    ledger.require_possible(new_group(7), "prompt")
    with pytest.raises(InvalidParameterError, match=r"8 tokens takes 80 bytes.*sets aside 79"):
        ledger.require_possible(new_group(8), "prompt")


def test_whether_a_request_is_possible_does_not_depend_on_what_runs() -> None:
    ledger = new_ledger(num_pages=18, workspace_bytes=70)
    ledger.reserve(new_group(7))
    ledger.require_possible(new_group(7, first_id=2), "prompt")


def test_a_reservation_that_does_not_fit_or_exists_is_refused_and_changes_nothing() -> None:
    ledger = new_ledger(num_pages=37)
    group = new_group(7)
    ledger.reserve(group)
    with pytest.raises(KVCacheError, match="already"):
        ledger.reserve(group)
    with pytest.raises(KVCacheError, match="does not fit"):
        ledger.reserve(new_group(7, first_id=2, num_choices=2))
    assert ledger.num_pages_reserved == 18
    assert ledger.reserved_ids == {1}
    ledger.check_integrity()


@pytest.mark.parametrize("total", ["_num_pages_reserved", "_workspace_bytes_reserved"])
def test_a_wrong_total_is_found(total: str) -> None:
    ledger = new_ledger()
    ledger.reserve(new_group(7))
    setattr(ledger, total, getattr(ledger, total) - 1)
    with pytest.raises(KVCacheError, match="booked"):
        ledger.check_integrity()
