"""Implement `dcpbench machines`: show the known GPUs, hosts and links, with their sources."""

from dcpbench.commands import options as opt
from dcpbench.show.terminal import make_console


def machines(as_json: bool = opt.JSON) -> int:
    """Show the GPUs and links that --gpu, --emulate and recommend accept, with the source of each figure.

    A machine is a GPU's name, with +LINK where there is more than one host, such as H200+rdma-400; or a file that
    dcpbench bench calibrate writes.

    Example: dcpbench machines
    """
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.points.cluster_specs import GPUS_PER_HOST, LINKS, MEASURED_ON, load_built_in
    from dcpbench.points.gpus import GPUS, format_machine_label

    if as_json:
        point_runner.print_json(
            {"gpus": msgspec.to_builtins(GPUS), "links": msgspec.to_builtins(LINKS), "gpus_per_host": GPUS_PER_HOST}
        )
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from dcpbench.points.sizes import format_size
    from dcpbench.show.numbers import format_short_number

    shown = Table(
        box=SIMPLE_HEAD,
        title="GPUs; rates from data sheets, dense, links in one direction. On paper: dcpbench has never run on one",
    )
    for name in ("GPU", "a host", "memory", "L2", "memory TB/s", "bf16 TFLOP/s", "fp8 TFLOP/s", "NVLink GB/s", "W"):
        shown.add_column(name, justify="left" if name == "GPU" else "right")
    for gpu in GPUS:
        fp8 = "—" if gpu.fp8_flop_s is None else format_short_number(gpu.fp8_flop_s / 1e12)
        rates = [format_short_number(gpu.memory_bytes_s / 1e12), format_short_number(gpu.bf16_flop_s / 1e12), fp8]
        shown.add_row(
            format_machine_label(gpu.name),
            str(gpu.gpus_per_host),
            format_size(gpu.memory_bytes),
            format_size(gpu.l2_bytes),
            *rates,
            format_short_number(gpu.nvlink_bytes_s / 1e9),
            str(gpu.watts),
        )
    links = Table(box=SIMPLE_HEAD, title="Links between hosts, per GPU")
    for name in ("link", "GB/s", "µs", "source"):
        links.add_column(name, overflow="fold")
    for link in LINKS:
        links.add_row(
            link.name, format_short_number(link.bytes_s / 1e9), format_short_number(link.latency_us), link.source
        )
    terminal = make_console()
    terminal.print(shown)
    terminal.print(links)
    terminal.print(
        f"Times of collectives were measured on {load_built_in(MEASURED_ON).measured}; for other GPUs they are scaled by NVLink "
        "bandwidth. Nothing was measured between hosts.",
        soft_wrap=True,
    )
    for gpu in GPUS:
        terminal.print(
            f"{format_machine_label(gpu.name)}: {gpu.source}. Memory: {gpu.memory_source}.", soft_wrap=True, style="dim"
        )
    return 0
