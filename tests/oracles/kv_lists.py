"""A KV store of Python lists, with pages as list objects: what the paged store must behave like.

Shares no code with it. A page that two sequences share is one list in both their tables, so pages
are counted by identity.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

#: A key and a value, `head_dim` numbers each.
Entry = tuple[list[float], list[float]]
#: Numbers by KV head, token and dimension.
PromptRows = Sequence[Sequence[list[float]]]
#: Numbers by layer, sequence, KV head and dimension.
StepRows = Sequence[Sequence[Sequence[list[float]]]]
Page = list[Entry]
#: By KV head, then pages in order.
LayerTable = list[list[Page]]


class Refused(Exception):  # noqa: N818  # an outcome that tests compare, not a failure of theirs
    """The store must refuse this and change nothing."""


@dataclass
class ListStore:
    """Sequences by id, each a list of the layers written so far."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    tables: dict[int, list[LayerTable]] = field(default_factory=dict)

    @property
    def num_used(self) -> int:
        """Pages that hold something, shared ones once."""
        return len(
            {
                id(page)
                for layers in self.tables.values()
                for layer in layers
                for head in layer
                for page in head
            }
        )

    def reserve(self, seq_id: int) -> None:
        """Open the books for a sequence."""
        if seq_id in self.tables or len(self.tables) == self.max_num_seqs:
            raise Refused("known or no slot")
        self.tables[seq_id] = []

    def write_layer(
        self,
        seq_id: int,
        layer_idx: int,
        keys: PromptRows,
        values: PromptRows,
        kept: Sequence[Sequence[int]] | None,
    ) -> None:
        """Store the kept tokens of each head, or all."""
        if seq_id not in self.tables or layer_idx != len(self.tables[seq_id]):
            raise Refused("unknown or wrong layer")
        if kept is None:
            kept = [range(len(keys[0]))] * self.num_kv_heads
        self._require_free(sum(-(-len(tokens) // self.page_size) for tokens in kept))
        layer: LayerTable = []
        for head, tokens in enumerate(kept):
            pages: list[Page] = []
            for token in tokens:
                self._push(pages, (keys[head][token], values[head][token]))
            layer.append(pages)
        self.tables[seq_id].append(layer)

    def step(self, seq_ids: Sequence[int], keys: StepRows, values: StepRows) -> None:
        """Store a token for each sequence in every layer and head."""
        if any(
            seq_id not in self.tables or len(self.tables[seq_id]) != self.num_layers
            for seq_id in seq_ids
        ):
            raise Refused("unknown or unwritten")
        heads = [head for seq_id in seq_ids for layer in self.tables[seq_id] for head in layer]
        self._require_free(
            sum(not head or len(head[-1]) == self.page_size for head in heads),
        )
        for row, seq_id in enumerate(seq_ids):
            for layer_idx, layer in enumerate(self.tables[seq_id]):
                for head_idx, head in enumerate(layer):
                    entry = keys[layer_idx][row][head_idx], values[layer_idx][row][head_idx]
                    self._push(head, entry)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a child go on from where its parent is, sharing the pages that are full."""
        if (
            parent_id not in self.tables
            or child_id in self.tables
            or len(self.tables) == self.max_num_seqs
        ):
            raise Refused("unknown, known or no slot")
        parent = self.tables[parent_id]
        heads = [head for layer in parent for head in layer if head]
        self._require_free(sum(len(head[-1]) < self.page_size for head in heads))
        self.tables[child_id] = [
            [
                [page if len(page) == self.page_size else list(page) for page in head]
                for head in layer
            ]
            for layer in parent
        ]

    def free(self, seq_id: int) -> None:
        """Drop a sequence; an unknown one is fine."""
        self.tables.pop(seq_id, None)

    def contents(self, seq_id: int, layer_idx: int) -> list[list[Entry]]:
        """Return the entries of each head of a layer, in order."""
        layer = self.tables[seq_id][layer_idx]
        return [[entry for page in head for entry in page] for head in layer]

    def _require_free(self, num_pages: int) -> None:
        if num_pages > self.num_pages - self.num_used:
            raise Refused("no page")

    def _push(self, pages: list[Page], entry: Entry) -> None:
        if not pages or len(pages[-1]) == self.page_size:
            pages.append([])
        pages[-1].append(entry)
