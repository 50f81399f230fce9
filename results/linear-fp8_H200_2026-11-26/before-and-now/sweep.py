"""Linear layers of DeepSeek-V3 over e4m3 at decode sizes: this checkout, another before it, what each of two changes does, and all cuts.

    python sweep.py BEFORE compile I N              compiles the I-th of N parts of all kernels that are needed
    python sweep.py BEFORE SECONDS OUT.jsonl        times; SECONDS: from the start on, after which no further case begins
    python sweep.py BEFORE experts OUT.jsonl        experts of one rank of eight: scales either way, and tiles that read no row that is not there
    python sweep.py BEFORE summary OUT.jsonl        of a file; needs no GPU
    python sweep.py BEFORE list                     what would be timed; needs no GPU

BEFORE: the other checkout. A call quantises its rows and multiplies, but for ways that end in -pre, whose rows were quantised before. It reads
other weights than the call before, and stands in a CUDA graph of as many calls as fill the L2 cache four times over. Ways take turns; medians
of four rounds, us of a call. Each is checked against fp64, and those of as many parts bit by bit.

    before       the other checkout
    now          this one
    last-row     this one, but tiles read the last row in place of those that are not there
    straight     this one, but scales of a row lie side by side
    c64p2 ...    this one, cut into 64 columns and two stretches of the depth
"""
import collections, dataclasses, importlib.util, json, math, os, re, shutil, statistics, sys, tempfile, time
from pathlib import Path
import torch, triton
from dcpbench import kernels
from dcpbench.kernels import block_scaled, linear
from dcpbench.kernels.block_scaled import Scaled
from tools.versions import Version

T0 = time.time()
GPU = torch.cuda.is_available()
D = torch.device("cuda" if GPU else "cpu")
SMS = linear.multiprocessors(D) if GPU else 132
BF16 = torch.bfloat16
ROWS = (8, 64, 128, 32, 16, 1, 48)
HERE, NAMES = Path(linear.__file__).parents[2], ("e4m3", "block_scaled", "linear")

