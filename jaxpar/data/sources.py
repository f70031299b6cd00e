"""Sources: from "builtin", a file or a folder to Documents.

The one idea: a source is a sorted list of (name, path), and a file's suffix says how it is read: a
token file (.npy, .bin) is memory-mapped, JSON-lines gives a document a line, everything else is
UTF-8 text, a document a file. Nothing is skipped in silence but hidden files and __pycache__.
"""

import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxpar.data.documents import Documents, check_vocab, flat_documents
from jaxpar.data.tokenizer import load_tokenizer

TOKEN_SUFFIXES = (".npy", ".bin")
BUILTIN_BYTES = 16_000_000
# Tests, tables of numbers and code of others: not what a language model should learn first.
BUILTIN_SKIP = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "encodings", "pydoc_data", "_bundled", "__pycache__",
}  # fmt: skip
_BATCH = 256  # documents that are tokenised together
_CHUNK = 1 << 24  # tokens that are searched for `eos` together


def load_documents(
    source: str | os.PathLike,
    tokenizer: str | os.PathLike = "bytes",
    *,
    dtype: str = "uint16",
    eos: int | None = None,
    vocab_size: int | None = None,
) -> Documents:
    """Reads a source into Documents; text is tokenised now, token files are memory-mapped.

    source: "builtin" (the source text of Python's standard library on this machine, at most
        16 MB, a document a file), or a file, or a folder (read with its sub-folders, sorted):
        UTF-8 text, a document a file; .jsonl with a field `text`, a document a line;
        .npy or .bin token files, a document a file, or several when `eos` is given.
    tokenizer: "bytes" (256 ids) or the path of a tokenizer.json; token files need none.
    dtype: the type of the ids in .bin files; uint16 is what nanoGPT writes.
    eos: the id that ends a document. Token files are cut after it; to texts it is added.
    vocab_size: every id must be below it; None accepts any int32.

    Empty documents are left out. Raises ValueError, in one sentence that names the file, for a
    path that does not exist, a source without tokens, a file that cannot be read as its suffix
    says, a bad JSON line, or an id outside the vocabulary.

    >>> documents = load_documents("builtin")
    >>> bytes(documents[0].tolist()).decode().isprintable(), documents.num_tokens > 1_000_000
    (False, True)
    """
    files = _builtin_files() if str(source) == "builtin" else _files(Path(source))
    maps = [(name, path) for name, path in files if path.suffix in TOKEN_SUFFIXES]
    if maps and len(maps) < len(files):
        other = next(path for _, path in files if path.suffix not in TOKEN_SUFFIXES)
        raise ValueError(
            f"{source} holds token files ({maps[0][0]}) and {other.name}; a folder is read either "
            f"as token files or as text; move one kind away, or name a single file"
        )
    if maps:
        documents = _token_documents(str(source), maps, dtype, eos)
    else:
        documents = _text_documents(str(source), files, tokenizer, eos)
    if not len(documents):
        raise ValueError(
            f"{source} has no tokens; training needs at least one document that is not empty; "
            f'add text, or use "builtin"'
        )
    check_vocab(documents, vocab_size)
    return documents


def _files(root: Path) -> list[tuple[str, Path]]:
    """The files of a path as sorted (name relative to the path, path)."""
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise ValueError(
            f'data source {root} does not exist; a source is a file, a folder or "builtin"; '
            f'check the path, or use "builtin"'
        )
    found = _walk(root, skip={"__pycache__"})
    if not found:
        raise ValueError(
            f"folder {root} has no files; a source needs at least one document; put .txt, .jsonl, "
            f'.npy or .bin files there, or use "builtin"'
        )
    return found


def _walk(root: Path, skip: set[str]) -> list[tuple[str, Path]]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found)


