"""Data: from text or token files to batches that are a pure function of (seed, step).

    load_documents -> split_documents -> pack_rows -> host_batch -> batches

documents.py holds tokens, sources.py reads them, packing.py cuts rows, batches.py lays them out on
the mesh. Importing this starts no JAX backend and loads neither grain nor tokenizers.
"""

from jaxpar.data.batches import batches, check_batch, heldout_batches, host_batch
from jaxpar.data.documents import Documents, documents_from_arrays, split_documents
from jaxpar.data.packing import pack_rows, rows_per_epoch
from jaxpar.data.sources import load_documents
from jaxpar.data.tokenizer import load_tokenizer

__all__ = [
    "Documents",
    "batches",
    "check_batch",
    "documents_from_arrays",
    "heldout_batches",
    "host_batch",
    "load_documents",
    "load_tokenizer",
    "pack_rows",
    "rows_per_epoch",
    "split_documents",
]
