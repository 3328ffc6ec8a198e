"""Tokenizers from names and files, each against an implementation that is not ours."""

import base64
import json
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import tiktoken
from mb_data import hugging_face_files, load_tokenizer, megatron_tokenizer
from mb_data.tokenizer.libraries import HuggingFaceTokenizer
from mb_data.tokenizer.rank_files import PATTERNS
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, byte_to_letter
from tokenizer_helpers import UNDISPUTED_TEXTS, bpe_json, library

GPT2 = load_tokenizer("gpt2")
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def small_bpe():
    """The first 2,000 merges of GPT-2: ids by byte string, by letters, and lines of merges."""
    lines = list(GPT2.readable.ranks)[:2000]
    letters = [*byte_to_letter().values(), *(line.replace(" ", "") for line in lines)]
    ids = {GPT2.byte_strings[i]: i for i in range(len(letters))}
    return ids, {entry: i for i, entry in enumerate(letters)}, lines


def reference(ids, pattern, special=None):
    return tiktoken.Encoding(
        "reference", pat_str=pattern, mergeable_ranks=ids, special_tokens=special or {}
    )


@pytest.mark.parametrize("given", ["vocab.json", "merges.txt", "."])
@pytest.mark.parametrize("engine", ["gigatoken", "python"])
def test_vocab_json_and_merges(tmp_path, small_bpe, given, engine):
    ids, letters, lines = small_bpe
    order = list(range(len(ids)))
    random.Random(0).shuffle(order)  # ids need not follow the merges
    vocab = dict(zip(letters, order, strict=True)) | {"<|endoftext|>": len(ids)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    tokenizer = load_tokenizer(tmp_path / given, engine=engine, num_extra_ids=3)
    assert tokenizer.engine == engine
    assert tokenizer.vocab_size == len(ids) + 4
    assert tokenizer.eod == len(ids)
    assert tokenizer.extra_ids == (len(ids) + 1, len(ids) + 2, len(ids) + 3)
    oracle = reference(ids, GPT2_PATTERN)
    for text in UNDISPUTED_TEXTS:
        assert tokenizer.encode(text) == [order[i] for i in oracle.encode_ordinary(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eod, tokenizer.extra_ids[2]]) == "<|endoftext|><extra_id_2>"


def tokenizer_json(small_bpe, **changes):
    ids, letters, lines = small_bpe
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(ids), "content": "<|begin|>", "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False},
            {"id": len(ids) + 1, "content": "<|endoftext|>", "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": LLAMA3_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
                | {"trim_offsets": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": letters,
            "merges": [line.split(" ") for line in lines],
            "ignore_merges": True,
        },
    }
    return description | changes


@pytest.mark.parametrize("engine", ["gigatoken", "python", "tokenizers"])
def test_tokenizer_json(tmp_path, small_bpe, engine):
    if engine == "tokenizers":
        pytest.importorskip("tokenizers")
    ids, _, _ = small_bpe
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(small_bpe)))
    tokenizer = load_tokenizer(path, engine=engine)
    oracle = reference(ids, LLAMA3_PATTERN)
    for text in UNDISPUTED_TEXTS:
        assert tokenizer.encode(text) == oracle.encode_ordinary(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == tokenizer.eos == len(ids) + 1
    assert tokenizer.vocab_size == len(ids) + 2
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|begin|>", "pad_token": {"content": "<|endoftext|>"}})
    )
    tokenizer = load_tokenizer(tmp_path, engine=engine)
    assert (tokenizer.eod, tokenizer.pad) == (len(ids), len(ids) + 1)


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
@pytest.mark.parametrize("wrong", [3_000_000_000, 1 << 40, -1, 1e3, True])
@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
def test_an_id_that_no_vocabulary_has_is_refused(tmp_path, small_bpe, engine, wrong, where):
    """For the first of these an engine asks for 48 GB, and ends the process if it gets none."""
    if engine == "tokenizers":
        pytest.importorskip("tokenizers")
    description = json.loads(json.dumps(tokenizer_json(small_bpe)))  # others read the fixture too
    if where == "vocab":
        description["model"]["vocab"]["qqq"] = wrong
    else:
        description["added_tokens"][1]["id"] = wrong
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(path, engine=engine)


