"""Whether a run goes on with the data that it began with.

Other data in the place of the old would be trained on without an error: a run counts the samples
that it has consumed, and finds those that follow by their number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mb_data
from mb_data.samples.sentence_index import SentenceSamples

from mb_train.tasks import Dataset
from mb_train.tasks.race import files_in

# Bytes of each file that tell its content: a checksum of all of it could take minutes.
_BEGINNING = 1 << 16


def identity(
    train: Dataset, files: Sequence[Path], weights: Sequence[float], *, cyclic: bool = False
) -> dict[str, Any]:
    """What tells this data from other, as JSON values.

    That is the size of the files and how they begin; and what decides the order: the weights of a
    blend, and how far each source is shuffled as one, in passes of a GPT's text, in samples of
    sentences; and all samples in each cycle.

    Args:
        train: what is trained on.
        files: the files with the tokens or texts of all sources, or folders of them.
        weights: of the sources, none of a single one.
        cyclic: samples come in cycles, in each of them shuffled.
    """
    inner = train
    while isinstance(inner, mb_data.FillInTheMiddle | mb_data.PackedSamples):
        inner = inner.dataset
    sources = inner.datasets if isinstance(inner, mb_data.BlendedDataset) else [inner]
    texts = [source for source in sources if isinstance(source, mb_data.GPTDataset)]
    shares = [round(weight / sum(weights), 6) for weight in weights]
    return {
        "weights": shares if len(shares) > 1 else [],
        "bin_bytes": [sum(file.stat().st_size for file in files_in(path)) for path in files],
        "begin_with": [_beginning(path) for path in files],
        "epochs": [source.num_epochs for source in texts],
        "shuffled_epochs": [source.shuffled_epochs for source in texts],
        "sentence_samples": [len(s) for s in sources if isinstance(s, SentenceSamples)],
        "cycle": len(train) if cyclic else None,
    }


def check_same_data(
    before: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Compare the data of a run with what it began with; what may change is said.

    Args:
        before: the `identity` that was saved.
        now: that of the data at hand.
        say: prints a line.

    Raises:
        ValueError: other files.
    """
    way = "Give the same --data-path, or begin a new run with --finetune."
    if before.get("bin_bytes") != now["bin_bytes"]:
        raise ValueError(
            f"Expected the data this run began with, {before.get('bin_bytes')} bytes of .bin, "
            f"got {now['bin_bytes']}. {way}"
        )
    if before.get("begin_with") != now["begin_with"]:
        raise ValueError(
            "Expected the data this run began with, got files of the same sizes that begin with "
            f"other tokens or documents, or stand in another order. {way}"
        )
    if before["weights"] != now["weights"]:
        say(
            f" note: the data sets were drawn from by weights of {before['weights']} until now, by "
            f"{now['weights']} from here on: other samples come, some a second time"
        )
    if before["epochs"] != now["epochs"]:
        say(
            f" note: a run of this length passes {now['epochs']} times through its data, not "
            f"{before['epochs']}: samples come in another order from here"
        )
    elif before["shuffled_epochs"] != now["shuffled_epochs"]:
        say(
            f" note: a run of this length shuffles {now['shuffled_epochs']} passes through its "
            f"data as one, not {before['shuffled_epochs']}: samples come in another order from here"
        )
    if before["sentence_samples"] != now["sentence_samples"]:
        say(
            f" note: a run of this length shuffles {now['sentence_samples']} samples of its data, "
            f"not {before['sentence_samples']}: they come in another order from here"
        )
    if before["cycle"] != now["cycle"]:
        say(
            f" note: a run of this length shuffles {now['cycle']} samples in each cycle, not "
            f"{before['cycle']}: they come in another order from here"
        )


def _beginning(path: Path) -> int:
    """A checksum of how files begin: of tokens, their index too, which says what a document is."""
    index = [path.with_suffix(".idx")] if path.suffix == ".bin" else []
    found = 0
    for file in [*files_in(path), *index]:
        with open(file, "rb") as content:
            found = zlib.crc32(content.read(_BEGINNING), found)
    return found
