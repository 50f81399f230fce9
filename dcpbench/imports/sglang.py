"""Read results of SGLang's `bench_serving`, with the fields of python/sglang/bench_serving.py; docs/exports.md names the commit.

Behind a router that separates prefill and decode, the server's information is a list of servers of each kind (mini_lb.py).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import field_names, result
from dcpbench.imports.result import ONE_TOKEN, Result
from dcpbench.imports.vllm import read_experts, read_summary
from dcpbench.points.instances import MAX_INSTANCES, Instances
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import CLOSED, GAMMA, SGLANG, TOOLS, TRACE
from dcpbench.records.record import Latencies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.imports.documents import Document

NAMES = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2el": "e2e_latency"}
RANDOM = ("random", "random-ids")
PREFILL, DECODE = "prefill", "decode"
ALONE = "disaggregation_mode"  # field of one server of several; its value is `prefill` or `decode`
ARGUMENTS = """
    version attention_backend prefill_attention_backend decode_attention_backend moe_runner_backend moe_a2a_backend
    sampling_backend page_size context_length chunked_prefill_size max_prefill_tokens max_running_requests
    mem_fraction_static schedule_policy schedule_conservativeness disable_radix_cache disable_cuda_graph
    cuda_graph_max_bs disable_overlap_schedule enable_two_batch_overlap enable_torch_compile enable_mixed_chunk
    enable_dp_lm_head moe_dense_tp_size attn_cp_size stream_interval num_continuous_decode_steps
    speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
"""
"""Arguments of a server that distinguish two servers, besides those that a point has fields for."""


class File(msgspec.Struct, kw_only=True):
    """Hold the fields of a result file that are read; others are ignored."""

    backend: str
    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    median_e2e_latency_ms: float  # distinguishes this file from vLLM's, which has another name for it
    dataset_name: str = ""
    max_concurrency: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float | None = None
    accept_length: float | None = None
    tag: str | None = None


OTHERS = """
    request_rate server_info total_input total_output total_output_tokens_retokenized total_output_retokenized
    total_input_text_tokens total_input_vision_tokens request_throughput input_throughput output_throughput output_throughput_retokenized
    total_throughput total_throughput_retokenized concurrency sharegpt_output_len fixed_output_len generated_texts
    max_output_tokens_per_s max_concurrent_requests
"""
KNOWN = (*File.__struct_fields__, *result.LISTS, *OTHERS.split())  # fields that are read or do not matter


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Describe the servers of a result file."""

    server: Mapping[str, Any]  # information of the server, or of the first one that decodes
    layout: Mapping[str, int]  # layout of that server; empty if it, or the number of servers, is unknown
    disaggregate: str = ""
    prefill_gpus: int = 0
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read(document: Document) -> Result:
    """Read one result. Raise RecordsError for a document of another tool."""
    fields = _rename_sums(document.fields)
    found: File = result.convert(type(document)(document.where, fields), File, TOOLS[SGLANG])
    is_trace, per_s = fields.get("request_rate") == TRACE, result.read_rate(document, "SGLang", ("inf", TRACE))
    details = result.read_details(document, found.completed)
    deployment = _read_deployment(document)
    server = deployment.server
    return Result(
        where=document.where,
        model=_read_model(document),
        arrival=TRACE if is_trace else CLOSED if per_s is None else GAMMA,
        trace=found.dataset_name if is_trace else "",
        request_rate=per_s,
        concurrency=found.max_concurrency,
        submitted=None if details is None else len(details.errors),
        completed=found.completed,
        failed=None if details is None else len(details.errors) - found.completed,
        duration_s=found.duration,
        input_tokens=found.total_input_tokens,
        output_tokens=found.total_output_tokens,
        lengths=_read_lengths(found),
        summary=_read_summaries(document, found),
        several_tokens=(found.accept_length or 1.0) > ONE_TOKEN or (details is not None and details.has_divided_gaps()),
        layout=deployment.layout,
        disaggregate=deployment.disaggregate,
        prefill_gpus=deployment.prefill_gpus,
        ep=read_experts(server),
        device=field_names.read_hardware({**server, **document.fields}),
        precision=field_names.read_precision({**server, **document.fields}),
        settings=deployment.settings,
        hints=_read_hints(found, server),
        facts={"backend": found.backend, "dataset": found.dataset_name, "tag": found.tag or ""},
        unread=result.list_unread(document, (*KNOWN, *field_names.SERVER), list(NAMES.values()), details),
        details=details,
    )


def _read_summaries(document: Document, found: File) -> dict[str, Latencies]:
    """Return the tool's own statistics.

    Of an answer that was not streamed (--disable-stream) the tool writes the end-to-end latency as TTFT, a TPOT near 0, which
    may be negative, and no gaps. Then TTFT and TPOT are unknown.
    """
    streamed = document.fields.get("mean_itl_ms") != 0 or found.total_output_tokens <= found.completed
    return {
        ours: read_summary(document, ours, found.completed, theirs)
        if streamed or ours not in ("ttft", "tpot")
        else Latencies()
        for ours, theirs in NAMES.items()
    }


