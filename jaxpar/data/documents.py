"""Documents: the token sequences of a source, read at random and copied only when asked for.

The one idea: the tokens lie in a few flat buffers (one in memory for text, one memory map per token
file) and a table says where each document starts, how long it is and where it came from. A split
or a subset is another table over the same buffers.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from jaxpar.data.permutation import key_of, scramble

HOLDOUT = 0.05
_CHUNK = 1 << 24  # tokens that are looked at together when a whole buffer is scanned


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """The documents of a source: N sequences of token ids, none of them empty.

    `documents[i]` is document i as int32 [length[i]]; `len(documents)` is N, and 0 for the
    held-out part of a source that has a single document.

    >>> documents = documents_from_arrays([[5, 6, 7], [8, 9]])
    >>> len(documents), documents.num_tokens, documents[1].tolist()
    (2, 5, [8, 9])
    """

    source: str  # as the user wrote it, for messages
    buffers: tuple[np.ndarray, ...]  # flat token arrays, any integer type
    buffer: np.ndarray  # [N] which buffer a document lies in
    start: np.ndarray  # [N] its first token in that buffer
    length: np.ndarray  # [N] tokens, at least 1
    files: tuple[str, ...]  # file names, relative to the source
    file: np.ndarray  # [N] which file a document came from
    number: np.ndarray  # [N] its number in that file, from 1; in JSON-lines its line number
    text_bytes: np.ndarray  # [N] bytes of its text; 0 where only tokens are known

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, i: int) -> np.ndarray:
        start = self.start[i]
        return self.buffers[self.buffer[i]][start : start + self.length[i]].astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.length.sum())

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text behind a token, for bits per byte; None for token files."""
        return float(self.text_bytes.sum() / self.num_tokens) if self.text_bytes.any() else None

    def name(self, i: int) -> str:
        """Says in words where document i came from."""
        return f"document {self.number[i]} of {self.files[self.file[i]]}"

    def select(self, which: np.ndarray) -> "Documents":
        """Returns the documents that a mask [N] or an array of indices picks; copies no tokens."""
        columns = ("buffer", "start", "length", "file", "number", "text_bytes")
        return dataclasses.replace(self, **{name: getattr(self, name)[which] for name in columns})


def documents_from_arrays(arrays: Sequence[np.ndarray], names: Sequence[str] | None = None):
    """Makes Documents of token arrays in memory, one document each; leaves out empty ones.

    >>> documents_from_arrays([[1, 2], [3]], names=["a", "b"]).name(1)
    'document 1 of b'
    """
    files = tuple(names) if names is not None else tuple(f"array{i}" for i in range(len(arrays)))
    if len(files) != len(arrays):
        raise ValueError(
            f"{len(arrays)} arrays came with {len(files)} names; each document needs its own name; "
            f"give {len(arrays)} names or none"
        )
    ones = np.ones(len(arrays), np.int64)
    return flat_documents("arrays", arrays, files, np.arange(len(arrays)), ones, 0 * ones)


def flat_documents(source, arrays, files, file, number, text_bytes) -> Documents:
    """Joins one token array per document into a single buffer; leaves out empty documents."""
    arrays = [np.asarray(array) for array in arrays]
    length = np.array([len(array) for array in arrays], np.int64)
    tokens = np.concatenate([a for a in arrays if len(a)] or [np.zeros(0, np.int32)])
    full = Documents(
        source=source,
        buffers=(tokens,),
        buffer=np.zeros(len(arrays), np.int32),
        start=np.cumsum(length) - length,
        length=length,
        files=tuple(files),
        file=np.asarray(file, np.int64),
        number=np.asarray(number, np.int64),
        text_bytes=np.asarray(text_bytes, np.int64),
    )
    return full.select(length > 0)


def split_documents(documents: Documents, holdout: float = HOLDOUT) -> tuple[Documents, Documents]:
    """Splits into (train, held-out), by document: no document has tokens in both.

    A hash of each document's file name and number sends about the share `holdout` of the documents
    to held-out, so a document stays on its side when others come or go, for every seed. With two
    documents or more, at least one is held out and never all; a document that holds more than half
    of all tokens always trains (a folder with train.bin and val.bin splits as its names say).
    With one document, or holdout=0, the held-out part is empty: `len(heldout) == 0`.

    Raises ValueError unless 0 <= holdout < 1.

    >>> train, heldout = split_documents(documents_from_arrays([[1, 2]] * 100), holdout=0.1)
    >>> len(train) + len(heldout), 4 <= len(heldout) <= 20
    (100, True)
    """
    if not 0 <= holdout < 1:
        raise ValueError(
            f"holdout={holdout} is not a share of the documents; it must be at least 0 and below "
            f"1; use 0.05, or 0 to train on everything"
        )
    held = np.zeros(len(documents), bool)
    if holdout > 0 and len(documents) > 1:
        score = _scores(documents)
        movable = np.flatnonzero(2 * documents.length <= documents.num_tokens)
        held[movable] = score[movable] < holdout
        if not held.any():
            held[movable[np.argmin(score[movable])]] = True
        if held.all():
            held[np.argmax(score)] = False
    return documents.select(~held), documents.select(held)


def _scores(documents: Documents) -> np.ndarray:
    """A number in [0, 1) for each document [N], from its name alone."""
    keys = np.array([key_of("holdout", name) for name in documents.files], np.uint64)
    mixed = scramble(documents.number.astype(np.uint64) ^ keys[documents.file], key_of("holdout"))
    return (mixed >> np.uint64(11)) / 2.0**53


def check_vocab(documents: Documents, vocab_size: int | None) -> None:
    """Raises ValueError, naming file, document and id, for an id outside range(vocab_size).

    Reads every token once, unless the buffer's type cannot hold an id that large. With
    vocab_size=None the bound is what int32 holds.
    """
    limit = 2**31 if vocab_size is None else vocab_size
    for b, tokens in enumerate(documents.buffers):
        info = np.iinfo(tokens.dtype)
        if info.min >= 0 and info.max < limit:
            continue
        for begin in range(0, len(tokens), _CHUNK):
            chunk = tokens[begin : begin + _CHUNK]
            if 0 <= chunk.min() and chunk.max() < limit:
                continue
            bad = begin + np.flatnonzero((chunk < 0) | (chunk >= limit))
            _refuse_tokens(documents, b, bad, limit)


def _refuse_tokens(documents: Documents, b: int, bad: np.ndarray, limit: int) -> None:
    """Raises for the first bad position of buffer b that lies in one of the documents."""
    inside = np.flatnonzero(documents.buffer == b)
    if not inside.size:
        return
    starts = documents.start[inside]
    order = np.argsort(starts)
    slot = np.searchsorted(starts[order], bad, side="right") - 1
    document = inside[order[np.maximum(slot, 0)]]
    ends = documents.start[document] + documents.length[document]
    real = np.flatnonzero((slot >= 0) & (bad < ends))
    if not real.size:
        return
    i, token = document[real[0]], documents.buffers[b][bad[real[0]]]
    where = f"document {documents.number[i]} of {_path(documents, i)}"
    raise ValueError(
        f"token id {token} in {where} is outside vocab_size {limit}; ids must be 0 to {limit - 1}; "
        f"use a model with a larger vocabulary, or the tokenizer (for .bin files, the dtype) "
        f"that the tokens were written with"
    )


def _path(documents: Documents, i: int) -> str:
    """The file of document i as a path the user can open."""
    name = documents.files[documents.file[i]]
    if os.path.isdir(documents.source):
        return os.path.join(documents.source, name)
    return documents.source if os.path.exists(documents.source) else name
