"""Write traces of torch.profiler as nsys exports, with the same events in the tables that NVIDIA documents.

The schema is that of "SQLite Schema Reference" in NVIDIA's Post-Collection Analysis Guide, version 3.16; parquetdir has the same
tables, and jsonlines the keys that public readers use.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sqlite3
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dcpbench.syncs.nsys.schema import COPY_KINDS, MEMORY_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

GPU_COLUMNS = "start end deviceId contextId greenContextId streamId correlationId globalPid"
COLUMNS = {  # columns of each table, in the order of the documentation; some that are not read are left out
    "StringIds": "id value",
    "ThreadNames": "nameId priority globalTid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{GPU_COLUMNS} demangledName shortName mangledName gridX graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{GPU_COLUMNS} bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{GPU_COLUMNS} value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{GPU_COLUMNS} graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{GPU_COLUMNS} syncType eventId",
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId jsonText binaryData",
    "CUDA_CALLCHAINS": "id symbol module unresolved originalIP stackDepth",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
    "META_DATA_EXPORT": "name value",
}
TEXTS = {
    ("StringIds", "value"),
    ("META_DATA_EXPORT", "name"),
    ("META_DATA_EXPORT", "value"),
    ("NVTX_EVENTS", "text"),
    ("DIAGNOSTIC_EVENT", "text"),
    ("NVTX_EVENTS", "jsonText"),
}
SYNC_TYPES = {"Event Sync": 1, "Stream Wait Event": 2, "Stream Sync": 3, "Context Sync": 4}
SYNC_NAMES = ("UNKNOWN", "EVENT_SYNCHRONIZE", "STREAM_WAIT_EVENT", "STREAM_SYNCHRONIZE", "CONTEXT_SYNCHRONIZE")
PYTHON_FRAME = re.compile(r"^(.+\.py)\((\d+)\): (.+)$")
COPY = re.compile(r"^Memcpy (\w+) \((.+) -> (.+)\)$")
SAMPLING = 1  # NVTX domain of samples of Python stacks
FORMATS = ("sqlite", "jsonlines", "parquetdir")

Row = dict[str, Any]


def make_global_tid(pid: int, tid: int = 0) -> int:
    """Return the serialised id of a thread, or of a process."""
    return 1 << 48 | pid << 24 | tid


def convert_to_ns(us: float) -> int:
    return round(us * 1000)


class Export:
    """Hold the tables of one recording, with a trace for each process."""

    def __init__(self) -> None:
        self.tables: defaultdict[str, list[Row]] = defaultdict(list)
        self.strings: dict[str, int] = {}
        self.samples: list[tuple[int, int, list[str]]] = []
        self.tables["META_DATA_EXPORT"].append({"name": "EXPORT_SCHEMA_VERSION", "value": "3.16.1"})

    def string(self, text: str) -> int:
        """Return the id of a string."""
        return self.strings.setdefault(text, len(self.strings))

    def add(self, table: str, **row: Any) -> Row:
        self.tables[table].append(row)
        return row

    def add_trace(self, events: Iterable[dict[str, Any]], pid: int | None = None) -> Export:
        """Add the events of a trace of torch.profiler; `pid` replaces its process."""
        events = [e for e in events if e.get("ph") in ("X", "M")]
        frames = [e for e in events if e.get("cat") == "python_function"]
        for e in events:
            add = {
                "cpu_op": self._add_range,
                "user_annotation": self._add_range,
                "cuda_runtime": self._add_call,
                "cuda_driver": self._add_call,
                "kernel": self._add_work,
                "gpu_memcpy": self._add_work,
                "gpu_memset": self._add_work,
                "cuda_sync": self._add_sync,
            }.get(e.get("cat", ""))
            if add and e["ph"] == "X":
                process = pid or next(
                    o["pid"] for o in events if o.get("cat") in ("cuda_runtime", "cpu_op", "user_annotation")
                )
                add(e, process, frames)
            elif e["ph"] == "M" and e["name"] == "thread_name" and isinstance(e["tid"], int) and e["pid"]:
                name = e["args"]["name"].split("(")[-1].rstrip(")")
                self.add(
                    "ThreadNames",
                    nameId=self.string(name),
                    priority=0,
                    globalTid=make_global_tid(pid or e["pid"], e["tid"]),
                )
        return self

    def _times(self, e: dict[str, Any]) -> dict[str, int]:
        return {"start": convert_to_ns(e["ts"]), "end": convert_to_ns(e["ts"] + e["dur"])}

    def _add_range(self, e: dict[str, Any], pid: int, _: object) -> None:
        """Add operators with the names of emit_nvtx; annotations are registered strings, and operators are texts."""
        is_op = e["cat"] == "cpu_op"
        name = f"{e['name']}, seq = 3, op_id = 7" if is_op else e["name"]
        text = {"text": name} if is_op else {"textId": self.string(name)}
        thread = make_global_tid(pid, e["tid"])
        self.add("NVTX_EVENTS", **self._times(e), eventType=59, globalTid=thread, domainId=0, **text)

    def _add_call(self, e: dict[str, Any], pid: int, frames: list[dict[str, Any]]) -> None:
        driver = e["cat"] == "cuda_driver"
        name = e["name"] if driver else f"{e['name']}_v3020"
        row = self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            **self._times(e),
            eventClass=int(driver),
            globalTid=make_global_tid(pid, e["tid"]),
            correlationId=e["args"].get("correlation", 0),
            nameId=self.string(name),
            returnValue=0,
        )
        around = [f for f in frames if f["tid"] == e["tid"] and f["ts"] <= e["ts"] < f["ts"] + f["dur"]]
        inner = sorted(around, key=lambda f: (f["ts"], -f["dur"]), reverse=True)
        if inner:
            self.samples.append(((row["start"] + row["end"]) // 2, row["globalTid"], [f["name"] for f in inner]))
            row["callchainId"] = self._add_chain([f["name"] for f in inner])

    def _add_chain(self, names: list[str]) -> int:
        """Add a chain with native frames between those of Python, from the innermost."""
        number = 1 + max((row["id"] for row in self.tables["CUDA_CALLCHAINS"]), default=0)
        pairs = [("cudaApiCall", "/usr/lib/libcudart.so.12")]
        for name in names:
            found = PYTHON_FRAME.match(name)
            pairs.append((found[3], f"{found[1]}:{found[2]}") if found else (name, "/usr/bin/python3.12"))
            pairs.append(("_PyEval_EvalFrameDefault", "/usr/bin/python3.12"))
        for depth, (symbol, module) in enumerate(pairs):
            ids = {"symbol": self.string(symbol), "module": self.string(module)}
            self.add("CUDA_CALLCHAINS", id=number, **ids, stackDepth=depth)
        return number

    def _add_work(self, e: dict[str, Any], pid: int, _: object) -> None:
        args = e["args"]
        shared = {
            **self._times(e),
            "deviceId": args.get("device", 0),
            "contextId": 1,
            "streamId": args.get("stream", e["tid"]),
            "correlationId": args.get("correlation", 0),
            "globalPid": make_global_tid(pid),
        }
        if e["cat"] == "kernel":
            name = self.string(e["name"])
            self.add("CUPTI_ACTIVITY_KIND_KERNEL", **shared, demangledName=name, shortName=name)
        elif e["cat"] == "gpu_memset":
            self.add("CUPTI_ACTIVITY_KIND_MEMSET", **shared, value=0, bytes=args.get("bytes", 0), memKind=2)
        else:
            way, source, target = COPY.match(e["name"]).groups()
            kinds = {"srcKind": MEMORY_KINDS.index(source), "dstKind": MEMORY_KINDS.index(target)}
            size = args.get("bytes", 0)
            self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **shared, bytes=size, copyKind=COPY_KINDS.index(way), **kinds)

    def _add_sync(self, e: dict[str, Any], pid: int, _: object) -> None:
        args = e["args"]
        self.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **self._times(e),
            deviceId=0,
            contextId=1,
            streamId=args.get("stream", 0),
            correlationId=args.get("correlation", 0),
            globalPid=make_global_tid(pid),
            syncType=SYNC_TYPES[e["name"]],
            eventId=7,
        )

    def add_samples(self) -> Export:
        """Keep the Python stacks as samples of nsys instead of call chains."""
        if not self.samples:
            return self
        del self.tables["CUDA_CALLCHAINS"]
        for row in self.tables["CUPTI_ACTIVITY_KIND_RUNTIME"]:
            row.pop("callchainId", None)
        threads = {thread for _, thread, _ in self.samples}
        text = "Python Periodic Sampling"
        for thread in sorted(threads):
            self.add("NVTX_EVENTS", start=0, eventType=75, globalTid=thread, domainId=SAMPLING, text=text)
        for time, thread, names in self.samples:
            frames = [found.groups() for name in names if (found := PYTHON_FRAME.match(name))]
            ids = [(self.string(function), self.string(file), int(line)) for file, line, function in frames]
            payload = struct.pack("<QII", 1, 7, len(ids)) + b"".join(struct.pack("<QQQ", *i) for i in ids)
            where = {"globalTid": thread, "domainId": SAMPLING}
            self.add("NVTX_EVENTS", start=time, eventType=34, **where, binaryData=payload)
        return self

    def repeat_backtraces(self) -> Export:
        """Write call chains on rows of their own that repeat the calls, as `--cudabacktrace` does."""
        for row in list(self.tables["CUPTI_ACTIVITY_KIND_RUNTIME"]):
            chain = row.pop("callchainId", None)
            if chain:
                again = {**row, "eventClass": 67, "start": row["start"] - 1, "callchainId": chain}
                self.add("CUPTI_ACTIVITY_KIND_RUNTIME", **again)
        return self

    def drop(self, *tables: str) -> Export:
        for table in tables:
            self.tables.pop(table, None)
        return self

    def _rows(self) -> dict[str, list[Row]]:
        """Return the tables that have rows: nsys writes no others."""
        strings = [{"id": number, "value": text} for text, number in self.strings.items()]
        return {table: rows for table, rows in {"StringIds": strings, **self.tables}.items() if rows}

    def write(self, folder: Path, form: str, name: str = "report1") -> Path:
        """Write the recording in one of FORMATS, and return the file or folder."""
        return {"sqlite": self._write_sqlite, "jsonlines": self._write_lines, "parquetdir": self._write_parquet}[form](
            folder, name
        )

    def _write_sqlite(self, folder: Path, name: str) -> Path:
        path = folder / f"{name}.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as db:
            for table, rows in self._rows().items():
                names = COLUMNS[table].split()
                key = " PRIMARY KEY" if table == "StringIds" else ""
                types = [f'"{n}" {"TEXT" if (table, n) in TEXTS or n == "binaryData" else "INTEGER"}' for n in names]
                types[0] += key
                db.execute(f"CREATE TABLE {table} ({', '.join(types)})")
                marks = ", ".join("?" * len(names))
                values = ([row.get(n) for n in names] for row in rows)
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", values)  # noqa: S608 -- names of ours
            db.commit()
        return path

    def _write_parquet(self, folder: Path, name: str) -> Path:
        path = folder / f"{name}_pqtdir"
        path.mkdir()
        for table, rows in self._rows().items():
            columns = {}
            for column in COLUMNS[table].split():
                kind = (
                    pa.binary() if column == "binaryData" else pa.string() if (table, column) in TEXTS else pa.int64()
                )
                columns[column] = pa.array([row.get(column) for row in rows], kind)
            pq.write_table(pa.table(columns), path / f"{table}.parquet", write_page_checksum=True)
        return path

    def _write_lines(self, folder: Path, name: str) -> Path:
        """Write one event on each line after the strings; 64-bit integers are strings, as in protobuf's JSON."""
        path = folder / f"{name}.jsonl"
        writers: dict[str, Callable[[Row], dict[str, Any]]] = {
            "CUPTI_ACTIVITY_KIND_RUNTIME": _make_call_line,
            "CUPTI_ACTIVITY_KIND_KERNEL": lambda row: _make_work_line(
                79, row, 3, kernel={"demangledName": str(row["demangledName"]), "shortName": str(row["shortName"])}
            ),
            "CUPTI_ACTIVITY_KIND_MEMCPY": lambda row: _make_work_line(
                80,
                row,
                1,
                memcpy={
                    "sizebytes": str(row["bytes"]),
                    "copyKind": str(row["copyKind"]),
                    "srcKind": row["srcKind"],
                    "dstKind": row["dstKind"],
                },
            ),
            "CUPTI_ACTIVITY_KIND_MEMSET": lambda row: _make_work_line(
                80, row, 2, memset={"sizebytes": str(row["bytes"]), "memKind": row["memKind"]}
            ),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": lambda row: _make_work_line(
                106,
                row,
                5,
                sync={"syncType": f"SYNCHRONIZATION_TYPE_{SYNC_NAMES[row['syncType']]}", "eventId": row["eventId"]},
            ),
            "NVTX_EVENTS": _make_range_line,
        }
        lines: list[dict[str, Any]] = [{"data": list(self.strings)}, {"Type": 27, "CommEvent": {"name": "python3"}}]
        for table, rows in self._rows().items():
            lines += [writers[table](row) for row in rows if table in writers]
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        return path


