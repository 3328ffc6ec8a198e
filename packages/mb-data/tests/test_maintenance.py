"""Tools on token files: each fault is found and named, each result read back."""

import os
import random
import shutil
import struct

import numpy as np
import pytest
from mb_data import IndexedDataset, IndexedDatasetBuilder, load_tokenizer
from mb_data.cli import main
from mb_data.maintenance import convert, decode, inspect, merge, shuffle, validate


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        builder.add_document([15496, 995, 50256], [2, 1])
        builder.add_document([])
        builder.add_document([64, 275])
    return tmp_path / "a"


def patch(path, offset, kind, value):
    raw = bytearray(path.read_bytes())
    struct.pack_into(kind, raw, offset, value)
    path.write_bytes(raw)


def test_inspect(prefix, capsys):
    found = inspect(prefix)
    assert (found.documents, found.sequences, found.tokens) == (3, 4, 5)
    assert (found.shortest, found.longest, found.mean, found.empty_sequences) == (0, 2, 1.25, 1)
    assert (found.dtype, found.bin_bytes, found.idx_bytes) == ("uint16", 10, 34 + 12 * 4 + 8 * 4)
    assert main(["inspect", str(prefix)]) == 0
    assert "3 documents, 4 sequences, 5 tokens, uint16" in capsys.readouterr().out


def test_validate_whole(prefix, capsys):
    assert validate(prefix, vocab_size=50257) == []
    assert main(["validate", str(prefix), "--vocab-size", "50257"]) == 0
    assert capsys.readouterr().out == f"{prefix}: whole\n"


POINTERS = 34 + 4 * 4
DOCUMENTS = POINTERS + 8 * 4


@pytest.mark.parametrize(
    ("offset", "kind", "value", "message"),
    [
        (34 + 4, "<i", -1, "sequence 1 has length -1"),
        (34, "<i", 1, "sequence 1 points to byte 4, not to the end"),
        (POINTERS + 16, "<q", 8, "sequence 2 points to byte 8"),
        (34 + 12, "<i", 1, "10 bytes, the index accounts for 8"),
        (DOCUMENTS + 8, "<q", 4, "document 1 starts at sequence 4, the next one before it at 3"),
        (9, "<Q", 3, "version 3"),
    ],
)
def test_validate_names_the_fault(prefix, capsys, offset, kind, value, message):
    patch(prefix.with_suffix(".idx"), offset, kind, value)
    (problem,) = validate(prefix)
    assert message in problem
    assert main(["validate", str(prefix)]) == 2
    assert message in capsys.readouterr().err


def test_a_token_that_is_no_number_is_outside_every_vocabulary(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.float32) as builder:
        builder.add_document(np.array([1, np.nan, 2], np.float32))
    assert validate(tmp_path / "x") == []
    assert "token nan in sequence 0" in validate(tmp_path / "x", vocab_size=10)[0]


def test_validate_more(prefix):
    assert (
        "token 50256 in sequence 1, the vocabulary has 50,000 ids"
        in validate(prefix, vocab_size=50_000)[0]
    )
    with open(prefix.with_suffix(".idx"), "ab") as file:
        file.write(b"surplus")
    with open(prefix.with_suffix(".bin"), "ab") as file:
        file.write(b"more")
    longer_index, longer_data = validate(prefix)
    assert "121 bytes, 114 expected" in longer_index
    assert "14 bytes, the index accounts for 10" in longer_data
    assert "no such file" in validate(prefix.with_name("missing"))[0]


@pytest.mark.parametrize("by", ["prefix", "directory"])
def test_merge(prefix, tmp_path, capsys, by):
    with IndexedDatasetBuilder(tmp_path / "b", "u2") as builder:
        builder.add_document([7, 8, 9])
    inputs = [tmp_path] if by == "directory" else [prefix, tmp_path / "b"]
    out = tmp_path / "sub" / "joined"
    out.parent.mkdir()
    assert main(["merge", "--input", *map(str, inputs), "--output-prefix", str(out)]) == 0
    assert "2 datasets joined" in capsys.readouterr().out
    joined = IndexedDataset(out)
    assert [x.tolist() for x in joined[:]] == [[15496, 995], [50256], [], [64, 275], [7, 8, 9]]
    assert joined.document_indices.tolist() == [0, 2, 3, 4, 5]
    assert validate(out) == []


