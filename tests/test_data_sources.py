"""Data sources: builtin text, files, folders, JSON-lines, token files, tokenizers, refusals."""

import json
import time

import numpy as np
import pytest

from jaxpar.data import batches, documents_from_arrays, load_documents, pack_rows, rows_per_epoch


def texts_of(documents):
    return [bytes(documents[i].tolist()).decode() for i in range(len(documents))]


def test_builtin_is_the_standard_library_the_same_each_time_and_quick():
    load_documents("builtin")  # the first time reads from disk
    begin = time.perf_counter()
    documents = load_documents("builtin", vocab_size=256)
    assert time.perf_counter() - begin < 1
    again = load_documents("builtin")
    np.testing.assert_array_equal(documents.buffers[0], again.buffers[0])
    names = [documents.files[f] for f in documents.file]
    assert names == sorted(names) and {"ast.py", "json/decoder.py"} <= set(names)
    assert not any(
        part in ("test", "tests", "site-packages") for n in names for part in n.split("/")
    )
    assert 3_000_000 < documents.num_tokens <= 16_000_000
    assert texts_of(documents.select([names.index("ast.py")]))[0].lstrip().startswith(('"""', "#"))
    assert documents.bytes_per_token == 1.0


def test_a_folder_of_text_is_a_document_a_file_nested_and_sorted(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name, text in {"z.txt": "zz", "b/a.md": "é!", "c": "c", "empty.py": "", ".hidden": "h",
                       "__pycache__/x.txt": "x"}.items():  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
    documents = load_documents(tmp_path)
    assert texts_of(documents) == ["é!", "c", "zz"]
    assert [documents.name(i) for i in range(3)] == [
        "document 1 of b/a.md", "document 1 of c", "document 1 of z.txt"]  # fmt: skip
    assert texts_of(load_documents(tmp_path / "z.txt")) == ["zz"]


def test_json_lines_is_a_document_a_line(tmp_path):
    texts = ["one\u2028still one", "zwei \U0001f600", ""]
    lines = [json.dumps({"text": text, "id": 3}) for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n", encoding="utf-8")
    documents = load_documents(path)
    assert texts_of(documents) == texts[:2]
    assert documents.name(1) == "document 3 of a.jsonl"  # its line


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32"])
def test_token_files_are_memory_mapped_and_cut_after_eos(tmp_path, kind):
    ids = np.array([5, 6, 0, 7, 0, 8, 9], kind)
    np.save(tmp_path / "a.npy", ids)
    ids[:4].tofile(tmp_path / "b.bin")
    whole = load_documents(tmp_path, dtype=kind)
    assert [whole[i].tolist() for i in range(2)] == [[5, 6, 0, 7, 0, 8, 9], [5, 6, 0, 7]]
    assert all(isinstance(buffer.base, np.memmap) for buffer in whole.buffers)
    assert whole.bytes_per_token is None
    cut = load_documents(tmp_path, dtype=kind, eos=0, vocab_size=10)
    assert [cut[i].tolist() for i in range(len(cut))] == [[5, 6, 0], [7, 0], [8, 9], [5, 6, 0], [7]]
    assert cut.name(2) == "document 3 of a.npy" and cut.name(4) == "document 2 of b.bin"


def test_rows_of_memory_mapped_files_equal_rows_of_arrays(tmp_path):
    random = np.random.default_rng(0)
    parts = [random.integers(1, 99, size) for size in (40, 3, 77)]
    for name, part in zip("abc", parts, strict=True):
        part.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    mapped, held = load_documents(tmp_path), documents_from_arrays(parts)
    rows = np.arange(2 * rows_per_epoch(held, 16))
    one, other = (pack_rows(each, rows, seq_len=16, seed=2) for each in (mapped, held))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)


def test_uint16_is_the_default_of_bin_files_and_eos_is_added_to_texts(tmp_path):
    np.array([1, 65535, 3], np.uint16).tofile(tmp_path / "train.bin")
    assert load_documents(tmp_path / "train.bin")[0].tolist() == [1, 65535, 3]
    (tmp_path / "a.txt").write_text("ab")
    assert load_documents(tmp_path / "a.txt", eos=256, vocab_size=257)[0].tolist() == [97, 98, 256]


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "again": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)  # as files for encoders have; documents must stay whole
    tokenizer.enable_padding(length=8)
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words" / "tokenizer.json"


def test_a_hugging_face_tokenizer_encodes_whole_documents(tmp_path, tokenizer_file):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello world again what"}\n{"text": "world"}\n')
    for tokenizer in (tokenizer_file, str(tokenizer_file), tokenizer_file.parent):
        documents = load_documents(path, tokenizer, vocab_size=4)
        assert [documents[i].tolist() for i in range(2)] == [[1, 2, 3, 0], [2]]
    assert documents.bytes_per_token == (22 + 5) / 5
    with pytest.raises(ValueError, match=r"token id 3 in document 1 of .*a.jsonl is outside vocab"):
        load_documents(path, tokenizer_file, vocab_size=3)


