"""Parquet files, by row groups, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mb_data.system import naming


class DamagedParquetError(ValueError):
    """Row groups that cannot be read; ``rows`` is how many rows they have."""

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


def row_groups(path: str) -> int:
    """How many a file has."""
    with _open(path) as file:
        return file.num_row_groups


def count_rows(path: str, groups: int) -> int:
    """Rows in the first row groups of a Parquet file."""
    with _open(path) as file:
        return _rows(file, range(groups))


def read_columns(path: str, groups: range, keys: Sequence[str]) -> list[list[Any]]:
    """The values of some columns in some row groups.

    Raises ValueError for a column that is not there, or not of text; DamagedParquetError.
    """
    with naming(path), _open(path) as file:
        schema = file.schema_arrow
        for key in keys:
            if key not in schema.names:
                raise ValueError(
                    f"{path}: no column {key!r}; the columns are {', '.join(schema.names)}"
                )
            kind = str(schema.field(key).type)
            if not kind.removeprefix("dictionary<values=").startswith(("string", "large_string")):
                raise ValueError(f"{path}: column {key!r} must hold text, got {kind}")
        try:
            table = file.read_row_groups(list(groups), columns=list(keys), use_threads=False)
            return [table.column(key).to_pylist() for key in keys]
        except (ValueError, OSError) as error:  # Arrow's, and text that is no UTF-8
            if isinstance(error, OSError) and error.errno is not None:
                raise
            rows = _rows(file, groups)
            raise DamagedParquetError(
                f"damaged Parquet data: {' '.join(str(error).split())}; the {rows:,} rows of its "
                "row group are left out",
                rows,
            ) from error


def _rows(file: Any, groups: Iterable[int]) -> int:
    return sum(file.metadata.row_group(group).num_rows for group in groups)


def _open(path: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is a Parquet file: pip install 'mb-data[parquet]'", name="pyarrow"
        ) from error
    try:
        # Of files that have sums of their pages, as Spark's; others are read as they are.
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet file: {error}") from error
