"""The paged KV store holds what a store of lists would, after any order of operations."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import pytest
import torch
from torch import Tensor

from snapkv_core import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.manager import KVCacheManager
from tests.oracles.kv_lists import ListStore, Refused

_LAYERS: Final = 2
_HEADS: Final = 3
_HEAD_DIM: Final = 4
_ROWS: Final = _LAYERS * _HEADS
_CPU: Final = torch.device("cpu")
_PAGE_SIZES: Final = (1, 4, 16, 64)


def new_manager(
    page_size: int,
    *,
    num_pages: int = 400,
    max_num_seqs: int = 5,
    dtype: torch.dtype = torch.float32,
) -> KVCacheManager:
    """Build an empty store."""
    layout = KVLayout(_LAYERS, _HEADS, _HEAD_DIM, dtype.itemsize, page_size)
    return KVCacheManager(
        layout, num_pages=num_pages, max_num_seqs=max_num_seqs, dtype=dtype, device=_CPU
    )


class Machine:
    """Does everything to the store and to the oracle, and compares all of both after each step."""

    def __init__(
        self, page_size: int, seed: int, *, num_pages: int = 400, dtype: torch.dtype = torch.float32
    ) -> None:
        self.manager = new_manager(page_size, num_pages=num_pages, dtype=dtype)
        self.oracle = ListStore(_LAYERS, _HEADS, page_size, num_pages, max_num_seqs=5)
        self.prompt_lens: dict[int, list[int]] = {}
        self.outcomes: Counter[str] = Counter()
        self._page_size, self._dtype = page_size, dtype
        self._random = random.Random(seed)
        self._noise = torch.Generator().manual_seed(seed)

    def run(self, num_operations: int) -> None:
        """Draw and do operations, legal ones and others."""
        operations: list[Callable[[], None]] = [
            *[self.reserve] * 2,
            *[self.write_layer] * 6,
            *[self.step] * 5,
            *[self.fork] * 4,
            self.free,
        ]
        for _ in range(num_operations):
            self._random.choice(operations)()
            self.compare()
        for seq_id in list(self.oracle.tables):
            self.free(seq_id)
            self.compare()
        assert self.manager.num_pages_used == 0

    def reserve(self) -> None:
        """Open the books for a sequence that may be known."""
        seq_id = self._any_id()
        self._both(
            "reserve", lambda: self.manager.reserve(seq_id), lambda: self.oracle.reserve(seq_id)
        )

    def write_layer(self) -> None:
        """Write the next layer of a sequence, or at times a wrong one; whole, kept or ragged."""
        tables = self.oracle.tables
        seq_id = self._likely(i for i, layers in tables.items() if len(layers) < _LAYERS)
        layer_idx = len(self.oracle.tables.get(seq_id, []))
        if self._random.random() < 0.1:
            layer_idx = self._random.randrange(_LAYERS)
        if layer_idx >= _LAYERS:
            return
        prompt_len = self._random.choice([1, 3, 4, 5, 16, 17, 63, 64, 65, 130])
        keys, values = self._draw(_HEADS, prompt_len), self._draw(_HEADS, prompt_len)
        kept, indices, lens = self._draw_kept(prompt_len)
        self._both(
            "write",
            lambda: self.manager.write_layer(
                seq_id, layer_idx, keys, values, kept_indices=indices, kept_lens=lens
            ),
            lambda: self.oracle.write_layer(
                seq_id, layer_idx, keys.tolist(), values.tolist(), kept
            ),
        )

    def step(self) -> None:
        """Give a token to some sequences, mostly such as are written to their end."""
        done = [i for i, layers in self.oracle.tables.items() if len(layers) == _LAYERS]
        seq_ids = self._random.sample(done, self._random.randint(0, len(done)))
        if not seq_ids or self._random.random() < 0.1:
            seq_ids = [*seq_ids, self._any_id()]
        seq_ids = list(dict.fromkeys(seq_ids))
        # Rows beyond those of the step are padding.
        num_rows = len(seq_ids) + self._random.choice([0, 0, 3])
        keys = self._draw(_LAYERS, num_rows, _HEADS)
        values = self._draw(_LAYERS, num_rows, _HEADS)

        def on_manager() -> None:
            step = self.manager.begin_step(seq_ids)
            for layer_idx in range(_LAYERS):
                self.manager.append(step, layer_idx, keys[layer_idx], values[layer_idx])

        self._both(
            "step", on_manager, lambda: self.oracle.step(seq_ids, keys.tolist(), values.tolist())
        )

    def fork(self) -> None:
        """Fork any sequence to any other, both known or not."""
        parent_id = self._likely(self.oracle.tables)
        child_id = self._likely(set(range(7)) - self.oracle.tables.keys())
        self._both(
            "fork",
            lambda: self.manager.fork(parent_id, child_id),
            lambda: self.oracle.fork(parent_id, child_id),
        )

    def free(self, seq_id: int | None = None) -> None:
        """Free a sequence, by default any, known or not."""
        going = self._any_id() if seq_id is None else seq_id
        self._both("free", lambda: self.manager.free(going), lambda: self.oracle.free(going))

    def compare(self) -> None:
        """Compare every token stored and every count."""
        manager, oracle = self.manager, self.oracle
        manager.check_integrity()
        assert manager.num_pages_used == oracle.num_used
        for seq_id, layers in oracle.tables.items():
            num_entries = num_pages = 0
            for layer_idx in range(len(layers)):
                heads = oracle.contents(seq_id, layer_idx)
                found = manager.stored(seq_id, layer_idx)
                for entries, (keys, values) in zip(heads, found, strict=True):
                    assert keys.tolist() == [key for key, _ in entries]
                    assert values.tolist() == [value for _, value in entries]
                    num_entries += len(entries)
                    num_pages += -(-len(entries) // self._page_size)
            held = manager.held_bytes(seq_id)
            assert held == num_pages * manager.layout.page_bytes
            one_page_each = _ROWS * (self._page_size - 1)
            assert held <= (num_entries + one_page_each) * manager.layout.entry_bytes

    def _both(
        self, name: str, on_manager: Callable[[], None], on_oracle: Callable[[], None]
    ) -> None:
        try:
            on_oracle()
        except Refused as refused:
            self.outcomes[f"{name} refused: {refused}"] += 1
            with pytest.raises(KVCacheError):
                on_manager()
        else:
            self.outcomes[name] += 1
            on_manager()

    def _any_id(self) -> int:
        return self._random.randrange(7)

    def _likely(self, seq_ids: Iterable[int]) -> int:
        """Choose one of some ids, if there are any, and at times any other."""
        choices = list(seq_ids)
        is_odd = not choices or self._random.random() < 0.2
        return self._any_id() if is_odd else self._random.choice(choices)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, _HEAD_DIM, generator=self._noise).to(self._dtype)

    def _draw_kept(
        self, prompt_len: int
    ) -> tuple[list[list[int]] | None, Tensor | None, Tensor | None]:
        kind = self._random.choice(["whole", "even", "ragged"])
        if kind == "whole":
            return None, None, None
        most = self._random.randint(1, prompt_len)
        lens = [most] * _HEADS
        if kind == "ragged":
            lens = [self._random.randint(1, most) for _ in range(_HEADS)]
        kept = [sorted(self._random.sample(range(prompt_len), length)) for length in lens]
        indices = torch.full((_HEADS, max(lens)), prompt_len - 1)
        for head, tokens in enumerate(kept):
            indices[head, : len(tokens)] = torch.tensor(tokens)
        return kept, indices, torch.tensor(lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", _PAGE_SIZES)
def test_any_order_of_operations_leaves_what_lists_would_hold(
    page_size: int, dtype: torch.dtype
) -> None:
    # Enough for some sequences and not for five long ones.
    num_pages = {1: 500, 4: 90, 16: 40, 64: 26}[page_size]
    outcomes: Counter[str] = Counter()
    for seed in range(3):
        machine = Machine(page_size, seed, num_pages=num_pages, dtype=dtype)
        machine.run(150)
        outcomes += machine.outcomes
    expected = [
        *("reserve", "write", "step", "fork"),
        *("reserve refused: known or no slot", "write refused: unknown or wrong layer"),
        *("write refused: no page", "step refused: unknown or unwritten", "step refused: no page"),
        "fork refused: unknown, known or no slot",
    ]
    if page_size > 1:  # else every page is full, and a fork takes none
        expected.append("fork refused: no page")
    assert [name for name in expected if not outcomes[name]] == [], outcomes


def prompt_kv(prompt_len: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw one layer's keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_HEADS, prompt_len, _HEAD_DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def write_prompt(manager: KVCacheManager, seq_id: int, prompt_len: int, fill: float = 1.0) -> None:
    """Store a prompt of one number, whole."""
    manager.reserve(seq_id)
    full = torch.full((_HEADS, prompt_len, _HEAD_DIM), fill)
    for layer_idx in range(_LAYERS):
        manager.write_layer(seq_id, layer_idx, full, full)


def give_token(manager: KVCacheManager, seq_ids: list[int], fill: float = 2.0) -> None:
    """Store a token of one number in all layers of some sequences."""
    step = manager.begin_step(seq_ids)
    token = torch.full((len(seq_ids), _HEADS, _HEAD_DIM), fill)
    for layer_idx in range(_LAYERS):
        manager.append(step, layer_idx, token, token)


def test_each_head_holds_its_own_kept_tokens_and_then_the_new_ones() -> None:
    manager = new_manager(4)
    manager.reserve(1)
    kept = [[0, 2, 7, 8], [5, 8], [1, 7, 8]]
    keys, values = prompt_kv(9)
    for layer_idx in range(_LAYERS):
        manager.write_layer(
            1,
            layer_idx,
            keys + layer_idx,
            values,
            kept_indices=torch.tensor([[0, 2, 7, 8], [5, 8, 8, 8], [1, 7, 8, 8]]),
            kept_lens=torch.tensor([4, 2, 3]),
        )
    give_token(manager, [1], 7.0)
    new = torch.full((1, _HEAD_DIM), 7.0)
    for layer_idx in range(_LAYERS):
        for head, (found_keys, found_values) in enumerate(manager.stored(1, layer_idx)):
            assert torch.equal(found_keys, torch.cat([keys[head, kept[head]] + layer_idx, new]))
            assert torch.equal(found_values, torch.cat([values[head, kept[head]], new]))
    assert manager.prompt_entries(1) == 3.0
    assert manager.prompt_bytes(1) == _LAYERS * (4 + 2 + 3) * 2 * _HEAD_DIM * 4
    # The first head's fifth token began a page; the others still fill their first.
    assert manager.num_pages_used == _LAYERS * (2 + 1 + 1)


def test_the_store_keeps_no_reference_to_the_prompts_buffer() -> None:
    manager = new_manager(4)
    manager.reserve(1)
    keys, values = prompt_kv(5)
    before = keys.clone()
    manager.write_layer(1, 0, keys, values)
    keys.zero_()
    assert torch.equal(torch.stack([found for found, _ in manager.stored(1, 0)]), before)


def test_what_is_stored_is_returned_as_a_copy() -> None:
    manager = new_manager(4)
    write_prompt(manager, 1, 5)
    manager.stored(1, 0)[0][0].fill_(9.0)
    assert manager.stored(1, 0)[0][0].eq(1.0).all()


@pytest.mark.parametrize("page_size", _PAGE_SIZES)
def test_choices_share_full_prompt_pages_and_each_pays_for_its_own_tokens(page_size: int) -> None:
    manager = new_manager(page_size)
    prompt_len = 2 * page_size + (page_size > 1)
    write_prompt(manager, 1, prompt_len)
    for child in (2, 3):
        manager.fork(1, child)
    num_open = int(page_size > 1)
    assert manager.num_pages_used == _ROWS * (2 + 3 * num_open)
    # The sum over sequences counts shared pages once for each that names them.
    held = [manager.held_bytes(seq_id) for seq_id in (1, 2, 3)]
    assert held == [_ROWS * (2 + num_open) * manager.layout.page_bytes] * 3
    for _ in range(page_size):
        give_token(manager, [2])
    assert manager.num_pages_used == _ROWS * (2 + 3 * num_open + 1)
    # Tokens of the answer are none of the prompt's.
    assert manager.prompt_entries(2) == manager.prompt_entries(1) == prompt_len
    manager.free(1)
    manager.free(3)
    assert manager.num_pages_used == _ROWS * (2 + num_open + 1)
    manager.free(2)
    assert manager.num_pages_used == 0


def test_what_a_choice_writes_reaches_no_other() -> None:
    manager = new_manager(4)
    write_prompt(manager, 1, 6)
    manager.fork(1, 2)
    manager.fork(2, 3)
    for seq_id in (1, 2, 3):
        give_token(manager, [seq_id], 10.0 * seq_id)
    give_token(manager, [3, 1], 5.0)
    for seq_id, length in ((1, 8), (2, 7), (3, 8)):
        for keys, values in manager.stored(seq_id, _LAYERS - 1):
            expected = [1.0] * 6 + [10.0 * seq_id] + [5.0] * (length - 7)
            assert keys[:, 0].tolist() == values[:, -1].tolist() == expected
    manager.check_integrity()


@pytest.mark.parametrize("page_size", _PAGE_SIZES)
def test_nothing_of_a_broken_sequence_is_left_in_the_pages_it_gave_back(page_size: int) -> None:
    manager = new_manager(page_size, num_pages=1_000)
    write_prompt(manager, 1, 70, float("nan"))
    manager.fork(1, 2)
    give_token(manager, [2, 1], float("nan"))
    for seq_id in (2, 1):
        manager.free(seq_id)
        manager.check_integrity()
    write_prompt(manager, 3, 1)
    (layer, *_) = manager.begin_step([3]).layers
    # The token that a step makes room for is not written yet, so what is left is the prompt's.
    for pages in (layer.k_pages, layer.v_pages):
        assert int(pages.count_nonzero()) == _ROWS * _HEAD_DIM
        assert pages.isfinite().all()


def test_the_unused_places_of_a_page_hold_zeros() -> None:
    manager = new_manager(16)
    manager.reserve(1)
    keys, values = prompt_kv(40)
    indices = torch.arange(20).expand(_HEADS, -1)
    lens = torch.tensor([20, 3, 17])
    for layer_idx in range(_LAYERS):
        manager.write_layer(1, layer_idx, keys, values, kept_indices=indices, kept_lens=lens)
    (layer, *_) = manager.begin_step([1]).layers
    assert int(layer.k_pages.count_nonzero()) == _LAYERS * int(lens.sum()) * _HEAD_DIM
    assert int(layer.v_pages.count_nonzero()) == _LAYERS * int(lens.sum()) * _HEAD_DIM


def test_freeing_may_be_repeated_and_gives_the_slot_to_the_next() -> None:
    manager = new_manager(4, max_num_seqs=1)
    for seq_id in range(3):
        write_prompt(manager, seq_id, 9)
        with pytest.raises(KVCacheError, match="slot"):
            manager.reserve(seq_id + 1)
        manager.free(seq_id)
        manager.free(seq_id)
        assert manager.num_pages_used == 0
    manager.check_integrity()
    manager.reserve(9)
    assert manager.prompt_bytes(9) == 0, "nothing of the last one in this slot"


def test_an_unknown_sequence_has_nothing_to_show() -> None:
    manager = new_manager(4)
    for ask in (
        lambda: manager.stored(9, 0),
        lambda: manager.prompt_entries(9),
        lambda: manager.prompt_bytes(9),
        lambda: manager.held_bytes(9),
    ):
        with pytest.raises(KVCacheError, match="9"):
            ask()