# --- refusals ------------------------------------------------------------------------------------


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


REFUSED = {
    "missing path": ({}, "nowhere", {}, r"data source .*nowhere does not exist; .*\"builtin\""),
    "empty file": ({"a.txt": ""}, "a.txt", {}, r"a\.txt has no tokens; .*not empty"),
    "empty folder": ({"sub/.keep": ""}, "sub", {}, r"folder .*sub has no files"),
    "empty files": ({"d/a.py": "", "d/b.py": ""}, "d", {}, r"d has no tokens"),
    "unknown suffix": ({"a.parquet": b"PAR1\xff\xfe\x00"}, "a.parquet", {},
                       r"a\.parquet is not UTF-8 text \(byte 4 is not\); .*\.npy or \.bin"),
    "image in a folder": ({"d/a.txt": "a", "d/b.png": b"\x89PNG"}, "d", {}, r"b\.png is not UTF-8"),
    "bad JSON": ({"a.jsonl": '{"text": "a"}\n{"text": \n'}, "a.jsonl", {},
                 r"a\.jsonl line 2 is not JSON"),
    "not UTF-8 in JSON": ({"a.jsonl": b'{"text": "\xff"}\n'}, "a.jsonl", {}, r"line 1 is not JSON"),
    "missing field": ({"a.jsonl": '{"text": "a"}\n\n{"body": "b"}'}, "a.jsonl", {},
                      r"a\.jsonl line 3 has no string in the field `text` \(it has \['body'\]\)"),
    "text is no string": ({"a.jsonl": '{"text": 3}'}, "a.jsonl", {}, r"line 1 has no string"),
    "line is no object": ({"a.jsonl": '["a"]'}, "a.jsonl", {}, r"\(it is not an object\)"),
    "half a surrogate": ({"a.jsonl": '{"text": "a\\ud800"}'}, "a.jsonl", {},
                         r"line 1 has half a surrogate pair at character 1"),
    "empty .npy": ({"a.npy": np.zeros(0, np.uint16)}, "a.npy", {}, r"a\.npy is empty"),
    "empty .bin": ({"a.bin": b""}, "a.bin", {}, r"a\.bin is empty"),
    "broken .npy": ({"a.npy": b"no numpy"}, "a.npy", {}, r"a\.npy is not a \.npy file"),
    "float .npy": ({"a.npy": np.ones(3)}, "a.npy", {}, r"a\.npy holds float64 \[3\]"),
    "2-D .npy": ({"a.npy": np.ones((2, 3), int)}, "a.npy", {}, r"a\.npy holds int64 \[2, 3\]"),
    "odd .bin": ({"a.bin": b"abc"}, "a.bin", {}, r"3 bytes, which is not a multiple of the 2"),
    "bad dtype": ({"a.bin": b"ab"}, "a.bin", {"dtype": "float32"}, r"'float32' is not an integer"),
    "no dtype": ({"a.bin": b"ab"}, "a.bin", {"dtype": "u17"}, r"'u17' is not an integer"),
    "eos nowhere": ({"a.bin": b"abcd"}, "a.bin", {"eos": 7}, r"eos=7 does not occur in .*a\.bin"),
    "text and tokens": ({"d/a.bin": b"ab", "d/notes.txt": "x"}, "d", {},
                        r"holds token files \(a\.bin\) and notes\.txt"),
    "id too large": ({"d/a.npy": np.array([1, 2]), "d/b.npy": np.array([3, 0, 70, 5, 0, 300])}, "d",
                     {"vocab_size": 256, "eos": 0},
                     r"token id 300 in document 3 of .*b\.npy is outside vocab_size 256; "),
    "negative id": ({"a.npy": np.array([1, -1])}, "a.npy", {"vocab_size": 9}, r"token id -1 in"),
    "id beyond int32": ({"a.npy": np.array([2**31])}, "a.npy", {}, r"token id 2147483648 in"),
    "byte beyond the vocabulary": ({"a.txt": "az"}, "a.txt", {"vocab_size": 100},
                                   r"token id 122 in document 1 of .*a\.txt is outside"),
    "missing tokenizer": ({"a.txt": "a"}, "a.txt", {"tokenizer": "byte"},
                          r"tokenizer \"byte\" does not exist"),
    "broken tokenizer": ({"a.txt": "a"}, "a.txt", {"tokenizer": __file__}, r"cannot be read \("),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence_that_names_it(tmp_path, case):
    files, source, options, message = REFUSED[case]
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as error:
        batches(tmp_path / source, global_batch=2, seq_len=4, split="all", **options)
    assert "\n" not in str(error.value) and str(error.value).count("; ") >= 2
