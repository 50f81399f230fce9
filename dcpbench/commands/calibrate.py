"""Implement `dcpbench bench calibrate`: write a machine's file from benches between ranks and from measured step times."""

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import make_console, print_stderr
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from dcpbench.bench.bench_record import BenchRecord
    from dcpbench.points.cluster_specs import Machine

REQUESTS = "1,2,4,8,16,32,64,128,256,512"  # numbers of requests of a decode step, for messages between 10 KB and 7 MB


def calibrate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Files or folders of `bench collectives` and `bench exchange`, or a machine's file with their results. Default: both benches are run now, on this machine's GPUs. Also runs with step times of one layout, live and with --emulate: they give the ratio of multi-GPU to single-GPU time of steps with prompts.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The machine's file.")] = Path(
        "machine.toml"
    ),
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Name of the machine. Default: the name of its GPU.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the machine's GPU in `dcpbench machines`. Default: the GPU that was measured."
        ),
    ] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="GPUs that read each other's memory. Default: 8.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="NAME", help="Link between hosts, from `dcpbench machines`. Default: none.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are already there.")] = False,
    as_json: bool = opt.JSON,
) -> int:
    """Measure a machine's collectives and exchanges, and write a file that predicts their times, with its error.

    --emulate and recommend read the file. A picture next to it shows measured and modelled times.

    For example:

      dcpbench bench calibrate -o our-h200.toml

      dcpbench bench calibrate results/collectives results/exchange --link rdma-400 -o our-h200.toml

      dcpbench bench calibrate our-h200.toml runs/live runs/emulated -o our-h200.toml --force
    """
    import msgspec

    from dcpbench.bench import calibration
    from dcpbench.bench.shown import comm_model_fit as shown
    from dcpbench.points import cluster_specs, gpus
    from dcpbench.points.comm_model import Call
    from dcpbench.records.disks import convert_output_errors
    from dcpbench.show.streams import write_json

    _check_files(out, force=force)
    picture = out.with_suffix(".png")
    host = gpus_per_host or cluster_specs.GPUS_PER_HOST
    requested = cluster_specs.Machine(name="options", gpu=gpu or gpus.GPUS[0].name, gpus_per_host=host, link=link)
    cluster_specs.parse_machine(cluster_specs.format_machine(requested).encode(), "these options")
    prompts = calibration.compute_prompt_ratios(calibration.find_step_times(runs or []))
    benches = [
        path for path in runs or [] if any(path.rglob("bench-*.json")) or not calibration.find_step_times([path])
    ]
    if any(path.suffix == ".toml" for path in benches):
        made = _update_machine(benches, name=name, gpu=gpu, gpus_per_host=gpus_per_host, link=link)
    else:
        made = _make_machine(requested, calibration.read_records(benches) if benches else _measure_calls(), name, gpu)
    written = cluster_specs.format_machine(msgspec.structs.replace(made, prompts=prompts or made.prompts)).encode()
    machine = cluster_specs.parse_machine(written, "these options")
    with convert_output_errors(out, "name another file with --out"):
        out.write_bytes(written)
    calls = [Call(called, tuple(samples)) for called, samples in machine.calls.items()]
    shown.write_picture(calls, picture, f"{machine.name}: {machine.measured}")
    found = calibration.compute_quality(calls)
    lacks = calibration.find_missing_calls(machine.calls)
    _print_lacking(lacks, max_ranks=max(n for call in calls for n in call.ranks))
    if as_json:
        rows = [dict(zip(shown.COLUMNS, shown.format_row(q), strict=True)) for q in found]
        summary = {
            "file": str(out),
            "picture": str(picture),
            "calls": rows,
            "lacks": [*itertools.chain(*lacks.values())],
            "prompts": machine.prompts,
        }
        write_json(msgspec.json.encode(summary).decode() + "\n")
        return 0
    make_console().print(shown.make_table(found))
    _print_prompts(machine)
    for path in (out, picture):
        typer.echo(f"Wrote {path}")
    return 0


