"""Tokenizers: from texts to token ids.

The one idea: a tokenizer is a function from a list of texts to a list of integer arrays; "bytes"
needs no file and has ids 0..255.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def load_tokenizer(tokenizer: str | os.PathLike = "bytes") -> Encode:
    """Returns the function that encodes texts: "bytes", or a Hugging Face tokenizer.json.

    A folder stands for the tokenizer.json in it. Truncation and padding that the file asks for are
    turned off: every token of a document counts. Special tokens are added as the file says.

    Raises ValueError if there is no such file, or it is not a tokenizer.

    >>> [ids.tolist() for ids in load_tokenizer("bytes")(["hi", ""])]
    [[104, 105], []]
    """
    if tokenizer == "bytes":
        return _encode_bytes
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else str(tokenizer)
    if not os.path.isfile(path):
        raise ValueError(
            f'tokenizer "{tokenizer}" does not exist; a tokenizer is "bytes" or the path of a '
            f'tokenizer.json; check the path or use "bytes"'
        )
    from tokenizers import Tokenizer

    try:
        model = Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"tokenizer {path} cannot be read ({error}); it must be a tokenizer.json as the "
            f'`tokenizers` library writes it; save it again or use "bytes"'
        ) from None
    model.no_truncation()
    model.no_padding()
    kind = np.uint16 if model.get_vocab_size() <= 1 << 16 else np.int32

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(one.ids, kind) for one in model.encode_batch_fast(list(texts))]

    return encode


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]
