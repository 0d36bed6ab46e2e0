"""The pages that all sequences share: storage, free ids and reference counts."""

import mmap

import torch
from torch import Tensor

from snapkv_core.errors import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout

#: Page that is never handed out and always holds zeros; padded places of a page table name it.
NULL_PAGE = 0


class PagePool:
    """Keys and values in pages of `page_size` tokens of one (layer, sequence, KV head).

    ```text
    k_pages, v_pages   [1 + num_pages, page_size, head_dim]
    free ids           [ 9 4 7 | ...............]   a stack; taking and giving back move its top
    references         how many page tables name a page
    ```

    Only the engine thread uses it. Invariant, see `check_integrity`: a page is free or referenced,
    and free pages hold zeros: attention reads a page's unused places with weight zero, and zero
    times a NaN that a broken sequence left behind would be NaN.

    Attributes:
        k_pages: Keys.
        v_pages: Values.
        num_pages: Pages that can be handed out.
    """

    def __init__(
        self, layout: KVLayout, *, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (1 + num_pages, layout.page_size, layout.head_dim)
        self.k_pages = _zeros(shape, dtype, device)
        self.v_pages = _zeros(shape, dtype, device)
        self.num_pages = num_pages
        # Low ids lie on top, so that a lightly used pool keeps to the memory it has touched.
        self._free_ids = torch.arange(num_pages, 0, -1, dtype=torch.int32)
        self._num_free = num_pages
        self._references = torch.zeros(1 + num_pages, dtype=torch.int32)

    @property
    def num_used(self) -> int:
        """Pages that hold something."""
        return self.num_pages - self._num_free

    def take(self, num_pages: int) -> Tensor:
        """Hand out pages with one reference each; returns their ids `[num_pages]`, int32, CPU.

        Raises:
            KVCacheError: Not enough are free, although admission promised them; none is taken.
        """
        if num_pages > self._num_free:
            raise KVCacheError(f"{num_pages} pages wanted, {self._num_free} are free")
        top = self._num_free - num_pages
        page_ids = self._free_ids[top : self._num_free].clone()
        self._num_free = top
        self._references[page_ids] = 1
        return page_ids

    def share(self, page_ids: Tensor) -> None:
        """Add a reference to each of `page_ids` `[num_pages]`, which are distinct and used."""
        self._references[page_ids] += 1

    def copy(self, page_ids: Tensor) -> Tensor:
        """Copy pages to newly taken ones and return their ids; raises as `take` does."""
        copies = self.take(len(page_ids))
        source = page_ids.to(self.k_pages.device)
        target = copies.to(self.k_pages.device, torch.int64)
        for pages in (self.k_pages, self.v_pages):
            pages.index_copy_(0, target, pages.index_select(0, source))
        return copies

    def give_back(self, page_ids: Tensor) -> None:
        """Take a reference from each of `page_ids` `[num_pages]`; the last one frees the page."""
        self._references[page_ids] -= 1
        freed = page_ids[self._references[page_ids] == 0]
        on_device = freed.to(self.k_pages.device, torch.int64)
        self.k_pages.index_fill_(0, on_device, 0)
        self.v_pages.index_fill_(0, on_device, 0)
        self._free_ids[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def check_integrity(self, expected_references: Tensor) -> None:
        """Check the class invariant.

        Args:
            expected_references: How many page tables name each page, `[1 + num_pages]`, int32.

        Raises:
            KVCacheError: It is broken; says where.
        """
        free = self._free_ids[: self._num_free]
        if int(torch.bincount(free, minlength=1).max()) > 1:
            raise KVCacheError("a page is free twice")
        if not torch.equal(self._references, expected_references):
            page_id = int((self._references != expected_references).nonzero()[0])
            raise KVCacheError(
                f"page {page_id} counts {int(self._references[page_id])} references, "
                f"{int(expected_references[page_id])} page tables name it"
            )
        num_referenced = int(self._references[1:].count_nonzero())
        if bool(self._references[free].any()) or num_referenced + len(free) != self.num_pages:
            raise KVCacheError("a page is neither free nor referenced, or both")
        # Read piece by piece: indexing with all ids at once would copy the whole pool.
        for page_id in (NULL_PAGE, *free[-64:].tolist()):
            if self.k_pages[page_id].any() or self.v_pages[page_id].any():
                raise KVCacheError(f"page {page_id} is free and holds something")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that cost a CPU no memory until they are written, unlike `torch.zeros`."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
