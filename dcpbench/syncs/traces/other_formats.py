"""Explain files that are no trace that can be read: what they are, and the command that makes a trace of them."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

GZIP_MAGIC = b"\x1f\x8b"
HEAD_BYTES = 1 << 10
_UTF16 = "`iconv -f {code} -t UTF-8 < {{file}} > unpacked.json`, and scan that"
_RECORD = "`nsys profile --trace=cuda,nvtx PROGRAM` to record calls, as no command finds them in this"
_TORCH = "`dcpbench syncs run -- PROGRAM` to record with torch.profiler, as no command makes a trace of this that can be read"
_EXPORT = "`nsys export --type sqlite REPORT.nsys-rep` for an export that can be read"
_FOLDER = "`dcpbench syncs scan FOLDER` with the folder that nsys wrote"
_NCU = "a report of Nsight Compute, which holds kernels and no calls"
_PERFETTO = "`traceconv json {file} unpacked.json`, and scan that if torch.profiler recorded it"
_BY_SUFFIX = (  # formats that are recognised by suffixes: these, name, and the command to use
    (
        ".nsys-rep .qdrep",
        "a report of Nsight Systems",
        "`nsys export --type sqlite -o report.sqlite {file}`, and scan that",
    ),
    (
        ".qdstrm",
        "an unfinished report of Nsight Systems",
        "`QdstrmImporter -i {file}`, and export the report with nsys",
    ),
    (".ncu-rep", _NCU, _RECORD),
    (".pftrace .perfetto-trace", "a Perfetto trace", _PERFETTO),
    (".xplane.pb", "an XPlane profile of XLA", _RECORD),
    (".parquet", "one table of an export", _FOLDER),
)
_FORMATS = (  # formats that are no trace: name, first bytes, command to use (`{file}` is the path)
    ("a zip archive", rb"PK(?-i:\x03\x04|\x05\x06)", "`unzip {file}`, and scan the traces that were in it"),
    ("a tar archive", rb".{257}ustar", "`tar -xf {file}`, and scan the traces that were in it"),
    ("packed with xz", rb"\xfd7zXZ\0", "`xz -dc < {file} > unpacked.json`, and scan that"),
    ("packed with bzip2", rb"BZh[1-9]1AY&SY", "`bzip2 -dc < {file} > unpacked.json`, and scan that"),
    ("packed with Zstandard", rb"\x28\xb5\x2f\xfd", "`zstd -dc < {file} > unpacked.json`, and scan that"),
    ("packed with gzip", GZIP_MAGIC, "`gzip -dc < {file} > unpacked.json`, and scan that"),
    ("UTF-32 text", rb"\xff\xfe\0\0|\0\0\xfe\xff", _UTF16.format(code="UTF-32")),
    ("UTF-16 text", rb"\xff\xfe|\xfe\xff", _UTF16.format(code="UTF-16")),
    ("UTF-16 text", rb"[\[{]\0", _UTF16.format(code="UTF-16LE")),
    ("UTF-16 text", rb"\0[\[{]", _UTF16.format(code="UTF-16BE")),
    (_NCU, rb"NVR\0", _RECORD),
    ("an Arrow export of nsys", rb"ARROW1", _EXPORT),
    ("an HDF5 export of nsys", rb"\x89HDF\r\n", _EXPORT),
    ("one Parquet table of an export", rb"PAR1", _FOLDER),
    ("a result of rocprofv3", rb'\s*\{\s*"rocprofiler-sdk-tool"', _TORCH),
    ("a table of rocprof", rb'"?(?:Index"?,"?KernelName|Domain"?,"?Function"?,"?Process_Id|Kind"?,"?Agent_Id)', _TORCH),
    ("a protobuf, such as a Perfetto trace", rb"\n.{1,64}?[\x00-\x08]", _PERFETTO),
    (
        "a pointer of Git LFS and not the trace",
        rb"version https://git-lfs",
        "`git lfs pull` in its repository, and scan it then",
    ),
    (
        "a web page (HTML) and not the trace",
        rb"\s*<(?:!doctype\s+html|html|head|!--)",
        "`curl -L -o trace.json.gz URL` with the address of the file itself, on GitHub that of its button Raw",
    ),
)


REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
OTHER_SUFFIXES = tuple(suffix for suffixes, _, _ in _BY_SUFFIX[:-1] for suffix in suffixes.split())  # refused suffixes


def explain_database(path: Path, tables: Collection[str]) -> str:
    """Return what an SQLite database without tables of nsys is, and what to type."""
    file = shlex.quote(str(path))
    if {"rocpd_api", "rocpd_op"} <= set(tables):
        return f"{path} is a database of RPD: type `rpd2tracing.py {file} unpacked.json`, and scan that"
    if any(name.startswith("rocpd_") for name in tables):
        return f"{path} is a database of rocprofv3: type {_TORCH}"
    return f"{path} is an SQLite database without tables of nsys: type {_EXPORT}"


def explain_other_format(path: Path, head: bytes, *, packed: bool) -> str:
    """Return what a file is by its first bytes or its suffix and what to type to get a trace; empty if they are unknown."""
    head, file = head.removeprefix(b"\xef\xbb\xbf"), shlex.quote(str(path))
    for suffixes, name, advice in () if packed else _BY_SUFFIX:
        if path.name.endswith(tuple(suffixes.split())):
            return f"{path} is {name}: type {advice.format(file=file)}"
    for name, start, advice in _FORMATS:
        if re.match(start, head, re.DOTALL | re.IGNORECASE):
            if packed and name != "a tar archive":  # tar sees to it itself
                return (
                    f"{path} is packed with gzip, and what is in it is {name}: "
                    f"type `gzip -dc < {file} > unpacked`, then {advice.format(file='unpacked')}"
                )
            return f"{path} is {name}: type {advice.format(file=file)}"
    return ""