def test_merge_of_a_directory_wants_finished_parts(prefix, tmp_path):
    """A part that failed was left out without a word."""
    for end in (".bin", ".idx"):  # of a builder that was killed before it gave them their names
        shutil.copy(f"{prefix}{end}", tmp_path / f"b.7-0a.partial{end}")
    (tmp_path / "c.partial").mkdir()  # a folder of somebody else's
    assert merge([tmp_path], tmp_path / "one") == 1
    for end, other in ((".idx", ".bin"), (".bin", ".idx")):  # half of one, as of a copy broken off
        shutil.copy(f"{prefix}{end}", tmp_path / f"d{end}")
        with pytest.raises(ValueError, match=rf"d\{other}: no such file.*; nothing was joined"):
            merge([tmp_path], tmp_path / "two")
        (tmp_path / f"d{end}").unlink()
    (tmp_path / "c.partial" / "lock").touch()
    with pytest.raises(ValueError, match=r"c\.partial keeps the work of .*nothing was joined"):
        merge([tmp_path], tmp_path / "two")


def test_merge_of_a_directory_with_several_keys(tmp_path):
    """Titles were joined with texts."""
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("0_text_document", "1_text_document", "0_title_document"):
        with IndexedDatasetBuilder(parts / name, "u2") as builder:
            builder.add_document([1, 2])
    with pytest.raises(ValueError, match=r"0_text_document and .*0_title_document hold several"):
        merge([parts], tmp_path / "both")
    for end in (".bin", ".idx"):
        (parts / f"0_title_document{end}").unlink()
    assert merge([parts], tmp_path / "both") == 2


def test_merge_with_modes(prefix, tmp_path):
    for name, modes in (("m", [0, 1]), ("n", [1, 1])):
        with IndexedDatasetBuilder(tmp_path / name, "u2") as builder:
            builder.add_document([1, 2], [1, 1], modes=modes)
    merge([tmp_path / "m", tmp_path / "n"], tmp_path / "both")
    assert IndexedDataset(tmp_path / "both").modes.tolist() == [0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"n has sequence modes, .*a has none"):
        merge([prefix, tmp_path / "n"], tmp_path / "mixed")
    assert not list(tmp_path.glob("mixed*"))


def test_merge_checks_all_inputs_first(prefix, tmp_path):
    """Surplus bytes at the end of a .bin would shift every later document."""
    with IndexedDatasetBuilder(tmp_path / "b", "u2") as builder:
        builder.add_document([7])
    with open(tmp_path / "b.bin", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"b\.bin: 6 bytes, the index accounts for 2; nothing was"):
        merge([prefix, tmp_path / "b"], tmp_path / "both")
    assert not list(tmp_path.glob("both*"))


def test_merge_refuses(prefix, tmp_path):
    before = sorted(os.listdir(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no dataset in"):
        merge([tmp_path / "empty"], tmp_path / "out")
    with pytest.raises(ValueError, match="got an empty name"):
        merge(["", prefix], tmp_path / "out")
    for other_name in (prefix, f"{prefix.parent}/empty/../{prefix.name}"):
        with pytest.raises(ValueError, match="give the result another name"):
            merge([prefix], other_name)
    with IndexedDatasetBuilder(tmp_path / "b", "i4") as builder:
        builder.add_document([7])
    with pytest.raises(ValueError, match="holds int32, the output uint16"):
        merge([prefix, tmp_path / "b"], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "b.bin", "b.idx", "empty"])


def test_decode(prefix, capsys):
    gpt2 = load_tokenizer("gpt2")
    assert decode(prefix, 0, gpt2) == "Hello world<|endoftext|>"
    assert decode(prefix, 1, gpt2) == ""
    with pytest.raises(
        IndexError, match=r"a document from 0 up to but not 3, as many as there are, got 3"
    ):
        decode(prefix, 3, gpt2)
    assert main(["decode", str(prefix), "2", "0"]) == 0
    assert capsys.readouterr().out == "a b\nHello world<|endoftext|>\n"
    assert main(["decode", str(prefix), "3"]) == 2
    assert (
        "a document from 0 up to but not 3, as many as there are, got 3" in capsys.readouterr().err
    )


def write_legacy(prefix, documents, code=4, width=4, kind="i"):
    """Megatron's former format, from its description, with struct alone."""
    sentences = [s for d in documents for s in d]
    offsets = np.cumsum([0, *map(len, sentences)]).tolist()
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    n = len(sentences)
    index = b"TNTIDX\0\0" + struct.pack("<6Q", 1, code, width, n, n, len(starts))
    for values in (range(n + 1), offsets, [len(s) for s in sentences], starts):
        index += struct.pack(f"<{len(values)}q", *values)
    tokens = [t for s in sentences for t in s]
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))


