"""The folder of a run: what is where, and which checkpoint is the latest. Imports no torch.

RUN/config.toml                          the run as it was started
RUN/log.jsonl                            one JSON object per event
RUN/loss.png, RUN/report.html            pictures of it
RUN/latest_checkpointed_iteration.txt    the iteration to go on from
RUN/iter_0000100/                        a checkpoint (see `checkpoint`)
RUN/tokenizer/                           copies of the tokenizer's files, if it is made from any
RUN/data/                                the sample corpus, if the run made it
RUN/previous-1/                          what an earlier run, or a branch left behind, was
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mb_train.config.resume import inherited
from mb_train.folder.checksums import SUMS_FILE, read_sums
from mb_train.untrusted import json_of
from mb_train.words import typed

# 1 had no checksums.
FORMAT = 2
LATEST = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
LOG_FILE = "log.jsonl"
PICTURE = "loss.png"
PAGE = "report.html"
TOKENIZER = "tokenizer"
MOVING = ".moving.json"
PARTIAL = ".partial"  # behind the name of what is being written
SURPLUS = ".surplus"  # behind that of a checkpoint which is being deleted


@dataclass(frozen=True)
class SavedRun:
    """The content of a checkpoint's run.json.

    Attributes:
        written: seconds since 1970 at which it was saved.
        state: small values that a run goes on with beside its tensors (the loss scale, say).
    """

    format: int
    iteration: int
    consumed_samples: int
    config: dict[str, Any]
    identity: dict[str, Any]
    data: dict[str, Any]
    torch: str
    written: float
    state: dict[str, Any]

    def inherited(self) -> dict[str, Any]:
        """The fields that a run which goes on from here starts with.

        Raises:
            ValueError: a field that this mb-train does not know.
        """
        return inherited(self.config, RUN_FILE)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary.

        Raises:
            ValueError: the file does not say, or no model has so many.
        """
        rows = self.identity.get("padded_vocab_size")
        if type(rows) is not int or rows not in range(1, 2**31):
            raise ValueError(f"{RUN_FILE} is damaged: its padded_vocab_size is {rows!r}.")
        return rows

    def check_model(self, identity: Mapping[str, Any]) -> None:
        """Raise ValueError if a model of this identity is not the one that was saved."""
        for name, here in identity.items():
            there = self.identity.get(name)
            if there != here:
                raise ValueError(
                    f"The checkpoint is of another model: its {name} is {there}, this run's is "
                    f"{here}."
                )


def iteration_folder(iteration: int) -> str:
    """Name of a checkpoint's folder."""
    return f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("iter_"))


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run folder, by iteration."""
    return sorted(filter(is_iteration, folder.glob("iter_*")), key=iteration_of)


def is_iteration(path: Path) -> bool:
    """Whether a path is named as a checkpoint's folder is."""
    return re.fullmatch(r"iter_\d{7,}", path.name) is not None


def has_name_of_a_checkpoint(path: Path) -> bool:
    """Whether a run would take a folder of this name in its own for one of its checkpoints, also
    one half written or withdrawn."""
    name = path.absolute()
    return is_iteration(name.with_suffix("") if name.suffix in (PARTIAL, SURPLUS) else name)


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint folder that `--load path` means: `path` itself or the latest in it; or None.

    If no file names the latest, as after a kill during a run's first save, the last one is taken.

    Raises:
        ValueError: the file that names the latest is damaged, or names one that is not there; or
            `path` is a checkpoint that was not finished.
    """
    if _is_unfinished(path):
        raise ValueError(
            f"Expected a checkpoint in {path}, found one that was not finished."
            + others(path.parent)
        )
    if (path / RUN_FILE).is_file():
        return path if path.name not in ("", "..") else path.resolve()  # it is known by its name
    latest = path / LATEST
    if not latest.is_file():
        # In the middle of a move, what is left is none of this folder's.
        whole = [] if (path / MOVING).is_file() else _whole(path)
        return whole[-1] if whole else None
    text = latest.read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"Expected {latest} to hold an iteration, got {text[:40]!r}.{others(path)}"
        )
    folder = path / iteration_folder(int(text))
    if not (folder / RUN_FILE).is_file():
        raise ValueError(
            f"{latest} names iteration {text}, but {folder} holds no {RUN_FILE}.{others(path)}"
        )
    return folder


def _is_unfinished(path: Path) -> bool:
    """Whether a checkpoint of ours was being written there, or copied, when that ended."""
    draft = path.suffix == PARTIAL
    named = is_iteration(path.with_suffix("") if draft else path)
    whole = not draft and (path / RUN_FILE).is_file()
    return named and path.is_dir() and not (whole or whose(path))


def checkpoint_in(path: Path) -> Path:
    """`find_checkpoint`, where there must be one.

    Raises:
        ValueError: there is none; says so if it is another program's, or was moved aside.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(
            f"Expected a checkpoint in {path}, found none.{whose(path) or _moved_aside(path)}"
        )
    return checkpoint


