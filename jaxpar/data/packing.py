"""Packing: rows of T tokens as a pure function of (seed, row number).

The one idea: an epoch is a stream, the documents one after the other in a permuted order, and row r
is a piece of T tokens of it, itself in a permuted place. Both permutations are computed from
(seed, epoch), so row r is known without reading the rows before it, on any process, at any time:
there is nothing to save and nothing to replay.

    stream   a0 a1 a2 a3 a4 a5 b0 b1 b2 c0          T = 4
    row 0    a0 a1 a2 a3 | row 1  a4 a5 b0 b1 | row 2  b2 c0 .. ..
    targets  a1 a2 a3 a4 |        a5  - b1 b2 |         -  -  -  -      "-": weight 0
"""

import functools

import numpy as np

from jaxpar.data.documents import Documents
from jaxpar.data.permutation import key_of, permute

Batch = dict[str, np.ndarray]


def rows_per_epoch(documents: Documents, seq_len: int) -> int:
    """Rows of seq_len tokens that hold every token of the documents once.

    >>> from jaxpar.data import documents_from_arrays
    >>> rows_per_epoch(documents_from_arrays([[1, 2, 3], [4, 5]]), seq_len=4)
    2
    """
    return -(-documents.num_tokens // seq_len)


def pack_rows(documents: Documents, rows: np.ndarray, *, seq_len: int, seed: int | None) -> Batch:
    """Returns rows, given by number, as arrays [n, T] with T = seq_len.

    rows: int [n]. Row r belongs to epoch r // rows_per_epoch; a negative number is an empty row.
    seed: orders documents and rows anew in each epoch; None leaves both in their own order.

    tokens, targets (int32): a token and the next one of its document. Over the rows of an epoch,
        every token that has a predecessor in its document is a target with weight 1 exactly once:
        a document that goes on in another row still has its next token as the row's last target.
    weights (float32): 1, or 0 at a document's last token and in padding, where targets are 0.
    segment_ids (int32): 1, 2, ... for the documents' pieces in a row; 0 for padding, which is only
        at the end of the last row of an epoch and in empty rows.
    positions (int32): 0, 1, ... within each piece; 0 in padding.

    Raises ValueError if there are no documents.

    >>> from jaxpar.data import documents_from_arrays
    >>> documents = documents_from_arrays([[1, 2, 3], [4, 5]])
    >>> for name, values in pack_rows(documents, [0], seq_len=6, seed=None).items():
    ...     print(name, values[0].tolist())
    tokens [1, 2, 3, 4, 5, 0]
    targets [2, 3, 0, 5, 0, 0]
    weights [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    segment_ids [1, 1, 1, 2, 2, 0]
    positions [0, 1, 2, 0, 1, 0]
    """
    rows = np.asarray(rows, np.int64)
    count = rows_per_epoch(documents, seq_len)
    if count == 0:
        raise ValueError(
            f"{documents.source} has no documents to pack into rows; rows need at least one; "
            f"use a source with more documents (held-out is empty when there is only one)"
        )
    epochs = rows // count
    batch = {name: np.zeros((len(rows), seq_len), np.int32) for name in _INTEGERS}
    batch["weights"] = np.zeros((len(rows), seq_len), np.float32)
    for epoch in np.unique(epochs[rows >= 0]):
        of_epoch = np.flatnonzero((epochs == epoch) & (rows >= 0))
        place = rows[of_epoch] % count
        if seed is not None:
            place = permute(place, count, key_of("rows", seed, int(epoch)))
        for name, values in _pieces(documents, place, seq_len, seed, int(epoch)).items():
            batch[name][of_epoch] = values
    return {name: batch[name] for name in _ORDER}


_ORDER = ("tokens", "targets", "weights", "segment_ids", "positions")
_INTEGERS = ("tokens", "targets", "segment_ids", "positions")


def _pieces(documents: Documents, place: np.ndarray, seq_len: int, seed, epoch: int) -> Batch:
    """The rows at the places [n] of an epoch's stream, as arrays [n, T]."""
    order, ends = _stream(documents, seed, epoch)
    column = np.arange(seq_len)
    at = place[:, None] * seq_len + column
    real = at < ends[-1]
    slot = np.searchsorted(ends, at.ravel(), side="right").reshape(at.shape)  # in stream order
    slot = np.minimum(slot, len(ends) - 1)
    document = order[slot]
    length = documents.length[document]
    offset = at - ends[slot] + length  # from the document's first token
    counted = real & (offset + 1 < length)
    address = documents.start[document] + offset
    buffer = documents.buffer[document]
    return {
        "tokens": _gather(documents, buffer, address, real),
        "targets": _gather(documents, buffer, address + 1, counted),
        "weights": counted.astype(np.float32),
        "segment_ids": np.where(real, slot - slot[:, :1] + 1, 0),
        # A piece begins where its document does, or at column 0 if that was in an earlier row.
        "positions": np.where(real, np.minimum(offset, column), 0),
    }


# Two epochs (a batch may span the border) of two splits: a memo of a pure function, not a state.
@functools.lru_cache(maxsize=4)
def _stream(documents: Documents, seed: int | None, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The epoch's order of documents [N], and where each ends in the stream [N]."""
    order = np.arange(len(documents))
    if seed is not None:
        order = permute(order, len(documents), key_of("documents", seed, epoch))
    return order, np.cumsum(documents.length[order])


def _gather(documents: Documents, buffer, address, wanted) -> np.ndarray:
    """Reads tokens at the addresses [n, T] in their buffers [n, T] where wanted; 0 elsewhere."""
    tokens = np.zeros(address.shape, np.int32)
    for b in np.unique(buffer):
        here = wanted & (buffer == b)
        tokens[here] = documents.buffers[b][address[here]]
    return tokens