def _make_call_line(row: Row) -> dict[str, Any]:
    event = {
        "startNs": str(row["start"]),
        "endNs": str(row["end"]),
        "correlationId": row["correlationId"],
        "eventClass": row["eventClass"],
        "name": str(row["nameId"]),
        "returnValue32": 0,
        "globalTid": str(row["globalTid"]),
    }
    return {"Type": 48, "TraceProcessEvent": event}


def _make_work_line(kind: int, row: Row, event_class: int, **what: Any) -> dict[str, Any]:
    event = {
        "startNs": str(row["start"]),
        "endNs": str(row["end"]),
        "correlationId": row["correlationId"],
        "deviceId": row["deviceId"],
        "contextId": "1",
        "streamId": str(row["streamId"]),
        "eventClass": event_class,
        "globalPid": str(row["globalPid"]),
    }
    return {"Type": kind, "CudaEvent": {**event, **what}}


def _make_range_line(row: Row) -> dict[str, Any]:
    event: dict[str, Any] = {
        "Type": row["eventType"],
        "Timestamp": str(row["start"]),
        "GlobalTid": str(row["globalTid"]),
        "DomainId": str(row["domainId"]),
        "NsTime": True,
    }
    for key, column in (("EndTimestamp", "end"), ("Text", "text"), ("TextId", "textId")):
        if row.get(column) is not None:
            event[key] = row[column] if column == "text" else str(row[column])
    if row.get("binaryData"):
        event["Payload"] = {"BinaryData": [{"SchemaId": "1", "Data": base64.b64encode(row["binaryData"]).decode()}]}
    return {"Type": row["eventType"], "NvtxEvent": event}
