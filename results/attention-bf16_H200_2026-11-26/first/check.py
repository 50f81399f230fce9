"""python check.py CHECKOUT NAME: bf16 and fp16 MLA decode of a checkout against fp64, with scores that jump; ends with 1 where anything is wrong."""
import sys, time
from pathlib import Path
import numpy as np
import torch
from dcpbench.kernels.attention import AttentionSpec, Shards
from tools.attention_versions import loaded
from tests.kernels.test_attention import run, truth, FULL, CUDA, NAN


def problem(lengths, heads, page, dtype, jump, seed=0, low=False):
    """NaN in all that nobody has. Scores move by about `jump` (base 2) between tiles, up and down, or of a row alone, times a factor of each head."""
    rng, used = np.random.default_rng(seed), [-(-n // page) for n in lengths]
    pages = np.split(rng.permutation(sum(used) + 3).astype(np.int32)[: sum(used)], np.cumsum(used)[:-1])
    width = FULL["latent"] + FULL["rope"]
    kv = torch.full((sum(used) + 3, page, width), NAN, dtype=dtype, device=CUDA)
    rows = [np.repeat(ids.astype(np.int64) * page, page)[:n] + np.arange(n) % page for ids, n in zip(pages, lengths, strict=True)]
    rows = torch.from_numpy(np.concatenate(rows)).to(CUDA)
    drawn = torch.randn(len(rows), width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))
    drawn[:, :512] += 0.3
    q = torch.randn(len(lengths), heads, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed + 1))
    scale = width**-0.5
    if jump:
        at = []
        for n in lengths:
            level = 0.0
            own = np.zeros(n)
            for t in range(0, n, 64):
                kind, by = rng.integers(6), jump * rng.uniform(0.5, 1.5)
                level = np.clip(level + (kind == 0) * by - (kind == 1) * by, -1500, 1500)
                if low and t < 128:
                    level = -1500.0 * (t == 0)
                own[t : t + 64] = level
                if kind in (2, 3):
                    own[min(t + rng.integers(64), n - 1)] += by if kind == 2 else -by
            at.append(own)
        at = np.concatenate(at) / (scale * 1.4427 * 16)
        drawn[:, 560:] = torch.from_numpy(at).to(CUDA)[:, None].to(torch.float32)
        factors = torch.tensor([1, 0, -1, 0.01, 0.1, -0.1, 0.3, 0.05, 0.02, -0.02, 1, 0.5, 0.03, 0, -0.5, 0.07], device=CUDA)
        q[..., 560:] = factors[(torch.arange(heads, device=CUDA) * 5 + torch.arange(heads, device=CUDA) // 16) % 16][None, :, None]
    kv.view(-1, width)[rows] = drawn.to(dtype)
    spec = AttentionSpec(batch=len(lengths), heads=heads, page_size=page, max_pages=max(*used, 1) + 2, scale=scale, dtype=dtype, device=CUDA, **FULL)
    return spec, q.to(dtype), kv, Shards(pages=pages, lengths=list(lengths))


make, name = loaded(Path(sys.argv[1])), sys.argv[2]
bad, t0, B, F = 0, time.time(), torch.bfloat16, torch.float16
UNEVEN = (1, 4099, 0, 777, 64, 65, 0, *(130,) * 140)
cases = [(h, p, UNEVEN, d, 0) for h, p, d in ((128, 64, B), (64, 64, F), (17, 64, B), (128, 16, F), (40, 16, B), (130, 64, B))]
cases += [(128, 64, (0, 0), B, 0), (64, 64, (64,) * 300, B, 0), (128, 64, (320,) * 200, B, 0), (128, 64, (16_384, 0), B, 0)]
cases += [(h, p, l, d, j) for j in (10, 40, 100, 1000) for h, p, l, d in ((128, 64, (9000, 1, 0, 700, 64), B), (64, 16, (1300,) * 60, F), (64, 64, (1000,) * 150, B), (128, 64, (20_000,), F))]
cases += [(64, 64, (3000,) * 20, d, -100) for d in (B, F)]
for heads, page, lengths, dtype, jump in cases:
    case = problem(lengths, heads, page, dtype, abs(jump), seed=abs(jump) + heads, low=jump < 0)
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
    error = worst = off = 0.0
    if not bool(empty.all()):
        error = float((o.double() - true_o)[~empty].norm() / true_o[~empty].norm())
        worst = float(((o.double() - true_o)[~empty].norm(dim=-1) / true_o[~empty].norm(dim=-1)).max())
        off = float(((lse.double() - true_lse)[~empty].abs() / (1 + true_lse[~empty].abs() / 1000)).max())
    ok &= error <= 5e-3 and worst <= 3e-2 and off <= 5e-3
    bad += not ok
    print(f"{name} {backend.kernel} H={heads} page {page} {len(lengths)} requests {str(dtype)[6:]} jump {jump}: error {error:.5f} worst head {worst:.5f} lse {off:.5f} same bits {same} {'ok' if ok else 'WRONG'}", flush=True)
print(f"{name}: {'WRONG ' + str(bad) if bad else 'all right'} in {time.time() - t0:.0f} s", flush=True)
sys.exit(bad > 0)
