"""Blends: Megatron's greedy order against the plain loop, and every form of data path."""

from __future__ import annotations

import contextlib
import math
import pickle
import warnings

import numpy as np
import pytest
from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.samples import blend, parts, reference
from mb_data.samples.blend import BlendedDataset, blend_order, normalize
from mb_data.samples.gpt import GPTDataset, build_gpt_datasets
from mb_data.samples.parts import build_parts, parse_blend
from mb_data.system import MAP_ALONE


@pytest.mark.parametrize("kind", ["even", "skewed", "whole"])
@pytest.mark.parametrize("sources", [1, 2, 3, 7, 40])
def test_order_equals_the_loop(kind, sources):
    rng = np.random.default_rng(sources)
    for size in (0, 1, 2, 1023, 9973):
        weights = {
            "even": rng.random(sources) + 0.01,
            "skewed": rng.random(sources) ** 6 + 1e-4,
            "whole": rng.integers(1, 6, sources),
        }[kind]
        shares = normalize(weights.tolist())
        chosen, numbers = blend_order(shares, size)
        want = reference.blend_order(shares.tolist(), size)
        assert (chosen.tolist(), numbers.tolist()) == want
        assert numbers.dtype == np.int64


def test_order_goes_on_across_windows(monkeypatch):
    shares = normalize([5, 1, 3])
    want = reference.blend_order(shares.tolist(), 10_000)
    monkeypatch.setattr(blend, "WINDOW", 3001)
    chosen, numbers = blend_order(shares, 10_000)
    assert (chosen.tolist(), numbers.tolist()) == want


def test_wrong_guesses_are_put_right(monkeypatch):
    """Exact even if every stretch but the first starts from nonsense."""
    shares = normalize([5, 1, 3])
    want = reference.blend_order(shares.tolist(), 6000)
    monkeypatch.setattr(
        blend, "_guess", lambda shares, starts: np.full((len(starts), len(shares)), 77.0)
    )
    chosen, numbers = blend_order(shares, 6000)
    assert (chosen.tolist(), numbers.tolist()) == want


def test_golden_order():
    # Worked out by hand from the rule.
    chosen, numbers = blend_order(normalize([0.3, 0.7]), 10)
    assert chosen.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert numbers.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]


def test_no_source_gives_more_than_its_share_rounded_up():
    rng = np.random.default_rng(0)
    for _ in range(60):
        shares = normalize((rng.random(int(rng.integers(1, 9))) + 0.01).tolist())
        size = int(rng.integers(1, 300))
        counts = np.bincount(blend_order(shares, size)[0], minlength=len(shares))
        assert (counts <= np.ceil(size * shares)).all()


def test_dataset_deals_from_its_sources():
    sources = [[f"{name}{i}" for i in range(9)] for name in "abc"]
    mixed = BlendedDataset(sources, [2, 1, 1], 8)
    assert [mixed[i] for i in range(8)] == ["a0", "b0", "c0", "a1", "a2", "b1", "c1", "a3"]
    assert (mixed[-1], mixed[-8]) == ("a3", "a0")
    assert len(mixed) == 8
    copied = pickle.loads(pickle.dumps(mixed))
    assert copied[2] == "c0"
    with pytest.raises(IndexError, match="sample 8 of 8"):
        mixed[8]
    for order in (mixed.dataset_index, copied.dataset_sample_index):  # in memory, as in a cache
        with pytest.raises(ValueError, match="read-only"):
            order[:] = 0


def test_source_too_small():
    exact = BlendedDataset([[1, 2, 3, 4], [5] * 4], [1, 1], 8)
    assert [exact[i] for i in range(8)] == [1, 5, 2, 5, 3, 5, 4, 5]
    with pytest.raises(ValueError, match="takes 4 from source 0, which has 3; build"):
        BlendedDataset([[1, 2, 3], [4] * 9], [1, 1], 8)


