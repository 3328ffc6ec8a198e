"""Data sets that the flags of a run name, before anything is read of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mb_data.indexed_dataset import similar_prefixes
from mb_data.samples.parts import parse_blend, weighed

from mb_train.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Named:
    """The data sets of a part of the data, or of all of it.

    Attributes:
        words: prefixes alone, or weights and prefixes by turns.
        source: the flag, or the file, that has these words.
        token_files: each is a .bin and an .idx; else text, which is named whole and has no weights.
    """

    words: list[str]
    source: str
    token_files: bool = True

    @property
    def prefixes(self) -> list[str]:
        """What the data sets are called."""
        return [prefix for _, prefix in parse_blend(self.words)] if self.token_files else self.words

    @property
    def files(self) -> list[Path]:
        """With the tokens or the texts, one for each prefix."""
        return [Path(f"{prefix}.bin" if self.token_files else prefix) for prefix in self.prefixes]

    def weights(self) -> list[float]:
        """One for each prefix, read from the files if the words say none; none of a single one."""
        blend = weighed(self.words) if self.token_files else []
        return [weight for weight, _ in blend if weight is not None]

    def check(self, earlier: str = ".") -> None:
        """Raise ValueError if a file is missing, or taken for a weight.

        Relative paths are kept as they are, as in Megatron, so that data and runs can move
        together; if there is a data set from the directory `earlier` on, the error says so.
        """
        if not self.words:
            raise ValueError(f"Expected {self.source} to name a data set, got none.")
        for prefix in self.prefixes:
            for suffix in (".bin", ".idx") if self.token_files else ("",):
                path = Path(prefix + suffix)
                if path.is_file() if suffix else path.exists():
                    continue
                way = "Give the path without .bin, and make the files with mb-data preprocess."
                if similar := similar_prefixes(prefix):
                    way = f"There is {', '.join(similar)}."
                if Path(earlier, path).exists():
                    way = f"It is in {earlier}, where the run was until now: go there, or name "
                    way += "the data anew."
                where = "" if Path(prefix).is_absolute() else f" in {Path.cwd()}"
                raise ValueError(
                    f"Expected {prefix}{suffix} to be a file (from {self.source}), "
                    f"found none{where}.{f' {way}' if suffix else ''}"
                )
        for word in self.words[::2] if len(self.words) > len(self.prefixes) else []:
            if Path(f"{word}.bin").is_file():
                raise ValueError(
                    f"Expected {self.source} to be prefixes alone, or weights and prefixes by "
                    f"turns, got {word} where a weight is due, and there is {word}.bin. Write "
                    f"./{word} for a prefix."
                )


def named_data(config: TrainConfig) -> dict[str, Named | None]:
    """What a run reads, by part; as `config.data_words`, which says what raises."""
    file = config.per_split_data_args_path or config.data_args_path
    return {
        part: Named(
            words,
            file or (f"--{part}-data-path" if part else "--data-path"),
            token_files=config.reads_token_files,
        )
        if words is not None
        else None
        for part, words in config.data_words().items()
    }


def check_files(config: TrainConfig, earlier: str = ".") -> None:
    """`Named.check` of all that the flags name; apart from reading it.

    It can be asked before a model is built, which takes minutes.
    """
    if config.model == "ict" and config.titles_data_path is not None:
        Named([config.titles_data_path], "--titles-data-path").check(earlier)
    for data in named_data(config).values():
        if data is not None:
            data.check(earlier)
