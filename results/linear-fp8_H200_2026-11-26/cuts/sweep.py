"""Products of few rows over e4m3 weights: main, its successor step by step, cuts around it, and weights asked for ahead.

    python sweep.py compile I N                compiles the I-th of N parts of all kernels that are needed
    python sweep.py check                      every candidate on odd shapes, against fp64 and bit for bit
    python sweep.py where [OUT.jsonl]          on which multiprocessors programs of a product ran, by %smid
    python sweep.py SECONDS [OUT.jsonl]        times
    python sweep.py summary OUT.jsonl          of a sweep's file; needs no GPU
    python sweep.py list                       what would be timed; needs no GPU

A call quantises its rows and multiplies, but for ways that end in -pre, whose rows were quantised before. It reads other
weights than the call before, and stands in a CUDA graph of as many calls as fill the L2 cache four times over. Ways take
turns; medians of rounds, us of a call.

    main         main's tiling and kernels
    alone        + as many stages as leave no room for more programs than a multiprocessor's share
    alone-next   + the product lets the next kernel begin early also where parts == 1; all ways below have this
    alone-ahead  + each program asks L2 for its first 8 groups of weights before it waits, in pieces of up to 1 KiB a row
    new          the successor's tiling(), nothing ahead
    new-a4 ..24  + that many groups ahead
    new-line8    8 groups ahead by prefetch.global.L2, a line at a time
    new-slide    no wait's shadow, but all of the loop: L2 is asked for 1 KiB a row, 16 groups ahead of the loads
    new-carve    the quantising kernel has the product's split of L1 and shared memory, so that both fit a multiprocessor; -a8: 8 groups ahead, too
    new-turned-pre  scales of the rows lie [groups, rows], so that those of a group are neighbours
    new-t2       the loop takes two groups a round (where every part has an even number of them)
    new-t2-a8    both
    new-w8       8 warps, where columns are 128
    c64p2 ...    columns and parts; w8: 8 warps, two warpgroups with 64 columns each
"""
import collections, ctypes, dataclasses, importlib.util, json, math, os, re, statistics, sys, time
import torch, triton
from dcpbench.kernels import block_scaled, linear
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.kernels.linear import Tiling, spread

T0 = time.time()
GPU = torch.cuda.is_available()
D = torch.device("cuda" if GPU else "cpu")
SMS = linear.multiprocessors(D) if GPU else 132
BF16 = torch.bfloat16
ROWS = (8, 1, 48, 128, 16, 32, 64)

def layers(model, heads):
    for tp in (4, 8, 2, 1):
        if tp == 1: yield tp, "qkv_a", 2112, 7168
        yield tp, "q_b", heads * 192 // tp, 1536
        yield tp, "o", 7168, heads * 128 // tp
        yield tp, "gate-up", 4096 // tp, 7168
        yield tp, "down", 7168, 2048 // tp
        yield tp, "dense-gu", 36864 // tp, 7168
        yield tp, "dense-dn", 7168, 18432 // tp

SHAPES = collections.defaultdict(list)  # (columns, depth): names
for model, heads in (("v3", 128), ("k2", 64)):
    for tp, name, n, k in layers(model, heads): SHAPES[n, k].append(f"{model}/tp{tp}/{name}")