def test_no_blend_without_a_weight_for_each_source():
    for sources, weights in (([[1]], [1, 1]), ([[1], [2]], [1]), ([], [])):
        with pytest.raises(ValueError, match=f"got {len(sources)} datasets and {len(weights)}"):
            BlendedDataset(sources, weights, 1)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        BlendedDataset([[1]], [1], -1)
    one_of_two = BlendedDataset([[1], [2]], [3, 1], 1)
    assert repr(one_of_two) == "BlendedDataset(1 sample: 1 of [1], 0 of [2])"


@pytest.mark.parametrize(
    "weights",
    [[1, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1.7e308, 1e308]],
)
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights must be positive numbers"):
        BlendedDataset([[1], [2]], weights, 1)


@pytest.mark.parametrize(
    ("path", "parsed"),
    [
        ("a", [(None, "a")]),
        (["a"], [(None, "a")]),
        (["0.3", "a", "7", " b "], [(0.3, "a"), (7.0, "b")]),
        ((2, "a"), [(2.0, "a")]),
        (["a", "b", "c"], [(None, "a"), (None, "b"), (None, "c")]),
        (["2024"], [(None, "2024")]),
        (["2", "2024"], [(2.0, "2024")]),
    ],
)
def test_data_path(path, parsed):
    assert parse_blend(path) == parsed


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "by turns"),
        (["1", "a", "2"], "by turns"),
        (["a", "1"], "by turns, got a 1"),
        (["1", "2", "b", "4"], "by turns"),
        (["1", "a", "0", "b"], "weights above 0 in a data path, got 0"),
        (["nan", "a"], "weights above 0 in a data path, got nan"),
    ],
)
def test_bad_data_path(path, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(path)


@pytest.fixture
def prefixes(tmp_path):
    """Three files of 20 documents of 10 tokens: tokens 0 to 199, 1000 to 1199, 2000 to 2199."""
    for number, name in enumerate("abc"):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for document in range(20):
                builder.add_document(1000 * number + 10 * document + np.arange(10))
    return [str(tmp_path / name) for name in "abc"]


SETTINGS = {"split": "8,2", "seq_length": 5, "num_samples": (50, 6, 1), "seed": 3}


def test_blend_of_gpt_datasets(prefixes):
    a, b, c = prefixes
    train, valid, test = build_gpt_datasets(["2", a, "1", b, "1", c], **SETTINGS)
    assert test is None
    assert (len(train), len(valid)) == (50, 6)
    sources = [int(train[i].min() // 1000) for i in range(50)]
    assert sources == train.dataset_index.tolist()
    assert np.bincount(sources).tolist() == [25, 13, 12]
    assert repr(train).startswith(f"BlendedDataset(50 samples: 25 of GPTDataset({a!r}, ")
    alone = build_gpt_datasets(a, **{**SETTINGS, "num_samples": (26, 4, 1)})[0]
    assert isinstance(alone, GPTDataset)
    assert train.datasets[0].doc_idx.tolist() == alone.doc_idx.tolist()
    # ceil(50 · 0.5 · 1.005) = 26 samples of 5 tokens from 160 tokens: one epoch.
    assert [source.num_epochs for source in train.datasets] == [1, 1, 1]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_sources_are_split_asked_for_a_margin_and_their_order_is_kept(
    prefixes, tmp_path, elsewhere
):
    asked = []

    def make(source, documents, *, num_samples, cache_dir):
        asked.append((documents, num_samples))
        return range(num_samples)

    build_parts(
        ["3", prefixes[0], "1", prefixes[1]],
        make,
        split="949,50,1",
        split_rounding="cumulative",  # of 10 documents 9, 1 and 0; by shares 10, 0 and 0
        num_samples=(1000, 10, 0),
        count=lambda source: 10,
        cache_dir=tmp_path / "cache" if elsewhere else None,
    )
    # ceil(1000 · 0.75 · 1.005), and so on.
    train, valid = range(9), range(9, 10)
    assert asked == [(train, 754), (train, 252), (valid, 8), (valid, 3)]
    kept = list((tmp_path / ("cache" if elsewhere else "a_index")).glob("blend-*.mbindex"))
    assert len(kept) == 2
    assert len(list(tmp_path.glob("*/*.mbindex"))) == 2


def test_an_order_does_not_hang_on_the_python(prefixes, monkeypatch):
    """Since 3.12 `sum` carries rounding errors along, nearly as `math.fsum`: not Megatron's sum."""
    monkeypatch.setattr(parts, "sum", math.fsum, raising=False)
    weights = [0.21, 0.08, 0.58]
    path = [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair]
    train = build_gpt_datasets(path, **{**SETTINGS, "num_samples": (1000, 0, 0)})[0]
    total = (0.21 + 0.08) + 0.58
    assert total != math.fsum(weights)
    shares = normalize([weight / total for weight in weights])
    want, _ = reference.blend_order(shares.tolist(), 1000)
    assert train.dataset_index.tolist() == want


def test_prefixes_alone_weigh_as_their_tokens(prefixes, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "long", np.uint16) as builder:
        for document in range(20):
            builder.add_document(np.full(30, 5000 + document))
    paths = [prefixes[0], str(tmp_path / "long")]
    train, valid, _ = build_gpt_datasets(paths, **SETTINGS)
    weighed = ["200", paths[0], "600", paths[1]]
    same, same_valid, _ = build_gpt_datasets(weighed, **SETTINGS)
    assert np.bincount(train.dataset_index).tolist() == [13, 37]
    for ours, theirs in ((train, same), (valid, same_valid)):
        assert all(np.array_equal(ours[i], theirs[i]) for i in range(len(theirs)))


def test_separate_paths_use_all_documents(prefixes):
    a, b, c = prefixes
    train, valid, test = build_gpt_datasets({"train": ["1", a, "1", b], "valid": c}, **SETTINGS)
    assert [source.documents for source in train.datasets] == [range(20), range(20)]
    assert valid.documents == range(20)
    assert test is None
    with pytest.raises(ValueError, match=r"data paths for \['dev'\]: the parts are train"):
        build_gpt_datasets({"dev": a}, **SETTINGS)


@pytest.mark.parametrize("blend", [False, True], ids=["one", "blend"])
def test_a_part_that_is_not_wanted_is_not_built(prefixes, tmp_path, blend):
    paths = ["1", prefixes[0], "2", prefixes[1]] if blend else prefixes[0]
    train, valid, test = build_gpt_datasets(paths, **{**SETTINGS, "num_samples": (26, None, None)})
    assert (valid, test) == (None, None)
    assert len(list(tmp_path.glob("*/*.mbindex"))) == (3 if blend else 1)  # of train alone
    same = build_gpt_datasets(paths, **{**SETTINGS, "num_samples": (26, 4, 1)})[0]
    assert all(np.array_equal(train[i], same[i]) for i in range(26))


def test_source_without_documents_for_a_part_is_left_out(prefixes, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "small", np.uint16) as builder:
        builder.add_document(np.arange(3000, 3100))
    paths = ["1", str(tmp_path / "small"), "1", prefixes[0], "3", prefixes[1]]
    with pytest.warns(RuntimeWarning, match="no documents for valid in .*small: left out"):
        train, valid, _ = build_gpt_datasets(paths, **SETTINGS)
    assert len(train.datasets) == 3
    assert len(valid.datasets) == 2
    # The others share its weight: 1 to 3.
    assert np.bincount(valid.dataset_index).tolist() == [2, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_gpt_datasets(paths, **{**SETTINGS, "num_samples": (50, 0, 0)})


def test_a_blend_of_more_files_than_may_be_open(tmp_path, may_open):
    words = [str(tmp_path / f"d{number}") for number in range(12)]
    for prefix in words:
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            builder.add_document(np.arange(40))
    refused = pytest.raises(OSError, match=r"d\d\.(bin|idx)'?$") if not MAP_ALONE else None
    with may_open(9), refused or contextlib.nullcontext() as error:
        built = build_gpt_datasets(
            words, seq_length=4, seed=1, split="100,0,0", num_samples=(12, None, None)
        )
        assert len(built[0]) == 12
    assert not error or "ulimit -n" in str(error.value)
