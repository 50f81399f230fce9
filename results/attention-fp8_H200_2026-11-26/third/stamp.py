"""python stamp.py NAME=CHECKOUT...: mean cycles of stages of a tile, of checkouts whose hopper_apart_fp8.cu begins with #define STAMPED."""
import sys
from pathlib import Path

import numpy as np
import torch
from cuda.bindings import driver

from dcpbench.kernels.attention import AttentionSpec, Shards
from tools.attention_versions import loaded

MODULES = []
load = driver.cuModuleLoadData


def recorded(code):
    answer = load(code)
    MODULES.append(answer[1])
    return answer


driver.cuModuleLoadData = recorded
SCORER = {
    "plain": ("begin (landing, 18 products)", "scores done", "softmax", "slot free", "handed over"),
    "mid": ("scores done", "softmax", "slot free", "stored", "begin next (landing, 18)", "handed over"),
}
ADDER = {
    "behind": ("landed", "values turned", "weights there", "first begun, shrunk", "all added"),
    "ahead": ("weights there", "first begun, shrunk", "three more begun", "all added"),
}
CUDA = torch.device("cuda")


def case(batch, context, heads):
    pages = -(-context // 64)
    spec = AttentionSpec(batch=batch, heads=heads, latent=512, rope=64, page_size=64, max_pages=pages, scale=576**-0.5, dtype=torch.bfloat16, device=CUDA, kv_dtype=torch.float8_e4m3fn, kv_scale=1.0)
    kv = torch.empty(batch * pages, 64, 576, dtype=torch.float8_e4m3fn, device=CUDA)
    for b in range(batch):
        kv[b * pages : (b + 1) * pages] = torch.randn(pages, 64, 576, device=CUDA).to(torch.float8_e4m3fn)
    ids = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    q = torch.randn(batch, heads, 576, device=CUDA).to(torch.bfloat16)
    return spec, q, kv, Shards(pages=list(ids), lengths=[context] * batch)


WAYS = {}
for way in sys.argv[1:]:
    name, _, checkout = way.partition("=")
    source = (Path(checkout) / "dcpbench/kernels/attention/hopper_apart_fp8.cu").read_text()
    WAYS[name] = loaded(Path(checkout)), source.split("\n")[0].split()[2:]
FOUND = {}
for batch, context, heads in ((8, 131072, 128), (8, 8192, 64)):
    spec, q, kv, shards = case(batch, context, heads)
    o, lse = torch.empty(batch, heads, 512, dtype=torch.bfloat16, device=CUDA), torch.empty(batch, heads, device=CUDA)
    for name, (make, (order, adder)) in WAYS.items():
        before = len(MODULES)
        backend = make("", spec)
        backend.plan(shards)
        for _ in range(40):
            backend.run(q, kv, o, lse)
        torch.cuda.synchronize()
        if name not in FOUND:
            FOUND[name] = MODULES[before]
        error, pointer, size = driver.cuModuleGetGlobal(FOUND[name], b"g_times")
        assert not int(error), error
        words = np.zeros(size // 4, dtype=np.uint32)
        (error,) = driver.cuMemcpyDtoH(words.ctypes.data, pointer, size)
        assert not int(error), error
        words = words.reshape(132, 64)
        words = words[words[:, 56] > 0]
        tiles, cycles, ns = (words[:, i].astype(np.int64) for i in (56, 57, 58))
        pieces = order == "mid"  # whose last tile has no stamps of the scorer
        print(f"{name} {batch} x {context} H={heads}: {len(words)} programs, {tiles.mean():.0f} tiles, {(cycles / tiles).mean():.0f} cycles a tile, {ns.mean() / 1e3:.1f} us, {(cycles / ns).mean() * 1e3:.0f} MHz")
        for who, group, stages, count in (("scorer", 2, SCORER[order], tiles - pieces), ("adder", 0, ADDER[adder], tiles)):
            at = words[:, 14 * group : 14 * group + len(stages) + 1]
            spent = [((at[:, i + 1] - at[:, i]).astype(np.int64) / np.maximum(count, 1)).mean() for i in range(len(stages))]
            rest = (cycles / tiles).mean() - sum(spent)
            print(f"   {who}: " + ", ".join(f"{stage} {one:.0f}" for stage, one in zip(stages, spent)) + f", rest {rest:.0f}", flush=True)
    del kv
