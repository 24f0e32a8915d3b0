"""Outputs of chunks are put into columns while later ones are encoded: a column is whole when its table's are done."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.engine.outputs import Output, to_columns

OnColumn = Callable[[str, Tensor], None]


class Assembly:
    """Of one pass over all chunks of a batch.

    Args:
        on_column: called with a column's name and its rows (R, D) as soon as they are whole. Not where a row has
            several outputs.
        known: columns that are whole already.
    """

    def __init__(
        self,
        batch: ChunkedBatch,
        chunks: Sequence[Chunk],
        on_column: OnColumn | None = None,
        known: Mapping[str, Tensor] | None = None,
    ):
        self.batch, self.chunks, self.on_column = batch, chunks, on_column
        self.columns: dict[str, Tensor] = dict(known or {})
        self._left = Counter(chunk.table for chunk in chunks)
        self._outputs: dict[int, dict[int, Output]] = defaultdict(dict)  # table -> its chunks so far

    def add(self, number: int, output: Output) -> None:
        """The detached output of chunk `number`."""
        table = self.chunks[number].table
        self._outputs[table][number] = output
        self._left[table] -= 1
        if not self._left[table] and isinstance(output, Tensor):
            self._finish(table, output)

    def _finish(self, table: int, like: Tensor) -> None:
        outputs = self._outputs.pop(table, {})
        of_rows = [outputs[i] for i in sorted(outputs) if not self.chunks[i].is_idle]
        own = [output for output in of_rows if isinstance(output, Tensor)]
        made = self.batch.table_columns(table, [like[:0], *own])
        for name in (name for name in made if name not in self.columns):
            self.columns[name] = made[name]
            if self.on_column is not None:
                self.on_column(name, made[name])

    def whole(self) -> Mapping[str, Output]:
        """Column -> its rows, in the order of the batch, when every chunk was added."""
        if self._outputs:
            of_chunks = {i: output for of_table in self._outputs.values() for i, output in of_table.items()}
            return to_columns(self.batch, [of_chunks[i] for i in range(len(self.chunks))], self.chunks)
        like = next(iter(self.columns.values()))
        for table in {*range(len(self.batch.tables))} - {*self._left}:  # without rows
            self._finish(table, like)
        return {name: self.columns[name] for name in self.batch.row_counts()}