@pytest.mark.parametrize("seed", range(5))
def test_convert(tmp_path, seed, capsys):
    rng = random.Random(seed)
    documents = [
        [[rng.randrange(70_000) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(3))]
        for _ in range(seed * 3)
    ]
    write_legacy(tmp_path / "old", documents)
    with pytest.raises(ValueError, match="run `mb-data convert`"):
        IndexedDataset(tmp_path / "old")
    arguments = ["convert", "--input", str(tmp_path / "old"), "--output-prefix"]
    assert main([*arguments, str(tmp_path / "new")]) == 0
    dataset = IndexedDataset(tmp_path / "new")
    assert dataset.dtype == np.int32
    assert [x.tolist() for x in dataset[:]] == [s for d in documents for s in d]
    assert np.diff(dataset.document_indices).tolist() == [len(d) for d in documents]
    assert validate(tmp_path / "new") == []
    assert main([*arguments, str(tmp_path / "old")]) == 2
    assert "another name" in capsys.readouterr().err


def test_convert_refuses_damage(tmp_path, prefix):
    with pytest.raises(ValueError, match="not a TNTIDX index"):
        convert(prefix, tmp_path / "new")
    write_legacy(tmp_path / "old", [[[1, 2], [3]]])
    whole = (tmp_path / "old.idx").read_bytes()
    for length in range(8, len(whole)):
        (tmp_path / "old.idx").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut off|not a TNTIDX"):
            convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old.idx").write_bytes(whole)
    patch(tmp_path / "old.idx", 16, "<Q", 5)
    with pytest.raises(ValueError, match="dtype code 5 of 4 bytes"):
        convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old.idx").write_bytes(whole)
    patch(tmp_path / "old.idx", 56 + 8, "<q", 2)
    with pytest.raises(ValueError, match="several dimensions"):
        convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old.idx").write_bytes(whole)
    (tmp_path / "old.bin").write_bytes(b"\0" * 11)
    with pytest.raises(ValueError, match="11 bytes, its index needs 12"):
        convert(tmp_path / "old", tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def test_shuffle(prefix, tmp_path, capsys):
    out = tmp_path / "b"
    assert main(["shuffle", "--input", str(prefix), "--output-prefix", str(out)]) == 0
    assert "b: 3 documents" in capsys.readouterr().out

    def documents(p):
        dataset = IndexedDataset(p)
        return [
            [dataset[s].tolist() for s in dataset.document(d)] for d in range(dataset.num_documents)
        ]

    assert sorted(documents(out)) == sorted(documents(prefix))
    orders = set()
    for seed in range(20):
        shuffle(prefix, out, seed=seed)
        orders.add(str(documents(out)))
    assert len(orders) == 6
    with pytest.raises(ValueError, match="is the input"):
        shuffle(prefix, prefix, seed=0)


def test_shuffle_takes_modes_along(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        for first in range(5):
            builder.add_document([first, 7, 8], [1, 2], modes=[first, 9])
    shuffle(tmp_path / "a", tmp_path / "b", seed=1)
    dataset = IndexedDataset(tmp_path / "b")
    firsts = [int(dataset[s][0]) for s in range(0, 10, 2)]
    assert sorted(firsts) == list(range(5)) != firsts
    assert dataset.modes.tolist() == [mode for first in firsts for mode in (first, 9)]