def _moved_aside(folder: Path) -> str:
    """A sentence that names the last run which another one, begun here, has moved aside."""
    earlier = [path for path in folder.glob("previous-*") if path.name[9:].isdecimal()]
    earlier = [path for path in earlier if _whole(path)]
    if not earlier:
        return ""
    last = max(earlier, key=lambda path: int(path.name[9:]))
    return f" What was there is now in {typed(last)}: give that to --load."


def checkpoint_of(folder: Path, iteration: int) -> Path:
    """The checkpoint of an iteration in a run folder.

    Raises:
        ValueError: there is none; says which iterations have one.
    """
    path, whole = folder / iteration_folder(iteration), _whole(folder)
    if path in whole:
        return path
    there = ", ".join(str(iteration_of(one)) for one in whole)
    hint = f" --ckpt-step takes one of {there}." if whole else whose(path)
    raise ValueError(f"Expected a checkpoint in {path}, found none.{hint}")


def whose(path: Path) -> str:
    """A sentence that says which other program's checkpoint is there; "" if there is none."""
    megatron = [f"{place}{name}" for place in ("", "iter_*/", "release/")
                for name in ("mp_rank_*", "metadata.json")]  # fmt: skip
    there = {"Hugging Face": ["config.json"], "Megatron": megatron}
    for name, patterns in there.items():
        if any(next(path.glob(pattern), None) for pattern in patterns):
            return f" It is one of {name}'s: the convert command makes a run folder of it."
    return ""


def _whole(folder: Path) -> list[Path]:
    return [path for path in checkpoints(folder) if (path / RUN_FILE).is_file()]


def others(folder: Path, damaged: Path | None = None) -> str:
    """A sentence that names the latest checkpoint there but `damaged`, or another program's."""
    there = [path for path in _whole(folder) if path != damaged]
    return f" There is {typed(there[-1])}: give that to --load." if there else whose(folder)


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Read run.json of a checkpoint folder.

    Raises:
        ValueError: not a file of this program, or in another format.
    """
    path = checkpoint / RUN_FILE
    try:
        text = path.read_bytes()
        content = json_of(text)
        found = content["format"]
    except OSError as error:
        raise ValueError(
            f"Cannot read {path}: {error.strerror}." + others(checkpoint.parent, checkpoint)
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {error}."
            + others(checkpoint.parent, checkpoint)
        ) from None
    if found != FORMAT:
        raise ValueError(
            f"Expected {path} in format {FORMAT}, got {found}. Another mb-train wrote it: take "
            "that one."
        )
    known = {f.name: f for f in fields(SavedRun)}
    for name in content.keys() - known.keys():
        raise ValueError(f"{path} has a key that this mb-train does not know: {name!r}.")
    kinds = {"int": int, "float": (int, float), "str": str}
    for name, f in known.items():
        kind = kinds.get(str(f.type), dict)
        value = content.get(name)
        fits = isinstance(value, kind) and (kind is not int or 0 <= value < 2**63)
        if name in content and not fits:
            raise ValueError(f"{path} is damaged: its {name} is {content[name]!r}.")
    try:
        saved = SavedRun(**content)
    except TypeError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if not _is_as_written(path, text):  # said before anything is made of the sizes in it
        raise ValueError(
            f"{path} is damaged: it is not what was written."
            + others(checkpoint.parent, checkpoint)
        )
    return saved


def _is_as_written(path: Path, content: bytes) -> bool:
    """Whether a file's content is what its folder's checksums say; True where they do not say."""
    try:
        sums = read_sums(path.with_name(SUMS_FILE))
    except (OSError, ValueError):  # `load_checkpoint` tells of these
        return True
    return sums.get(path.name) in (None, hashlib.sha256(content).hexdigest())