@pytest.mark.parametrize("first", [10**9, -3, float("inf")])
def test_special_tokens_without_number_are_refused(tmp_path, first):
    rows = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    config = {"pattern": ".", "default_num_special_tokens": first, "default_vocab_size": 10**10}
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": rows}))
    with pytest.raises(ValueError, match=r"not a tekken\.json"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match="number of extra ids"):
        load_tokenizer("gpt2", num_extra_ids=10**12)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "tekken.json"]
)
def test_json_that_is_nested_too_deeply_is_damaged(tmp_path, small_bpe, name):
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(small_bpe)))
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_tokenizer(tmp_path / name.replace("_config", ""))


def test_what_is_no_merge_and_no_pattern_is_said(tmp_path, small_bpe):
    path = tmp_path / "tokenizer.json"
    description = tokenizer_json(small_bpe)
    description["model"]["merges"].append(5)
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="merges must be lines or pairs"):
        load_tokenizer(path)
    path.write_text(
        json.dumps(tokenizer_json(small_bpe)).replace(json.dumps(LLAMA3_PATTERN), '"((("')
    )
    with pytest.raises(ValueError, match=r"pattern '\(\(\(' cannot be read: missing"):
        load_tokenizer(path, engine="python").encode("a b")


@pytest.mark.parametrize("engine", ["gigatoken", "python", "tokenizers"])
def test_an_id_in_a_gap_of_the_vocabulary_is_no_text(tmp_path, small_bpe, engine):
    if engine == "tokenizers":
        pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    description = tokenizer_json(small_bpe)
    end = description["added_tokens"][1]
    description["added_tokens"] = [end | {"id": end["id"] + 8}]
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(path, engine=engine)
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.vocab_size == end["id"] + 9
    gap = np.arange(end["id"] - 1, end["id"] + 2)
    assert tokenizer.decode([*a, *gap, *b, *gap, tokenizer.eod]) == "ab<|endoftext|>"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token {wrong} is not in 0 to {end['id'] + 8}"):
            tokenizer.decode([*a, wrong])


@pytest.mark.parametrize("engine", ["python", "tokenizers"])
@pytest.mark.parametrize("around", ["<|begin|> A", "A", "<|begin|> A <|endoftext|>"])
def test_megatrons_hugging_face_tokenizer_begins_documents_as_the_template(
    tmp_path, small_bpe, around, engine
):
    tokenizers = pytest.importorskip("tokenizers")
    begin = len(small_bpe[0])
    single = [
        {"Sequence": {"id": word, "type_id": 0}}
        if word == "A"
        else {"SpecialToken": {"id": word, "type_id": 0}}
        for word in around.split()
    ]
    names = {"<|begin|>": begin, "<|endoftext|>": begin + 1}
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()}
    template = {"type": "TemplateProcessing", "single": single, "pair": single}
    parts = [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        template | {"special_tokens": special},
    ]
    path = tmp_path / "tokenizer.json"
    post = {"type": "Sequence", "processors": parts}
    path.write_text(json.dumps(tokenizer_json(small_bpe, post_processor=post)))
    beside = {"bos_token": "<|begin|>", "add_bos_token": around != "<|begin|> A"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(beside))
    plain = load_tokenizer(path, engine=engine)
    tokenizer = megatron_tokenizer("HuggingFaceTokenizer", tokenizer_model=path, engine=engine)
    ids = tokenizer.encode(UNDISPUTED_TEXTS[1])
    assert (plain.encode(UNDISPUTED_TEXTS[1]), plain.prepend_bos) == (ids, False)
    if around.endswith(" A"):
        assert (tokenizer.prepend_bos, tokenizer.bos) == (True, begin)
        ids = [tokenizer.bos, *ids]
        assert pickle.loads(pickle.dumps(tokenizer)).prepend_bos
    if not around.endswith("|>"):
        assert ids == tokenizers.Tokenizer.from_file(str(path)).encode(UNDISPUTED_TEXTS[1]).ids
    else:
        assert not tokenizer.prepend_bos


def test_tokenizer_json_of_another_kind_goes_to_the_library(tmp_path, small_bpe):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(small_bpe, normalizer={"type": "Lowercase"})))
    tokenizer = load_tokenizer(path, num_extra_ids=2)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    plain = tokenizers.Tokenizer.from_file(str(path))
    assert tokenizer.encode("Hello WORLD") == plain.encode("hello world").ids
    assert 2257 not in tokenizer.encode("<|endoftext|>")
    ids = [*tokenizer.encode("a b"), tokenizer.extra_ids[1], *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "a b<extra_id_1>c"
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match="no plain byte-level BPE: expected auto or tokenizers"):
        load_tokenizer(path, engine="python")