def main_tiling(rows, columns, depth, multiprocessors):
    """tiling() of main, d685acd4."""
    tile = max(16, triton.next_power_of_2(rows))
    groups, wide, narrow = depth // 128, triton.cdiv(columns, 128), triton.cdiv(columns, 64)
    def parts(blocks, twice): return min(max(1, (2 if twice else 1) * multiprocessors // blocks), max(1, groups // 2))
    few, deep = rows <= 8, depth >= 7168
    enough = 8 * wide >= multiprocessors if few else deep and multiprocessors <= 5 * wide < 5 * multiprocessors
    if tile <= 32 and enough:
        twice = tile == 16 and 3 * wide >= multiprocessors and (deep or (few and 2 * depth > 7168))
        return Tiling(rows=tile, columns=128, stages=4 if few or twice else 6, warps=4, parts=parts(wide, twice))
    twice = deep and 3 * narrow >= multiprocessors
    if tile == 64 and twice and narrow <= multiprocessors: return Tiling(rows=tile, columns=128, stages=4, warps=4, parts=4)
    return Tiling(rows=tile, columns=64, stages=6 if tile <= 32 else 4, warps=4, parts=parts(narrow, twice))

def programs(how, n): return triton.cdiv(n, how.columns) * how.parts
def even(how, k): return k // 128 % (2 * how.parts) == 0
def spaced(how, n): return spread(programs(how, n), SMS, (how.rows + how.columns) * 128 * how.together)
def twice(how, n):
    two = dataclasses.replace(how, together=2)
    share = min(3, triton.cdiv(programs(how, n), SMS))
    return dataclasses.replace(two, stages=max(2, (linear.SHARED // (share + 1) - linear.RESERVED) // ((how.rows + how.columns) * 256) + 1))

def hows(rows, n, k):
    """Every way's tiling, how its rows are quantised (early or pre), and whose kernels it has."""
    main, new = main_tiling(rows, n, k, SMS), linear.tiling(rows, n, k, SMS)
    alone, ahead = dataclasses.replace(main, stages=spaced(main, n)), lambda how, g: dataclasses.replace(how, ahead=g)
    found = {"main": (main, "early", "before"), "main-pre": (main, "pre", "before"), "alone": (alone, "early", "before"), "alone-next": (alone, "early", "now"), "alone-ahead": (ahead(alone, 8), "early", "now"),
             "new": (new, "early", "now"), "new-pre": (new, "pre", "now"), "new-a4": (ahead(new, 4), "early", "now"), "new-a8": (ahead(new, 8), "early", "now"), "new-a24": (ahead(new, 24), "early", "now"),
             "new-a8-pre": (ahead(new, 8), "pre", "now"), "new-carve": (new, "carve", "now"), "new-carve-a8": (ahead(new, 8), "carve", "now"), "new-turned-pre": (new, "pre", "turned"), "new-line8": (ahead(new, 8), "early", "lines"), "new-slide": (ahead(new, 8), "early", "slide")}
    if even(new, k): found |= {"new-t2": (twice(new, n), "early", "now"), "new-t2-a8": (ahead(twice(new, n), 8), "early", "now")}
    if new.columns == 128: found["new-w8"] = (dataclasses.replace(new, warps=8), "early", "now")
    for columns in (64, 128):
        blocks = triton.cdiv(n, columns)
        for parts in sorted({1, 2, 3, 4, SMS // blocks, 2 * (SMS // blocks)}):
            if parts == 0 or parts > 1 and (parts > k // 256 or blocks * parts > 4 * SMS): continue
            how = Tiling(rows=new.rows, columns=columns, stages=0, warps=4, parts=parts)
            how = dataclasses.replace(how, stages=spaced(how, n))
            for how in [dataclasses.replace(how, warps=8)] if how.rows == columns == 128 else [how, dataclasses.replace(how, warps=8)] if columns == 128 else [how]:
                if how not in [h for h, q, m in found.values() if (q, m) == ("early", "now")]: found[f"c{columns}p{parts}" + ("w8" if how.warps == 8 else "")] = (how, "early", "now")
    return found

def another(module, change=lambda s: s):
    """A module's source as another module, so that its kernels are loaded, and set, by themselves."""
    name = f"another_{module.__name__.split('.')[-1]}_{len(sys.modules)}"
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"{name}_{os.getpid()}.py")
    with open(path, "w") as f: f.write(change(open(module.__file__).read()))
    spec = importlib.util.spec_from_file_location(name, path)
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made

def changed(*pairs):
    def change(source):
        for old, new in pairs:
            assert source.count(old) == 1, (source.count(old), old)
            source = source.replace(old, new)
        return source
    return change

BEFORE = changed(("        tl.extra.cuda.gdc_launch_dependents()\n        if AHEAD", "        if parts > 1:\n            tl.extra.cuda.gdc_launch_dependents()\n        if AHEAD"))
ASK = open(linear.__file__).read()
ASK = ASK[ASK.index("    THREADS: tl.constexpr"):ASK.index("@triton.jit\ndef _product_kernel")]
LINES = changed((ASK, """    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = weight + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * depth + tl.minimum(tl.arange(0, 8), groups - 1)[None, :] * 128
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


"""))
SLIDE = changed(("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "{ .reg .pred some; setp.ne.b32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"),
    ("        if AHEAD > 0:\n            _ask_ahead(weight + begin * 128, columns, depth, tl.minimum(end - begin, AHEAD), BLOCK_N)\n", ""),
    ("        x_MK = tl.load(x_at + group * 128)\n", "        x_MK = tl.load(x_at + group * 128)\n        wanted = tl.where((group - begin) % 8 == 0, tl.maximum(0, tl.minimum(8, end - group - 16)), 0)\n        _ask_ahead(weight + (group + 16) * 128, columns, depth, wanted, BLOCK_N)\n"))
TURNED = changed(("    x_scale_at = x_scale + row * groups\n", "    x_scale_at = x_scale + m\n"), ("tl.load(x_scale_at + group)", "tl.load(x_scale_at + group * rows, mask=m < rows, other=0.0)"))
MODULES = {"now": linear, "before": another(linear, BEFORE), "lines": another(linear, LINES), "slide": another(linear, SLIDE), "turned": another(linear, TURNED)}

carved = another(block_scaled)
def carve(x):
    """Quantised by a kernel whose multiprocessors keep all of their shared memory."""
    rows = carved.quantise_rows(x)
    if not torch.cuda.is_current_stream_capturing():
        for kernel in carved._rows_kernel.device_caches[torch.cuda.current_device()][0].values():
            if kernel.function not in CARVED:
                error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(kernel.function), 9, 100)  # PREFERRED_SHARED_MEMORY_CARVEOUT
                if error: print("carve-out not set:", error, flush=True)
                CARVED.add(kernel.function)
    return rows
CARVED = set()
def calls(x, weights, how, q, which="now", product=None):
    product = product or MODULES[which].product
    # Of Tiling's many classes, each module has its own; all read the same attributes.
    if q == "pre":
        rows = block_scaled.quantise_rows(x)
        if which == "turned": rows = Scaled(rows.data, rows.scale.T.contiguous(), rows.block)
        return [lambda w=w: product(rows, w, BF16, how) for w in weights]
    quantise = carve if q == "carve" else block_scaled.quantise_rows
    return [lambda w=w: product(quantise(x), w, BF16, how) for w in weights]

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

def truth(x, w): return x.double() @ block_scaled.dequantise_weight(w).double().T
def off(y, wanted): return float((y.double() - wanted).norm() / wanted.norm())

def kind(value): return 1 if value == 1 else 16 if value % 16 == 0 else 0
def key(t, n, k, how, q, m): return kind(t), kind(n), kind(k // 128), kind(how.parts), dataclasses.replace(how, parts=min(2, how.parts)), q, m, kind(t * k // 128), t * k // 128 > block_scaled.MANY

CHECKS = [(t, n, k) for t in (1, 17, 64, 100) for n, k in ((200, 5120), (2112, 1152))]
def cases(): return [(t, n, k) for t in ROWS for n, k in SHAPES]

def compile_part(part, of):
    wanted = {}
    for t, n, k in cases() + CHECKS:
        for how, q, m in hows(t, n, k).values(): wanted.setdefault(key(t, n, k, how, q, m), (t, n, k, how, q, m))
    largest = max(n * k for n, k in SHAPES)
    data, scale = torch.zeros(largest, dtype=torch.uint8, device=D).view(torch.float8_e4m3fn), torch.ones(1 << 20, device=D)
    for t, n, k, how, q, m in list(wanted.values())[part::of]:
        weight = Scaled(data[:n * k].view(n, k), scale[:-(-n // 128) * (k // 128)].view(-(-n // 128), k // 128))
        for call in calls(torch.ones(t, k, dtype=BF16, device=D), [weight], how, q, m): call()
    torch.cuda.synchronize()
    print(f"{len(wanted)} kinds, part {part} of {of} after {time.time() - T0:.0f} s", flush=True)

def check():
    wrong = compared = 0
    for t, n, k in CHECKS:
        x, (w,) = rows_of(t, k), drawn(n, k, 1)
        wanted, first = truth(x, w), {}
        for way, (how, q, m) in hows(t, n, k).items():
            (call,) = calls(x, [w], how, q, m)
            y = call()
            ok = off(y, wanted) < 4e-3 and torch.equal(y, first.setdefault(how.parts, y))
            wrong += not ok; compared += 1
            if not ok: print("WRONG", t, n, k, way, how, q, m, off(y, wanted), "bits differ" if not torch.equal(y, first[how.parts]) else "", flush=True)
    print(f"check: {wrong} of {compared} wrong", flush=True)
    return wrong

def captured(some, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in some: y = call()
    return graph, y

PATCHES = (("    parts,\n    ROWS: tl.constexpr", "    parts,\n    where,\n    ROWS: tl.constexpr"),
           ("    if EARLY:\n        tl.extra.cuda.gdc_launch", "    came = tl.extra.cuda.globaltimer()\n    if EARLY:\n        tl.extra.cuda.gdc_launch"),
           ("    y = tl.zeros([BLOCK_N", "    begun = tl.extra.cuda.globaltimer()\n    y = tl.zeros([BLOCK_N"),
           ("    if WEIGHT_FIRST:\n        y = tl.trans(y)\n", "    me = where + ((part * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)) * 4\n"
            "    tl.store(me, tl.extra.cuda.smid().to(tl.int64))\n    tl.store(me + 1, came)\n    tl.store(me + 2, begun)\n    if WEIGHT_FIRST:\n        y = tl.trans(y)\n"),
           ("    tl.store(to, y.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])\n", "    tl.store(to, y.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])\n    tl.store(me + 3, tl.extra.cuda.globaltimer())\n"),
           ("        how.parts,\n        ROWS=how.rows", "        how.parts,\n        WHERE[0],\n        ROWS=how.rows"))
def patched(source):
    for old, new in PATCHES:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source + "\n\nWHERE = [None]\n"

def where(path):
    record = open(path, "w") if path else None
    noted = another(linear, patched)
    for t, n, k in ((64, 7168, 4096), (32, 7168, 4096), (16, 7168, 4096), (64, 7168, 2048), (32, 7168, 2048), (64, 2112, 7168), (64, 9216, 7168), (64, 24576, 1536)):
        x, weights = rows_of(t, k), drawn(n, k, 6)
        for way, (how, q, m) in hows(t, n, k).items():
            if re.match(r"c\d+p", way) or m != "now": continue
            notes = [torch.zeros(programs(how, n), 4, dtype=torch.int64, device=D) for _ in weights]
            def one(call, note):
                def go():
                    noted.WHERE[0] = note
                    return call()
                return go
            some = [one(c, note) for c, note in zip(calls(x, weights, how, q, product=noted.product), notes)]
            for call in some[:2]: call()
            torch.cuda.synchronize()
            graph, _ = captured(some, None)
            for _ in range(3): graph.replay()
            torch.cuda.synchronize()
            rows = []
            for note in notes[1:]:
                sm, came, begun, ended = note.cpu().T
                on = torch.bincount(torch.bincount(sm, minlength=SMS), minlength=1).tolist()
                rows.append((on, float(came.max() - came.min()) / 1e3, float(begun.min() - came.min()) / 1e3, float(ended.max() - begun.min()) / 1e3))
            last = rows[-1]
            busy = [sum(r[0][1:]) for r in rows]
            print(f"T {t:3} {n:5}x{k:5} {way:15} programs {programs(how, n):3}, stages {how.stages:2}: on {min(busy)}-{max(busy)} multiprocessors; of the last call, multiprocessors with 0, 1, 2, .. programs {last[0]}; "
                  f"came within {last[1]:.1f} us, waited {last[2]:.1f}, took {last[3]:.1f}", flush=True)
            if record: record.write(json.dumps({"rows": t, "columns": n, "depth": k, "way": way, "how": dataclasses.asdict(how), "calls": rows}) + "\n"); record.flush()
            del graph

def sweep(limit, path):
    from dcpbench.bench.operators import limits
    from dcpbench.bench.operators.calls import cold_sets
    from dcpbench.points.floors import linear_work
    from dcpbench.points.memory import Product
    record = open(path, "w") if path else None
    rate = max(l.median for l in limits._read(D))
    print(f"{torch.cuda.get_device_name()} {SMS} SMs, reads {rate / 1e12:.2f} TB/s; us of a call", flush=True)
    wrong = 0
    for t, n, k in cases():
        if time.time() - T0 > limit: print("out of time at", t, n, k); break
        work = linear_work(Product(k, n), t, itemsize=2, scaled=True)
        count = max(4 if n * k < 1 << 27 else 2, min(64, cold_sets(work.memory_bytes, D)))
        x, weights = rows_of(t, k), drawn(n, k, count)
        wanted = truth(x, weights[-1])
        graphs, bits, bad = {}, {}, []
        ways, pool = hows(t, n, k), torch.cuda.graph_pool_handle()
        for way, (how, q, m) in ways.items():
            some = calls(x, weights, how, q, m)
            some[0]()
            graph, y = captured(some, pool)
            y.fill_(torch.nan); graph.replay(); torch.cuda.synchronize()
            if not (off(y, wanted) < 4e-3 and torch.equal(y, bits.setdefault((how.parts, how.together), y.clone()))): bad.append(way)
            graphs[way] = graph, y, some  # some: the graph reads what its calls hold, such as rows quantised before
        some = [lambda: block_scaled.quantise_rows(x)] * 20
        graphs["quantise"] = *captured(some, pool), some
        us = {way: [] for way in graphs}
        for _ in range(4):
            for way, (graph, *_) in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                begin.record(); graph.replay(); graph.replay(); end.record(); end.synchronize()
                us[way].append(begin.elapsed_time(end) * 1e3 / 2 / (20 if way.startswith("quantise") else count))
        us = {way: statistics.median(v) for way, v in us.items()}
        line = {"names": SHAPES[n, k], "rows": t, "columns": n, "depth": k, "bytes": work.memory_bytes, "least": work.memory_bytes / rate * 1e6, "us": us,
                "how": {way: (how.columns, how.parts, how.stages, programs(how, n), q, m, how.warps, how.together, how.ahead) for way, (how, q, m) in ways.items()}, "wrong": bad}
        wrong += len(bad)
        print(said(line), flush=True)
        if record: record.write(json.dumps(line) + "\n"); record.flush()
        graphs.clear()
    print("wrong:", wrong, f"after {time.time() - T0:.0f} s", flush=True)
    if path: record.close(); summary(path)
    return wrong

def cuts(line): return {way: line["us"][way] for way, h in line["how"].items() if h[4:6] in (["early", "now"], ("early", "now")) and h[7:9] in ([1, 0], (1, 0))}
def said(line):
    us, how = line["us"], line["how"]
    best = min(cuts(line), key=cuts(line).get)
    cut = lambda way: "c{}p{}s{}".format(*how[way][:3]) + ("w8" if how[way][6] == 8 else "")
    ways = "  ".join(f"{w} {us[w]:.2f}" for w in us if not re.match(r"c\d+p", w))
    return (f"{line['names'][0]:17} T {line['rows']:3} {line['columns']:5}x{line['depth']:5} least {line['least']:5.2f} | main {cut('main')} new {cut('new')} {how['new'][3]} programs | {ways} | best {cut(best)} {us[best]:.2f} ({us['main'] / us[best]:.2f}x main, {us['new'] / us[best]:.2f}x new)"
            + (f" WRONG {line['wrong']}" if line["wrong"] else ""))

def summary(path):
    lines = [json.loads(l) for l in open(path)]
    mean = lambda v: math.exp(statistics.fmean(map(math.log, v)))
    print("\ntimes as fast as main, geometric means over shapes (slowest); -pre over main-pre; sum: us of main's over its, of all shapes that have it")
    every = ["alone", "alone-next", "alone-ahead", "new", "new-a4", "new-a8", "new-a24", "new-line8", "new-slide", "new-carve", "new-carve-a8", "new-t2", "new-t2-a8", "new-w8", "new-pre", "new-a8-pre", "new-turned-pre"]
    for t in sorted({l["rows"] for l in lines}):
        out = []
        for way in every:
            pairs = [(l["us"]["main-pre" if "-pre" in way else "main"], l["us"][way]) for l in lines if l["rows"] == t and way in l["us"]]
            if pairs: out.append(f"{way} {mean(a / b for a, b in pairs):.3f} ({min(a / b for a, b in pairs):.2f}; sum {sum(a for a, _ in pairs) / sum(b for _, b in pairs):.3f})")
        best = [l["us"]["main"] / min(cuts(l).values()) for l in lines if l["rows"] == t]
        print(f"T {t:3}: " + "  ".join(out) + f"  best cut {mean(best):.3f}")
    print("\nover new, where both are: geometric mean (least, most)")
    for way in every:
        ratios = [l["us"]["new-pre" if "-pre" in way else "new"] / l["us"][way] for l in lines if way in l["us"]]
        if ratios: print(f"{way:12} {mean(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) in {len(ratios)}")
    print("\nwhere new is slower than main, or more than 4 % slower than the best cut")
    for l in lines:
        best = min(cuts(l).values())
        if l["us"]["new"] > min(1.01 * l["us"]["main"], 1.04 * best): print(said(l))

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "compile": compile_part(int(sys.argv[2]), int(sys.argv[3]))
    elif what == "check": sys.exit(check() > 0)
    elif what == "where": where(sys.argv[2] if len(sys.argv) > 2 else None)
    elif what == "summary": summary(sys.argv[2])
    elif what == "list":
        for t, n, k in cases(): print(t, n, k, {w: ("c{}p{}s{}w{}".format(h.columns, h.parts, h.stages, h.warps), q, m) for w, (h, q, m) in hows(t, n, k).items()})
        print(len(cases()), "cases", sum(len(hows(*c)) for c in cases()), "ways", len({key(t, n, k, h, q, m) for t, n, k in cases() for h, q, m in hows(t, n, k).values()}), "kinds of kernels")
    else: sys.exit(sweep(float(what), sys.argv[2] if len(sys.argv) > 2 else None) > 0)