def _list_servers(info: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the servers of a kind behind a router that separates prefill and decode."""
    found = info.get(kind)
    return [server for server in found if isinstance(server, dict)] if isinstance(found, list) else []


def _read_deployment(document: Document) -> Deployment:
    """Read which servers there were. Raise RecordsError if servers of one kind have different layouts."""
    info = result.get_table(document.fields, "server_info")
    prefill, decode = _list_servers(info, PREFILL), _list_servers(info, DECODE)
    if prefill and decode:
        return _read_instances(document.where, prefill, decode)
    server = info | (prefill or decode or [{}])[0]
    mode = server.get(ALONE)
    if prefill or decode or mode in (PREFILL, DECODE):  # the servers of the other kind are missing: GPUs are unknown
        return Deployment(server, {}, settings={"disaggregation": str(mode or (PREFILL if prefill else DECODE))})
    return Deployment(server, _read_layout(server))


def _read_instances(where: str, prefill: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]) -> Deployment:
    """Read the servers of both kinds, each on its own GPUs."""
    if len(prefill) + len(decode) > MAX_INSTANCES:
        raise RecordsError(f"{where}: {len(prefill) + len(decode):,} servers; a point has at most {MAX_INSTANCES}.")
    first, main = (_read_shared_layout(where, kind, own) for kind, own in ((PREFILL, prefill), (DECODE, decode)))
    split = str(Instances(prefill=len(prefill), decode=len(decode)))
    if not (first and main):
        return Deployment(decode[0], {}, split)
    if first == main:
        return Deployment(decode[0], main, split)
    degrees = "·".join(f"{name}{degree}" for name, degree in first.items() if degree > 1 or name == "tp")
    return Deployment(decode[0], main, split, result.count_instance_gpus(first), {PREFILL: degrees})


def _read_shared_layout(where: str, kind: str, servers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    layouts = [_read_layout(server) for server in servers]
    if any(layout != layouts[0] for layout in layouts):
        raise RecordsError(
            f"{where}: the {kind} servers have different layouts, which a point cannot hold; import the results of servers "
            "with one layout for prefill and one for decode."
        )
    return layouts[0]


def _read_layout(server: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout in our degrees; empty without tp_size.

    dp_size lies inside tp_size with attention data parallelism, and multiplies it otherwise. Pipeline stages have GPUs of
    their own. Prefill context parallelism (attn_cp_size) lies inside tp_size.
    """
    tp, dp, dcp, pp = (result.read_integer(server.get(f"{name}_size")) for name in (*DEGREES, "pp"))
    if tp is None:
        return {}
    inside = field_names.is_true(server.get("enable_dp_attention"))
    return {"tp": tp if inside else tp * (dp or 1), "dp": dp or 1, "dcp": dcp or 1, "pp": pp or 1, "pcp": 1}


def _read_hints(found: File, server: Mapping[str, Any]) -> dict[str, str]:
    """Return the tag, the API that was measured, the data set and the server's arguments, as far as the file has them."""
    arguments = {name: server[name] for name in ARGUMENTS.split() if isinstance(server.get(name), str | int | float)}
    texts = {"tag": found.tag or "", "backend": found.backend, "dataset": found.dataset_name, **arguments}
    return {name: field_names.shorten_label(str(text).strip()) for name, text in texts.items() if str(text).strip()}


def _rename_sums(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with sums under the names that all versions but one have."""
    short = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
    return {**{long: fields[name] for name, long in short.items() if name in fields}, **fields}


def _read_lengths(found: File) -> tuple[str | None, str | None]:
    """Return the lengths of the random data set, which draws from a share of the maximum up to the maximum.

    Files of other data sets have the same fields without a meaning.
    """
    ratio = found.random_range_ratio
    if found.dataset_name not in RANDOM or ratio is None or not 0 <= ratio <= 1:
        return None, None
    prompts, answers = (_format_range(longest, ratio) for longest in (found.random_input_len, found.random_output_len))
    return prompts, answers


def _format_range(longest: int | None, ratio: float) -> str | None:
    if not longest:
        return None
    shortest = max(int(longest * ratio), 1)
    return str(longest) if shortest == longest else f"uniform:{shortest}-{longest}"


def _read_model(document: Document) -> str | None:
    """Return the model of the server, or of the first server behind a router that has one."""
    info = result.get_table(document.fields, "server_info")
    servers = [info, *_list_servers(info, PREFILL), *_list_servers(info, DECODE)]
    return next((name for s in servers if (name := result.read_model(s.get("model_path"), document.where))), None)
