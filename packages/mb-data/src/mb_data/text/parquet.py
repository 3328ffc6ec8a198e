"""Parquet files, by row groups, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mb_data.system import naming
from mb_data.words import missing_package


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
            _check_column(path, schema, key)
            kind = str(schema.field(key).type)
            if not kind.removeprefix("dictionary<values=").startswith(("string", "large_string")):
                raise ValueError(f"{path}: column {key!r} must hold text, got {kind}")
        return _values(file, groups, keys)


def read_rows(path: str, groups: range, key: str, *others: str) -> list[dict[str, Any]]:
    """Rows of some row groups, of whatever types: a column, and those of the others that are there.

    Raises ValueError for a column that is not there; DamagedParquetError.
    """
    with naming(path), _open(path) as file:
        schema = file.schema_arrow
        _check_column(path, schema, key)
        keys = [key, *(name for name in others if name in schema.names)]
        columns = _values(file, groups, keys)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def _check_column(path: str, schema: Any, key: str) -> None:
    if schema.names.count(key) != 1:
        number = "several columns" if key in schema.names else "no column"
        raise ValueError(f"{path}: {number} {key!r}; the columns are {', '.join(schema.names)}")


def _values(file: Any, groups: range, keys: Sequence[str]) -> list[list[Any]]:
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
        raise missing_package("pyarrow", f"{path} is a Parquet file", "parquet") from error
    try:
        # Of files that have sums of their pages, as Spark's; others are read as they are.
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet file: {error}") from error