def test_a_pattern_that_the_library_means_otherwise_goes_to_it(tmp_path):
    """cl100k's own, whose {1,3}+ is any number of digits to the library that the file is for."""
    description = bpe_json((PATTERNS["gpt4"],), None, False)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    judge, text = library(description), "in 1234567 days\n"
    assert load_tokenizer(path).encode(text) == judge.encode(text).ids
    with pytest.raises(ValueError, match="no plain byte-level BPE: expected auto or tokenizers"):
        load_tokenizer(path, engine="python")


@pytest.mark.parametrize("engine", ["auto", "python", "tokenizers"])
def test_dropout_leaves_the_tokens_of_a_document_alone(tmp_path, small_bpe, engine):
    pytest.importorskip("tokenizers")
    description = tokenizer_json(small_bpe)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    expected = load_tokenizer(path).encode(UNDISPUTED_TEXTS[1])
    description["model"]["dropout"] = 0.5
    path.write_text(json.dumps(description))
    assert load_tokenizer(path, engine=engine).encode(UNDISPUTED_TEXTS[1]) == expected


def test_an_added_token_that_is_normalized_to_nothing(tmp_path, small_bpe):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    description = tokenizer_json(small_bpe, normalizer=strip)
    path.write_text(json.dumps(description))
    plain = load_tokenizer(path)
    last = description["added_tokens"][1]
    blank = {"id": last["id"] + 1, "content": "\n\n", "normalized": True, "special": False}
    description["added_tokens"].append(last | blank)
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(path)
    for text in (" é\n\n a ", "é", "\n\n"):
        assert tokenizer.encode(text) == plain.encode(text)
    assert (tokenizer.vocab_size, tokenizer.decode([blank["id"]])) == (blank["id"] + 1, "\n\n")


@pytest.mark.parametrize("engine", ["gigatoken", "python", "tokenizers"])
def test_added_tokens_that_are_ordinary_entries_and_bytes_that_no_text_has(
    tmp_path, small_bpe, engine
):
    """Padding with `!`, a word made known twice; and DeepSeek's files, which lack bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    description = tokenizer_json(small_bpe)
    vocabulary, end = dict(small_bpe[1]), description["added_tokens"][1]
    for byte in (0xC0, 0xC1, *range(0xF5, 0x100)):
        del vocabulary[byte_to_letter()[byte]]
    description["model"]["vocab"] = vocabulary
    judge = tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))
    description["added_tokens"] += [end | {"id": vocabulary[e], "content": e} for e in ("!", "the")]
    description["added_tokens"] += [end | {"id": end["id"] + 1, "content": "ø", "special": False}]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(path, engine=engine, eod_token="!")
    for text in ("the! øther <|endoftext|>", *UNDISPUTED_TEXTS):
        assert tokenizer.encode(text) == judge.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    documents = tokenizer.encode_documents([b"a!", b"", b"!"], append_eod=True)[0].tolist()
    assert documents == [vocabulary[e] for e in "a!!!!"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    tokenizer = load_tokenizer(path, engine=engine)
    assert tokenizer.encode_documents([b"a!", b"", b"!"], append_eod=True)[0].tolist() == documents


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_control_tokens_are_no_text_in_models_that_find_entries(tmp_path, kind):
    """T5's file has </s> as a piece, which Unigram finds in every text."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["<unk>", "</s>", "!", *map(chr, range(97, 123)), *"<>/▁", "▁the"]
    if kind == "Unigram":
        scores = [0.0 if len(piece) > 4 or piece == "</s>" else -5.0 for piece in pieces]
        model = tokenizers.models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0)
        words = tokenizers.pre_tokenizers.Metaspace()
    else:
        model = tokenizers.models.WordLevel({e: i for i, e in enumerate(pieces)}, unk_token="<unk>")
        words = tokenizers.pre_tokenizers.WhitespaceSplit()
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = words
    library.add_special_tokens(["<unk>", "</s>", "!"])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eod, tokenizer.vocab_size) == (1, len(pieces))
    assert tokenizer.encode("the a ! </s>")[-1] == (pieces.index(">") if kind == "Unigram" else 0)
    assert 1 not in tokenizer.encode("the </s> a</s>")
    assert 2 in tokenizer.encode("a ! b")
    assert tokenizer.decode([pieces.index("a"), 1, 0]) == "a</s><unk>"


