"""The commands of `dcpbench bench`, one file for each kind: options only; bench.py acts on them."""

import typer

from dcpbench.commands.bench import kernels, ranks, rows

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure single operators in several variants: time, share of what this machine can do, host time and "
    "synchronisations, and correctness of each.\n\nStart with: dcpbench bench attention",
)
app.command("attention")(kernels.attention)
app.command("exchange")(ranks.exchange)
app.command("collectives")(ranks.collectives)
app.command("merge")(kernels.merge)
app.command("moe")(kernels.moe)
app.command("kv-gather")(ranks.kv_gather)
app.command("kv-write")(rows.kv_write)
app.command("dp-slice")(rows.dp_slice)
app.command("padded-slots")(rows.padded_slots)