SHAPES = collections.defaultdict(list)  # (columns, depth): names
for tp in (1, 8, 4):
    for name, n, k in (("qkv_a", 2112, 7168), ("q_b", 24576 // tp, 1536), ("o", 7168, 16384 // tp), ("gate-up", 4096 // tp, 7168), ("down", 7168, 2048 // tp),
                       ("dense-gu", 36864 // tp, 7168), ("dense-dn", 7168, 18432 // tp)): SHAPES[n, k].append(f"tp{tp}/{name}")

def changed(name, *pairs):
    """This checkout's modules with pieces of a file replaced."""
    room = Path(tempfile.mkdtemp()) / "dcpbench/kernels"
    room.mkdir(parents=True)
    for module in NAMES: shutil.copy(HERE / "dcpbench/kernels" / f"{module}.py", room)
    source = (room / f"{name}.py").read_text()
    for old, new in pairs:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    (room / f"{name}.py").write_text(source)
    return Version(room.parents[1], kernels, NAMES).modules

MODULES = {
    "now": {name: getattr(kernels, name) for name in NAMES},
    "before": Version(Path(sys.argv[1]), kernels, NAMES).modules,
    "last-row": changed("linear", ("m.to(tl.int64)[:, None] * depth", "tl.minimum(m, rows - 1).to(tl.int64)[:, None] * depth"), ("group * 128, mask=live[:, None], other=0.0)", "group * 128)"),
                        ("(n % columns).to", "tl.minimum(n, columns - 1).to")),
    "straight": changed("block_scaled", ("(1, rows) if rows <= FEW_ROWS else (groups, 1)", "(groups, 1)")),
}

def ways(t, n, k):
    """Whose kernels, how cut, and whether rows are quantised in the call."""
    found = {}
    for name, modules in MODULES.items():
        how = modules["linear"].tiling(t, n, k, SMS)
        found[name] = name, how, True
        if name != "last-row": found[name + "-pre"] = name, how, False
    for how in linear.cuts(t, n, k, SMS):
        if how != found["now"][1]: found[f"c{how.columns}p{how.parts}"] = "now", how, True
    return found

def calls(x, weights, which, how, early):
    quantise, product, kind = MODULES[which]["block_scaled"].quantise_rows, MODULES[which]["linear"].product, MODULES[which]["block_scaled"].Scaled
    weights = [kind(w.data, w.scale, w.block) for w in weights]
    if early: return [lambda w=w: product(quantise(x), w, BF16, how) for w in weights]
    rows = quantise(x)
    return [lambda w=w: product(rows, w, BF16, how) for w in weights]

BUFFER = {}
def drawn(n, k, count):
    """Views of one buffer of numbers that keep the size of what they multiply."""
    if not BUFFER:
        size = max(int(5.2 * torch.cuda.get_device_properties(D).L2_cache_size), 2 * max(n * k for n, k in SHAPES)) + (1 << 28)
        random = torch.Generator(D).manual_seed(0)
        data = torch.empty(size, dtype=torch.float8_e4m3fn, device=D)
        for part in data.split(1 << 26): part.copy_((torch.randn(len(part), generator=random, device=D) * 32).clamp(-448, 448))
        BUFFER.update(data=data, scale=0.5 + torch.rand(1 << 22, generator=random, device=D))
    blocks = -(-n // 128), k // 128
    step = -(-blocks[0] * blocks[1] // 4) * 4
    assert count * n * k <= len(BUFFER["data"]) and count * step <= len(BUFFER["scale"])
    scale = BUFFER["scale"] / (32 * k**0.5)
    return [Scaled(BUFFER["data"][i * n * k:][:n * k].view(n, k), scale[i * step:][:blocks[0] * blocks[1]].view(blocks)) for i in range(count)]

def rows_of(t, k):
    from dcpbench.bench.operators.moe import exact
    return exact(torch.randn(t, k, generator=torch.Generator(D).manual_seed(t), device=D).to(BF16))

def off(y, wanted): return float((y.double() - wanted).norm() / wanted.norm())
def kind(value): return 1 if value == 1 else 16 if value % 16 == 0 else 0
def cases(): return [(t, n, k) for t in ROWS for n, k in SHAPES]
def key(t, n, k, which, how, early): return which, kind(t), kind(n), kind(k // 128), kind(how.parts), how.rows, how.columns, how.stages, early

def compile_part(part, of):
    wanted = {}
    for case in cases():
        for way in ways(*case).values(): wanted.setdefault(key(*case, *way), (case, way))
    data, scale = torch.zeros(max(n * k for n, k in SHAPES), dtype=torch.uint8, device=D).view(torch.float8_e4m3fn), torch.ones(1 << 20, device=D)
    for (t, n, k), way in list(wanted.values())[part::of]:
        weight = Scaled(data[:n * k].view(n, k), scale[:-(-n // 128) * (k // 128)].view(-(-n // 128), k // 128))
        for call in calls(torch.ones(t, k, dtype=BF16, device=D), [weight], *way): call()
    torch.cuda.synchronize()
    print(f"{len(wanted)} kinds, part {part} of {of} after {time.time() - T0:.0f} s", flush=True)

def captured(some, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in some: y = call()
    return graph, y

def times(graphs, counts):
    us = {way: [] for way in graphs}
    for _ in range(4):
        for way, (graph, *_) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record(); graph.replay(); graph.replay(); end.record(); end.synchronize()
            us[way].append(begin.elapsed_time(end) * 1e3 / 2 / counts[way])
    return {way: statistics.median(v) for way, v in us.items()}

def sweep(limit, path):
    from dcpbench.bench.operators import limits
    from dcpbench.bench.operators.calls import cold_sets
    from dcpbench.points.floors import linear_work
    from dcpbench.points.memory import Product
    rate, wrong = max(l.median for l in limits._read(D)), 0
    print(f"{torch.cuda.get_device_name()} {SMS} SMs, reads {rate / 1e12:.2f} TB/s; us of a call", flush=True)
    with open(path, "w") as record:
        for t, n, k in cases():
            if time.time() - T0 > limit: print("out of time at", t, n, k); break
            work = linear_work(Product(k, n), t, itemsize=2, scaled=True)
            count = max(4 if n * k < 1 << 27 else 2, min(64, cold_sets(work.memory_bytes, D)))
            x, weights = rows_of(t, k), drawn(n, k, count)
            wanted = x.double() @ block_scaled.dequantise_weight(weights[-1]).double().T
            graphs, bits, bad = {}, {}, []
            found, pool = ways(t, n, k), torch.cuda.graph_pool_handle()
            for way, (which, how, early) in found.items():
                some = calls(x, weights, which, how, early)
                some[0]()
                graph, y = captured(some, pool)
                y.fill_(torch.nan); graph.replay(); torch.cuda.synchronize()
                if not (off(y, wanted) < 4e-3 and torch.equal(y, bits.setdefault(how.parts, y.clone()))): bad.append(way)
                graphs[way] = graph, y, some  # some: the graph reads what its calls hold, such as rows quantised before
            us = times(graphs, dict.fromkeys(graphs, count))
            line = {"names": SHAPES[n, k], "rows": t, "columns": n, "depth": k, "bytes": work.memory_bytes, "least": work.memory_bytes / rate * 1e6, "us": us,
                    "how": {way: (how.columns, how.parts, how.stages, which, early) for way, (which, how, early) in found.items()}, "wrong": bad}
            wrong += len(bad)
            print(said(line), flush=True)
            record.write(json.dumps(line) + "\n"); record.flush()
            graphs.clear()
    print("wrong:", wrong, f"after {time.time() - T0:.0f} s", flush=True)
    summary(path)
    return wrong

def cuts(line): return {way: line["us"][way] for way in line["us"] if way == "now" or re.fullmatch(r"c\d+p\d+", way)}
def said(line):
    us, how = line["us"], line["how"]
    best = min(cuts(line), key=cuts(line).get)
    cut = lambda way: "c{}p{}s{}".format(*how[way][:3])
    ways = "  ".join(f"{w} {us[w]:.2f}" for w in us if not re.fullmatch(r"c\d+p\d+", w))
    return (f"{line['names'][0]:12} T {line['rows']:3} {line['columns']:5}x{line['depth']:5} least {line['least']:5.2f} = {line['least'] / us['now']:.2f} | before {cut('before')} now {cut('now')} | {ways} | "
            f"best {cut(best)} {us[best]:.2f} ({us['now'] / us[best]:.2f}x)" + (f" WRONG {line['wrong']}" if line["wrong"] else ""))

def summary(path):
    lines = [json.loads(l) for l in open(path)]
    mean = lambda v: math.exp(statistics.fmean(map(math.log, v)))
    print("\ntimes as fast: geometric mean over shapes (least, most)")
    for t in sorted({l["rows"] for l in lines}):
        some = [l["us"] for l in lines if l["rows"] == t]
        out = []
        for a, b in (("before", "now"), ("before-pre", "now-pre"), ("last-row", "now"), ("straight", "now"), ("straight-pre", "now-pre")):
            r = [us[a] / us[b] for us in some]
            out.append(f"{b} over {a} {mean(r):.3f} ({min(r):.3f}, {max(r):.3f})")
        lost = [l["us"]["now"] / min(cuts(l).values()) for l in lines if l["rows"] == t]
        print(f"T {t:3}, {len(some):2} shapes: " + "  ".join(out) + f"  now over the best cut {mean(lost):.4f} (most {max(lost):.3f})")
    print("\nsums: a routed layer's five matrices (qkv_a, q_b, o, gate-up, down), and all seven with a dense layer's; us before -> now, share of the read rate")
    for tp in (1, 4, 8):
        for t in sorted({l["rows"] for l in lines}):
            by = {name.split("/")[1]: l for l in lines for name in l["names"] if l["rows"] == t and (name.startswith(f"tp{tp}/") or name == "tp1/qkv_a")}
            for what in (("qkv_a", "q_b", "o", "gate-up", "down"), ("qkv_a", "q_b", "o", "gate-up", "down", "dense-gu", "dense-dn")):
                if set(what) <= set(by):
                    b, a, least = (sum(f(by[w]) for w in what) for f in (lambda l: l["us"]["before"], lambda l: l["us"]["now"], lambda l: l["least"]))
                    print(f"tp{tp} T {t:3} {len(what)} matrices: {b:6.1f} -> {a:6.1f} ({b / a:.2f}x), {least / b:.2f} -> {least / a:.2f} of reading")
    print("\nwhere now is slower than before, or more than 3 % slower than the best cut")
    for l in lines:
        if l["us"]["now"] > min(1.01 * l["us"]["before"], 1.03 * min(cuts(l).values())): print(said(l))
    print("\nat 80 % of the limit and more:", [(l["names"][0], l["rows"], round(l["least"] / l["us"]["now"], 2)) for l in lines if l["least"] / l["us"]["now"] >= 0.8])

def experts(path):
    """What tokens' scales cost either way, and tiles of experts that ask for no row that is not there."""
    from dcpbench.kernels.block_scaled import Rows
    from dcpbench.kernels.moe import decode, scaled
    room = Path(tempfile.mkdtemp()) / "decode_masked.py"
    source = Path(decode.__file__).read_text()
    old = "x_MK = tl.load(x_at + at, mask=inside, other=0.0)"
    assert source.count(old) == 1
    room.write_text(source.replace(old, "x_MK = tl.load(x_at + at, mask=inside & live[:, None], other=0.0)"))
    spec = importlib.util.spec_from_file_location("dcpbench.kernels.moe.decode_masked", room)
    masked = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(masked)
    local, hidden, inter, top_k = 32, 7168, 2048, 8
    random = torch.Generator(D).manual_seed(0)
    def weight(n, k):
        data = torch.empty(local, n, k, dtype=torch.float8_e4m3fn, device=D)
        for part in data: part.copy_((torch.randn(n, k, generator=random, device=D) * 32).clamp(-448, 448))
        return Scaled(data, (0.5 + torch.rand(local, n // 128, k // 128, generator=random, device=D)) / (32 * k**0.5))
    gate_up, down = weight(2 * inter, hidden), weight(hidden, inter)
    with open(path, "w") as record:
        for t in (8, 1, 32, 64, 128):
            x = torch.randn(t, hidden, generator=random, device=D).to(BF16)
            ids = torch.stack([torch.randperm(local * 8, generator=random, device=D)[:top_k] for _ in range(t)]).int()
            if t == 1: ids[0, 0] = 0
            given = torch.rand(t, top_k, generator=random, device=D), ids, 0, torch.zeros(t, hidden, dtype=BF16, device=D)
            rows = block_scaled.quantise_rows(x)
            lying = {"groups": rows.scale, "rows": rows.scale.contiguous()}
            graphs, first, pool, bad = {}, None, torch.cuda.graph_pool_handle(), []
            for way in ("rows", "groups", "rows-masked", "groups-masked"):
                one = Rows(Scaled(rows.data, lying[way.split("-")[0]], rows.block), BF16)
                scaled.decode = masked if way.endswith("masked") else decode
                call = lambda: scaled.experts(one, gate_up, down, *given)
                call()
                graph, y = captured([call] * 3, pool)
                graph.replay(); torch.cuda.synchronize()
                first = y.clone() if first is None else first
                if not torch.equal(first, y): bad.append(way)
                graphs[way] = graph, y, call, one
            us = times(graphs, dict.fromkeys(graphs, 3))
            print(f"experts, T {t:3}: " + "  ".join(f"{w} {v:.2f}" for w, v in us.items()) + (f" WRONG {bad}" if bad else ""), flush=True)
            record.write(json.dumps({"tokens": t, "us": us, "wrong": bad}) + "\n"); record.flush()
    print(f"after {time.time() - T0:.0f} s")

if __name__ == "__main__":
    what = sys.argv[2]
    if what == "compile": compile_part(int(sys.argv[3]), int(sys.argv[4]))
    elif what == "experts": experts(sys.argv[3])
    elif what == "summary": summary(sys.argv[3])
    elif what == "list":
        for case in cases(): print(*case, {w: ("c{}p{}s{}".format(h.columns, h.parts, h.stages), e) for w, (_, h, e) in ways(*case).items()})
        print(len(cases()), "cases", sum(len(ways(*c)) for c in cases()), "ways", len({key(*c, *w) for c in cases() for w in ways(*c).values()}), "kinds of kernels")
    else: sys.exit(sweep(float(what), sys.argv[3]) > 0)
