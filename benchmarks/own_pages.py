"""Makes the choices of one request as costly to read as requests of their own."""

import torch

from snapkv_core import Engine


@torch.inference_mode()
def give_own_pages(engine: Engine) -> None:
    """Put copies in place of the prompt pages that an engine's sequences share.

    Reading the same pages again is cheap, since they stay in the processor's caches, and that would
    flatter the full cache. Reading one prompt per sequence instead would take ten times as long.
    """
    manager = engine.parts.manager
    pool, tables = manager._pool, manager._tables
    for slot in tables._slots.values():
        shared, _ = tables.pages(slot)
        copies = pool.copy(shared)
        pool.give_back(shared)
        named = tables.page_tables[:, slot]
        is_shared = (named != 0) & ~tables._open_places(slot)
        named.masked_scatter_(is_shared, copies)
    manager.check_integrity()