def _builtin_files() -> list[tuple[str, Path]]:
    """The first 16 MB of the standard library's *.py files, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(name, path) for name, path in _walk(root, BUILTIN_SKIP) if path.suffix == ".py"]
    ends = itertools.accumulate(path.stat().st_size for _, path in files)
    kept = [file for file, end in zip(files, ends, strict=True) if end <= BUILTIN_BYTES]
    if not kept:
        raise ValueError(
            'source "builtin" found no *.py files of the standard library on this machine; this '
            "Python was installed without them; give --data a file or folder of text"
        )
    return kept


def _text_documents(source: str, files, tokenizer, eos: int | None) -> Documents:
    encode = load_tokenizer(tokenizer)
    ending = [] if eos is None else [np.array([eos], np.int32)]
    arrays, file, number, text_bytes = [], [], [], []
    texts = ((f, n, text) for f, (_, path) in enumerate(files) for n, text in _read(path) if text)
    while group := list(itertools.islice(texts, _BATCH)):
        for (f, n, text), ids in zip(group, encode([text for *_, text in group]), strict=True):
            arrays.append(np.concatenate([ids, *ending]) if ending else ids)
            file.append(f)
            number.append(n)
            text_bytes.append(len(text) if text.isascii() else len(text.encode()))
    return flat_documents(source, arrays, [name for name, _ in files], file, number, text_bytes)


def _read(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) for each document of a text or JSON-lines file."""
    if path.suffix == ".jsonl":
        yield from _read_json_lines(path)
        return
    try:
        yield 1, path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start} is not); a source holds UTF-8 text, "
            f".jsonl, or token files ending in .npy or .bin; convert the file or move it away"
        ) from None


def _read_json_lines(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(
                    f"{path} line {number} is not JSON ({error}); each line is an object such as "
                    f'{{"text": "..."}}; correct or remove the line'
                ) from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                has = f"has {sorted(record)}" if isinstance(record, dict) else "is not an object"
                raise ValueError(
                    f"{path} line {number} has no string in the field `text` (it {has}); each "
                    f'line is an object such as {{"text": "..."}}; rename the field'
                )
            yield number, _whole(record["text"], path, number)


def _whole(text: str, path: Path, number: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path} line {number} has half a surrogate pair at character {error.start} of `text`; "
            f"text must be encodable as UTF-8; write the file with errors='replace'"
        ) from None
    return text


def _token_documents(source: str, files, dtype: str, eos: int | None) -> Documents:
    buffers = tuple(_map_tokens(path, dtype) for _, path in files)
    ends = [_document_ends(tokens, eos) for tokens in buffers]
    if eos is not None and all(tokens[end[-1] - 1] != eos and len(end) == 1
                               for tokens, end in zip(buffers, ends, strict=True)):  # fmt: skip
        raise ValueError(
            f"eos={eos} does not occur in {source}; it is the token id that ends each document; "
            f"use the id of the tokenizer that wrote the file, or none for a document a file"
        )
    lengths = [np.diff(end, prepend=0) for end in ends]
    counts = [len(end) for end in ends]
    which = np.repeat(np.arange(len(files)), counts)
    length = np.concatenate(lengths)
    return Documents(
        source=source,
        buffers=buffers,
        buffer=which,
        start=np.concatenate(ends) - length,
        length=length,
        files=tuple(name for name, _ in files),
        file=which,
        number=np.concatenate([np.arange(1, count + 1) for count in counts]),
        text_bytes=np.zeros(len(length), np.int64),
    )


def _document_ends(tokens: np.ndarray, eos: int | None) -> np.ndarray:
    """The position after each document's last token, [documents]."""
    ends = [
        begin + 1 + np.flatnonzero(tokens[begin : begin + _CHUNK] == eos)
        for begin in (range(0, len(tokens), _CHUNK) if eos is not None else ())
    ]
    return np.unique(np.concatenate([*ends, [len(tokens)]])).astype(np.int64)


def _map_tokens(path: Path, dtype: str) -> np.ndarray:
    """Memory-maps a token file as a flat integer array."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(
                f"{path} is not a .npy file ({error}); token files hold one flat array of "
                f"integers; write it with numpy.save"
            ) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{path} holds {tokens.dtype} {list(tokens.shape)}; a token file is one flat "
                f"array of integers; save `ids.astype('uint16').reshape(-1)`"
            )
    else:
        kind = _token_type(dtype)
        if size % kind.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, which is not a multiple of the {kind.itemsize} bytes "
                f"of dtype {kind}; a .bin file is nothing but ids; give the dtype it was written in"
            )
        tokens = np.memmap(path, kind, mode="r") if size else np.zeros(0, kind)
    if not len(tokens):
        raise ValueError(
            f"{path} is empty; a token file needs at least one token; write it again or remove it"
        )
    return tokens.view(np.ndarray)


def _token_type(dtype: str) -> np.dtype:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise ValueError(
            f"dtype {dtype!r} is not an integer type; .bin files hold whole token ids; "
            f"use uint16 (as nanoGPT writes), uint32 or int32"
        )
    return kind