def _check_files(out: Path, *, force: bool) -> None:
    """Raise OutputError if the machine's file cannot be written, has the name of its picture, or either exists."""
    from dcpbench.errors import OutputError

    if out.is_dir():
        why = "is a folder"
    elif not out.parent.is_dir():
        why = f"cannot be written: there is no folder {out.parent}"
    elif out.suffix == ".png":
        why = "is the name of its picture"
    else:
        there = [str(path) for path in (out, out.with_suffix(".png")) if path.exists()]
        if there and not force:
            raise OutputError(
                f"{' and '.join(there)} would be written over; add --force, or name another file with --out."
            )
        return
    raise OutputError(f"{out} {why}; name another file with --out, such as --out our-h200.toml.")


def _make_machine(requested: "Machine", records: "list[BenchRecord]", name: str | None, gpu: str | None) -> "Machine":
    """Return the machine with its measured calls. Without --name or --gpu these are taken from the benches."""
    import msgspec

    from dcpbench.bench import calibration
    from dcpbench.errors import UsageError

    card, measured = calibration.describe_hardware(records)
    if gpu is None and not card:
        raise UsageError(
            "these benches name a GPU that dcpbench machines does not list; name the most similar one with --gpu."
        )
    other = gpu and card and gpu != card
    usual = f"{gpu}, its communication measured on {card}" if other else f"{gpu or card}, measured"
    calls = calibration.collect_samples(records)
    return msgspec.structs.replace(requested, name=name or usual, gpu=gpu or card, measured=measured, calls=calls)


def _update_machine(paths: list[Path], **typed: object) -> "Machine":
    """Return a machine's file with the given options in place of its own values.

    Raise UsageError if there are several paths, or if the file has no measured calls.
    """
    import msgspec

    from dcpbench.errors import UsageError
    from dcpbench.points import cluster_specs

    if len(paths) > 1:
        raise UsageError(
            f"{format_list([str(path) for path in paths])}: a machine's file cannot be combined with others; name one such file, or benches."
        )
    found = cluster_specs.read_machine(paths[0])
    if not found.calls:
        raise UsageError(f"{paths[0]} has no [calls] that were measured; name benches, or a file that has.")
    return msgspec.structs.replace(found, **{k: v for k, v in typed.items() if v is not None})


def _print_prompts(machine: "Machine") -> None:
    """Print the largest measured ratio of multi-GPU to single-GPU step time for steps with prompts."""
    if machine.prompts:
        most = max(machine.prompts, key=lambda p: p.times)
        print_stderr(
            f"Steps with prompts take up to {most.times:.3f} times as long on these GPUs as on one emulating GPU (at "
            f"{most.tokens:,} prompt tokens); forecasts with this file include this factor."
        )


def _print_lacking(lacks: dict[str, list[str]], max_ranks: int) -> None:
    """Print which calls were not measured, and the command that measures them on the same number of GPUs."""
    for bench, names in lacks.items():
        print_stderr(
            f"Not measured: {format_list(names)}; points that need them cannot be emulated or forecast with this file. Run on these "
            f"GPUs: dcpbench bench {bench} --variant {','.join(names)} --requests {REQUESTS} --ranks {max_ranks} -o FOLDER, and name "
            "FOLDER here, too."
        )


def _measure_calls() -> "list[BenchRecord]":
    """Run both benches on 2, 4, … GPUs of this machine, and return their records."""
    from dcpbench.bench import calibration
    from dcpbench.bench import runner as benches
    from dcpbench.commands import point_runner
    from dcpbench.commands.bench import BENCHES
    from dcpbench.errors import CapacityError
    from dcpbench.launch import launcher

    count = launcher.run_probe(point_runner.WORKER).count
    if count < 2:  # noqa: PLR2004 - collectives need two
        raise CapacityError(
            f"calibrate measures communication between GPUs, and this machine has {count}; name records of bench collectives "
            "and bench exchange from another machine, or use a built-in machine (dcpbench machines)."
        )
    with tempfile.TemporaryDirectory() as folder:
        ranks = 2
        while ranks <= count:
            for bench in calibration.BENCHES:
                print_stderr(f"{bench} on {ranks} GPUs …")
                sizes = vars(BENCHES[bench](requests=REQUESTS, ranks=ranks))
                benches.run_bench(bench, sizes, benches.Options(output=Path(folder) / f"{bench}-{ranks}"))
            ranks *= 2
        return calibration.read_records([Path(folder)])
