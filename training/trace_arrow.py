"""Trace tables between Parquet files, Arrow and pandas, with the format's types and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lorazor.features.errors import InputError
from lorazor.training.trace_format import BOOL, FLOAT, INT, OPTIONAL_COLUMNS, STRING


def read_file(path: Path, schema: Any) -> Any:
    """One Parquet file as an Arrow table of `schema`, optional ones filled; InputError for a wrong column or type."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    if extra := sorted(set(table.column_names) - set(schema.names)):
        raise InputError(f"{path}: column {extra[0]} is not part of the format")
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            if field.name not in OPTIONAL_COLUMNS:
                raise InputError(f"{path}: column {field.name} is missing")
            empty = pa.nulls(table.num_rows, field.type)
            columns.append(empty.fill_null(False) if field.name == "differs" else empty)
            continue
        columns.append(_cast(table.column(field.name), field, path))
    return pa.table(columns, schema=schema)


def _cast(column: Any, field: Any, path: Path) -> Any:
    same_kind = {
        STRING: lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_dictionary(t),
        INT: pa.types.is_integer,
        FLOAT: pa.types.is_floating,
        BOOL: pa.types.is_boolean,
    }[field.type]
    if not (same_kind(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{path}: column {field.name} must be {field.type}, is {column.type}")
    try:
        return column.cast(field.type, safe=not pa.types.is_floating(field.type))
    except pa.ArrowException as error:
        raise InputError(f"{path}: column {field.name} does not fit {field.type}: {error}") from None


def to_frame(table: Any) -> pd.DataFrame:
    """An Arrow table of the format as a pandas frame (see the module's text for the two null-able columns)."""
    if "base_top1_agrees" in table.column_names:
        at = table.column_names.index("base_top1_agrees")
        # Through int8: Arrow has no cast from bool to float32.
        agrees = table.column(at).cast(pa.int8()).cast(FLOAT)
        table = table.set_column(at, "base_top1_agrees", agrees)
    release = (
        table.column("release_step").to_pandas(types_mapper={INT: pd.Int32Dtype()}.get)
        if ("release_step" in table.column_names)
        else None
    )
    frame: pd.DataFrame = table.to_pandas()
    return frame if release is None else frame.assign(release_step=release)


def to_arrow(frame: pd.DataFrame, schema: Any) -> Any:
    """A frame as an Arrow table of `schema`; optional columns may be absent, NaN becomes null."""
    columns, fields = [], []
    for field in schema:
        if field.name not in frame.columns:
            if field.name not in OPTIONAL_COLUMNS:
                raise InputError(f"column {field.name} is missing")
            continue
        fields.append(field)
        values = frame[field.name]
        if field.type == BOOL and values.dtype.kind == "f":
            values = values.astype("boolean")
        columns.append(pa.Array.from_pandas(values, type=field.type))
    return pa.table(columns, schema=pa.schema(fields))


def write_file(table: Any, path: Path) -> None:
    """One Parquet file, small: floats of a kind share their upper bytes, so they are split into byte planes."""
    floats = [f.name for f in table.schema if f.type == FLOAT]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=9,
        use_dictionary=[f.name for f in table.schema if f.type != FLOAT],
        use_byte_stream_split=floats,
    )