def test_without_the_tokenizers_library(tmp_path, small_bpe):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(small_bpe, normalizer={"type": "Lowercase"})))
    code = (
        "import sys; sys.modules['tokenizers'] = None; from mb_data.cli import main\n"
        "from mb_data import load_tokenizer\n"
        "assert load_tokenizer('bert-base-uncased').engine == 'python'\n"
        f"sys.exit(main(['decode', 'x', '0', '--tokenizer', {str(path)!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "pip install 'mb-data[tokenizers]'" in run.stderr


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased:8192"])
def test_transformers_gives_the_same_ids(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(name, num_extra_ids=3)
    sentences = name != "gpt2"
    for file, text in hugging_face_files(tokenizer, sentences=sentences).items():
        (tmp_path / file).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.vocab_size
    again = load_tokenizer(tmp_path)
    rng = random.Random(1)
    letters = [*"etaoin  \n\t.,'-$^~[]#0129\0\x7f", *map(chr, range(0xA0, 0x370)), *"你好🙂\u200d"]
    drawn = ["".join(rng.choices(letters, k=60)) for _ in range(300)]
    for text in [*UNDISPUTED_TEXTS, "x" * 150, "x" * 250, *drawn]:
        before = tokenizer.careful_documents
        expected = tokenizer.encode(text)
        if tokenizer.careful_documents == before and "[MASK]" not in text:
            assert theirs.encode(text, add_special_tokens=False) == expected
            assert again.encode(text) == expected
    assert tokenizer.careful_documents < 30
    assert theirs.encode("<extra_id_2>")[sentences] == tokenizer.extra_ids[2]
    assert theirs.eos_token_id == tokenizer.special["eos" if sentences else "eod"] == again.eod
    assert ("token_type_ids" in theirs("x")) == sentences
    if sentences:
        assert theirs("x", "y")["token_type_ids"] == [0, 0, 0, 1, 1]
        assert theirs.decode(theirs("x", "y")["input_ids"]) == "[CLS] x [SEP] y [SEP]"
        np.testing.assert_array_equal(again.word_starts(), tokenizer.word_starts())
        assert again.extra_ids == tokenizer.extra_ids


def test_texts_of_another_program_end_as_documents_do(tmp_path):
    """A GPT on BERT's words; the file's [EOS] is a T5's."""
    tokenizer = load_tokenizer("bert-base-uncased", eod_token="[SEP]")
    for file, text in hugging_face_files(tokenizer).items():
        (tmp_path / file).write_text(text)
    assert load_tokenizer(tmp_path).eod == tokenizer.eod == 102
    of_t5 = hugging_face_files(load_tokenizer("bert-base-uncased"))
    assert '"eos_token": "[EOS]"' in of_t5["tokenizer_config.json"]


def test_null_tokenizer():
    tokenizer = megatron_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode("1 99\n 5") == [1, 99, 5]
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    assert tokenizer.decode([1, 100]) == "1 100"
    for text in ("100", "-1", "a", "1.0", "²"):
        with pytest.raises(ValueError, match="is not an id: a number from 0 to 99"):
            tokenizer.encode(text)
    for name in ("null:", "null:x", "null:0", "null:4294967296"):
        with pytest.raises(ValueError, match=name):
            load_tokenizer(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "bert-base-uncased", "null:50", "sentencepiece", "tokenizer.json"]
)
def test_pickles_to_an_equal(name, request, tmp_path, small_bpe):
    if name == "sentencepiece":
        name = request.getfixturevalue("model_file")
    if name == "tokenizer.json":
        (tmp_path / name).write_text(json.dumps(tokenizer_json(small_bpe)))
        name = tmp_path / name
    tokenizer = load_tokenizer(name)
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "1 2 3"
    assert copy.encode(text) == tokenizer.encode(text)
    assert copy.fingerprint == tokenizer.fingerprint
    assert (copy.vocab_size, copy.special) == (tokenizer.vocab_size, tokenizer.special)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("tokenizer.json", b"[1]", "not a tokenizer.json"),
        ("tokenizer.json", b'{"model": "BPE"}', 'it has no object "model"'),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE"}, "added_tokens": [{"id": 1}]}',
            'lacks its "id" or "content"',
        ),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE"}, "added_tokens": 5}',
            'added token 5 lacks its "id" or "content"',
        ),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "expected a vocabulary, got one of no tokens",
        ),
        ("tokenizer.model", b"what", "not a SentencePiece model"),
        ("vocab.txt", b"\xff\xfe", "not a vocabulary"),
        ("vocab.bin", b"", r"expected a \.json, \.model, "),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path, name, content, message):
    if name.endswith(".model"):
        pytest.importorskip("sentencepiece")
    if b'"vocab"' in content:
        pytest.importorskip("tokenizers")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize(
    "step", [[1], "x", {"type": "Sequence"}, {"type": "Sequence", "SAME": "x"},
             {"type": "Sequence", "SAME": ["x"]}, {"type": "Sequence", "SAME": 3}]
)  # fmt: skip
def test_steps_that_are_none(part, step, tmp_path, small_bpe):
    """They are an error, not a step that is left out."""
    pytest.importorskip("tokenizers")
    several = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[part]
    if isinstance(step, dict):
        step = {several if name == "SAME" else name: value for name, value in step.items()}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(small_bpe) | {part: step}))
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        load_tokenizer(file)


