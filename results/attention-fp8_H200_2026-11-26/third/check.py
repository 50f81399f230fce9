"""python check.py CHECKOUT NAME [few]: attention over e4m3 of a checkout against fp64; ends with 1 where anything is wrong."""
import sys, time
from pathlib import Path
import torch
import numpy as np
from dcpbench.kernels.attention import AttentionSpec, Shards, rounding_error
from tools.attention_versions import loaded
from tests.kernels.test_attention import in_fp8, run, truth, FULL, CUDA, NAN



def problem(lengths, heads, page, mean, dtype=torch.bfloat16, seed=0):
    """As the tests have it, rows drawn at once: NaN in all that nobody has, page numbers that point at nothing past the last."""
    rng, used = np.random.default_rng(seed), [-(-n // page) for n in lengths]
    pages = np.split(rng.permutation(sum(used) + 3).astype(np.int32)[: sum(used)], np.cumsum(used)[:-1])
    width, latent = FULL["latent"] + FULL["rope"], FULL["latent"]
    kv = torch.full((sum(used) + 3, page, width), NAN, dtype=dtype, device=CUDA)
    rows = [np.repeat(ids.astype(np.int64) * page, page)[:n] + np.arange(n) % page for ids, n in zip(pages, lengths, strict=True)]
    rows = torch.from_numpy(np.concatenate(rows)).to(CUDA)
    drawn = torch.randn(len(rows), width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))
    drawn[:, :latent] += mean
    kv.view(-1, width)[rows] = drawn.to(dtype)
    q = torch.randn(len(lengths), heads, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed + 1)).to(dtype)
    spec = AttentionSpec(batch=len(lengths), heads=heads, page_size=page, max_pages=max(*used, 1) + 2, scale=width**-0.5, dtype=dtype, device=CUDA, **FULL)
    return spec, q, kv, Shards(pages=pages, lengths=list(lengths))


def rising(lengths, heads, page):
    """Scores that rise by 5.3 every 100 rows and by 130 in the end, for odd heads downwards; q of 1 and -1."""
    spec, q, kv, shards = problem(lengths, heads, page, 0.0)
    q.copy_(torch.where(q < 0, -1.0, 1.0))
    q[:, 0::2, 512:], q[:, 1::2, 512:] = 1.0, -1.0
    for pages, length in zip(shards.pages, shards.lengths, strict=True):
        row = torch.arange(length, device=CUDA)
        at = torch.from_numpy(pages.astype(np.int64)).to(CUDA)[row // page]
        kv[at, row % page, 512:] = torch.where(row < length - 50, row // 100 * 2, 64).to(kv.dtype)[:, None]
    return spec, q, kv, shards


make, name, few = loaded(Path(sys.argv[1])), sys.argv[2], len(sys.argv) > 3
bad, t0 = 0, time.time()
UNEVEN = (1, 4099, 0, 777, 64, 65, 0, *(130,) * (10 if few else 140))
cases = [(h, p, UNEVEN, 0.0) for h, p in ((128, 64), (64, 64), (16, 64), (128, 16), (40, 16), (130, 32), (192, 64), (256, 64))]
cases += [(128, 1, UNEVEN, 0.0)] if name == "old" else []  # which no version changes
cases += [(128, 64, (16_384, 0), 1.0), (128, 64, (0, 0), 0.0), (64, 64, (64,) * 300, 0.0), (128, 64, (320,) * 200, 0.0)]
cases += [(128, 64, (1000, 1, 0, 700, 64), None), (16, 16, (1300,) * 40, None), (64, 64, (1000,) * 150, None)]
if few:
    cases = [(128, 64, UNEVEN, 0.0), (40, 16, UNEVEN, 0.0)]
for heads, page, lengths, mean in cases:
    case = in_fp8(*rising(lengths, heads, page)) if mean is None else in_fp8(*problem(lengths, heads, page, mean), 0.25)
    backend = make("", case[0])
    backend.plan(case[3])
    o, lse = run(backend, *case[:3])
    torch.cuda.synchronize()
    live = torch.tensor([n > 0 for n in lengths])
    same = True
    for _ in range(10):
        again = run(backend, *case[:3])
        same &= bool((o[live] == again[0][live]).all()) and bool((lse[live] == again[1][live]).all())
    true_o, true_lse = truth(*case)
    empty = torch.isneginf(true_lse)
    ok = bool(torch.equal(torch.isneginf(lse), empty)) and same
    limit = 1e-2 if mean else max(1e-2, rounding_error(backend.rounds, 1.0))
    error = float((o.double() - true_o)[~empty].norm() / true_o[~empty].norm()) if not bool(empty.all()) else 0.0
    off = float((lse.double() - true_lse)[~empty].abs().max()) if not bool(empty.all()) else 0.0
    ok &= error <= limit and off <= (0.5 if mean else 5 * limit)
    bad += not ok
    print(f"{name} {backend.kernel} H={heads} page {page} {len(lengths)} requests mean {mean}: error {error:.5f} (limit {limit:.4f}) lse {off:.4f} same bits {same} {'ok' if ok else 'WRONG'}", flush=True)
    if not ok and not few:
        where = (o.double() - true_o).norm(dim=2) / true_o.norm(dim=2).clamp_min(1e-9)
        worst = torch.where(empty, torch.zeros_like(where), where.nan_to_num(9e9))
        b, h = divmod(int(worst.argmax()), worst.shape[1])
        halves = [(o.double() - true_o)[b, h, i : i + 64].norm().item() / max(true_o[b, h, i : i + 64].norm().item(), 1e-9) for i in range(0, 512, 64)]
        print(f"  worst: request {b} (length {lengths[b]}) head {h}, by 64 columns {[round(x, 3) for x in halves]}; wrong heads {int((worst > 3 * limit).sum())} of {worst.numel()}", flush=True)
print(f"{name}: {'WRONG ' + str(bad) if bad else 'all right'} in {time.time() - t0:.0f} s", flush=True)
sys.exit(bad > 0)
