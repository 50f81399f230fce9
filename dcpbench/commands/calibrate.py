"""`dcpbench calibrate`: a machine's file, from benches between its ranks."""

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import bench as commands
from dcpbench.commands import options as opt
from dcpbench.show.terminal import console, say
from dcpbench.show.text import listed

if TYPE_CHECKING:
    from dcpbench.bench.record import BenchRecord
    from dcpbench.points.wire import Sample

REQUESTS = "1,2,4,8,16,32,64,128,256,512"
"""Sizes of messages: a step of each, between 10 KB and 7 MB."""
OF_BENCH = {"collectives": commands.Collectives, "exchange": commands.Exchange}


def calibrate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="BENCH",
            help="Files or folders of `bench collectives` and `bench exchange`. Default: both are run now, on this "
            "machine's GPUs.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The machine's file.")] = Path(
        "machine.toml"
    ),
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What to call it. Default: of its GPU.")] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of `dcpbench machines`. Default: as measured.")
    ] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="GPUs that read each other's memory. Default: 8.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="NAME", help="Between hosts, of `dcpbench machines`. Default: none.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are already there.")] = False,
    as_json: bool = opt.JSON,
) -> int:
    """Write what a machine's collectives and exchanges take, with the error of predicting them.

    --emulate and recommend read the file. Beside it lies a picture of measured and modelled times.

    For example:

      dcpbench calibrate -o our-h200.toml

      dcpbench calibrate results/collectives results/exchange --link rdma-400 -o our-h200.toml
    """
    import msgspec

    from dcpbench.bench import calibration
    from dcpbench.bench.shown import wire as shown
    from dcpbench.errors import OutputError, UsageError
    from dcpbench.points import gpus, machines
    from dcpbench.points.wire import Call
    from dcpbench.show.streams import write_json

    _check_file(out)
    picture = out.with_suffix(".png")
    there = [str(path) for path in (out, picture) if path.exists()]
    if there and not force:
        raise OutputError(f"{' and '.join(there)} would be written over; add --force, or name another file with --out.")

    def described(name: str, gpu: str, measured: str = "", calls: "dict[str, list[Sample]] | None" = None) -> bytes:
        host = gpus_per_host or machines.GPUS_PER_HOST
        machine = machines.Machine(
            name=name, gpu=gpu, gpus_per_host=host, link=link, measured=measured, calls=calls or {}
        )
        return machines.text(machine).encode()

    machines.parse(described("options", gpu or gpus.GPUS[0].name), "these options")
    records = calibration.records_in(runs) if runs else _measured()
    card, words = calibration.measured_on(records)
    if gpu is None and not card:
        raise UsageError(
            "these benches name a GPU that dcpbench machines does not list; say with --gpu which is like it."
        )
    usual = f"{gpu}, its wire measured on {card}" if gpu and card and gpu != card else f"{gpu or card}, measured"
    written = described(name or usual, gpu or card, words, calibration.calls_of(records))
    machine = machines.parse(written, "these options")
    try:
        out.write_bytes(written)
    except OSError as e:
        raise OutputError(f"cannot write {out}: {e.strerror}; name another file with --out.") from e
    calls = [Call(called, tuple(samples)) for called, samples in machine.calls.items()]
    shown.write_picture(calls, picture, f"{machine.name}: {machine.measured}")
    found = calibration.quality(calls)
    lacks = calibration.lacking(machine.calls)
    for bench, names in lacks.items():
        most = max(sample.ranks for samples in machine.calls.values() for sample in samples)
        say(
            f"Not measured: {listed(names)}; what needs them can be neither emulated nor forecast by this file. Type on these "
            f"GPUs: dcpbench bench {bench} --variant {','.join(names)} --requests {REQUESTS} --ranks {most} -o FOLDER, and name "
            "FOLDER here, too."
        )
    if as_json:
        as_rows = [dict(zip(shown.COLUMNS, shown.row(q), strict=True)) for q in found]
        told = {
            "file": str(out),
            "picture": str(picture),
            "calls": as_rows,
            "lacks": [*itertools.chain(*lacks.values())],
        }
        write_json(msgspec.json.encode(told).decode() + "\n")
        return 0
    console().print(shown.table(found))
    for path in (out, picture):
        typer.echo(f"Wrote {path}")
    return 0


def _check_file(out: Path) -> None:
    """Raise OutputError where the machine's file could not be written, or its picture would lie on it."""
    from dcpbench.errors import OutputError

    if out.is_dir():
        why = "is a folder"
    elif not out.parent.is_dir():
        why = f"cannot be written: there is no folder {out.parent}"
    elif out.suffix == ".png":
        why = "is the name of its picture"
    else:
        return
    raise OutputError(f"{out} {why}; name another file with --out, such as --out our-h200.toml.")


def _measured() -> "list[BenchRecord]":
    """Both benches on 2, 4, … GPUs of this machine."""
    from dcpbench.bench import calibration
    from dcpbench.bench import command as benches
    from dcpbench.commands import runs
    from dcpbench.errors import CapacityError
    from dcpbench.launch import launcher

    count = launcher.probe(runs.WORKER).count
    if count < 2:  # noqa: PLR2004 - one has nobody to send anything to
        raise CapacityError(
            f"calibrate measures what GPUs send each other, and this machine has {count}; name records of bench collectives "
            "and bench exchange of another, or use a built-in machine (dcpbench machines)."
        )
    with tempfile.TemporaryDirectory() as folder:
        ranks = 2
        while ranks <= count:
            for bench in calibration.BENCHES:
                say(f"{bench} on {ranks} GPUs …")
                sizes = vars(OF_BENCH[bench](requests=REQUESTS, ranks=ranks))
                benches.run(bench, sizes, benches.Options(output=Path(folder) / f"{bench}-{ranks}"))
            ranks *= 2
        return calibration.records_in([Path(folder)])