def test_vocab_json_that_does_not_fit_its_merges(tmp_path, small_bpe):
    _, vocab, lines = small_bpe
    (tmp_path / "merges.txt").write_text("\n".join([*lines, "Ġ"]))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(ValueError, match=r"a merge must be two words, got 'Ġ'"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("\n".join([*lines, "q q"]))
    with pytest.raises(ValueError, match="merge 'q q' makes no entry of the vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("\n".join([*lines, "\u4f60 a"]))
    with pytest.raises(ValueError, match="makes no entry"):
        load_tokenizer(tmp_path)
    # CLIP's files: its words begin as letters of which the last one is written with </w>.
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"n</w>": 5000, "an</w>": 5001}))
    (tmp_path / "merges.txt").write_text("\n".join([*lines, "a n</w>"]))
    with pytest.raises(ValueError, match="merge 'a n</w>' is of 'n</w>', which is neither a byte"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": "b"}))
    with pytest.raises(ValueError, match="must map strings to ids"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"vocab\.json: no such file"):
        load_tokenizer(tmp_path / "merges.txt")


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("GPT3", {}, "tokenizer type 'GPT3': expected one of GPT2BPETokenizer, "),
        ("GPT2BPETokenizer", {"merge_file": "m"}, "needs both --vocab-file and --merge-file"),
        ("BertWordPieceCase", {}, "needs --vocab-file"),
        ("NullTokenizer", {}, "needs --vocab-size"),
        ("HuggingFaceTokenizer", {}, "needs --tokenizer-model"),
        ("GPT2BPETokenizer", {"tokenizer_model": "m"}, "--vocab-file, .* got --tokenizer-model m"),
        ("BertWordPieceLowerCase", {"tokenizer_model": "m"}, "got --tokenizer-model m"),
    ],
)
def test_megatron_names_need_their_files(kind, files, message):
    with pytest.raises(ValueError, match=message):
        megatron_tokenizer(kind, **files)


def test_megatron_gpt2_from_two_files_anywhere(tmp_path, small_bpe):
    ids, letters, lines = small_bpe
    (tmp_path / "v.json").write_text(json.dumps(letters))
    (tmp_path / "m.txt").write_text("\n".join(lines))
    tokenizer = megatron_tokenizer(
        "GPT2BPETokenizer", vocab_file=tmp_path / "v.json", merge_file=tmp_path / "m.txt"
    )
    oracle = reference(ids, GPT2_PATTERN)
    text = UNDISPUTED_TEXTS[1]
    for same in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert same.encode(text) == oracle.encode_ordinary(text)
    assert megatron_tokenizer("GPT2BPETokenizer").name == "gpt2"
    assert megatron_tokenizer("BertWordPieceLowerCase").name == "bert-base-uncased"


def test_names_that_are_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"unknown tokenizer 'gpt-2'; did you mean gpt2\? Known"):
        load_tokenizer("gpt-2")
    with pytest.raises(ValueError, match=r"none of tokenizer\.json, vocab\.json, "):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="from 0 to"):
        load_tokenizer("gpt2", num_extra_ids=-1)
