"""Define the options for requests, which `serve` and `server` share."""

import math
from typing import TYPE_CHECKING

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, make_panel, make_structured
from dcpbench.points.structured_options import Find, PrefixShare, RequestFile, Sessions
from dcpbench.serving.load_words import ANSWERS, CPU_ANSWERS, CPU_PROMPTS, PROMPTS, USUAL_REQUESTS
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from dcpbench.plan.load_search import LoadRange
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.points.settings import Settings

WHEN = make_panel("Arrival of requests")
WHAT = make_panel("Content of requests")

SLO = opt.MEASURE(
    "Limits in ms, such as ttft=500,itl=50; also tpot and e2el. Goodput is the rate of requests that meet all "
    "of them. Default: none.",
    metavar="NAME=MS,…",
)
FIND = make_structured(opt.MEASURE, Find)


class Requests(Group):
    """Hold the options for requests: when they come, and how long their prompts and answers are."""

    concurrency: str | None = WHEN(
        "Closed loop: number of clients over the whole layout (--max-concurrency of vLLM's and SGLang's benches). Each client sends its next request when its previous one is answered. With --request-rate: maximum number of requests in flight, by default 512 for each dp replica. Default: "
        "8,32,48 on GPUs; 4 on the CPU.",
        metavar="N,…",
    )
    request_rate: str | None = WHEN(
        "Open loop: requests per second on average, sent whether or not earlier ones are answered. inf sends all requests at once; inf with --concurrency is a closed loop of that many clients, as in vLLM's bench. Default: a closed loop.",
        metavar="R,…",
    )
    burstiness: str | None = WHEN(
        "With --request-rate: shape of the gamma distribution of the gaps. 1 is Poisson, smaller values give bursts, larger "
        "ones even gaps. Default: 1.",
        metavar="B",
    )
    requests: RequestFile | None = make_structured(WHEN, RequestFile)
    num_requests: str | None = WHAT(
        f"Number of requests of each point (--num-prompts of vLLM's and SGLang's benches). With --requests: the first N of the file. Default: {USUAL_REQUESTS} on GPUs; 16 on the CPU; all of a file.",
        metavar="N",
    )
    input_tokens: str | None = WHAT(
        "Length of prompts: 4000, uniform:1000-7000 or lognormal:4000:0.5 (median and sigma; at least 1, no upper "
        f"bound). Each value is a point. Default: {PROMPTS} on GPUs; {CPU_PROMPTS} on the CPU.",
        metavar="LEN,…",
    )
    output_tokens: str | None = WHAT(
        "Length of outputs, in the same notation; no request ends earlier. If all prompts have one length and all outputs have one length, the clients of a closed loop run in lock-step: they prefill and decode at the same time, which can change the order of layouts. Default: "
        f"{ANSWERS} on GPUs; {CPU_ANSWERS} on the CPU.",
        metavar="LEN,…",
    )
    prefix_share: PrefixShare | None = make_structured(WHAT, PrefixShare)
    sessions: Sessions | None = make_structured(WHAT, Sessions)


def print_load_notes(loads: "ServeLoads", settings: "Settings", *, cpu: bool) -> None:
    """Print how a file of requests was read, how --request-rate inf is served and, unless on a CPU, which objectives have too few
    samples for p99.
    """
    from dcpbench.plan.serve_spec import find_short_slos

    if loads.trace is not None:
        print_stderr(loads.trace.describe(loads.count))
    if math.inf in loads.request_rate and not loads.concurrency:
        print_stderr(
            "--request-rate inf: all requests are sent at once, as a closed loop with one client for each of them."
        )
    if not cpu:
        for short in find_short_slos(loads, settings.slo, settings.trace_path):
            print_stderr(short.describe())


def take_bounds(find: Find | None, given: dict[str, object], run: opt.Run) -> "LoadRange | None":
    """Return the bounds of --find, and set the lowest load in `given`; None without --find. Raise UsageError."""
    from dcpbench.errors import UsageError
    from dcpbench.plan.load_search import check_search, make_load_range

    if find is None:
        return None
    bounds = make_load_range(find)
    check_search(bounds, given)
    if run.machines.nnodes > 1:
        raise UsageError("--find runs on one machine; leave out --nodes, or search with --mode replay.")
    if run.caller.part is not None:
        raise UsageError("--find ends with another load for each variant; compare given loads, or search without ab.")
    given[bounds.field] = f"{bounds.low:g}"
    return bounds
