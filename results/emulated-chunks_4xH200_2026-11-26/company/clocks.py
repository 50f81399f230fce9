"""python clocks_patch.py TREE: step times of a few cases alone, with clock and power of each, to $SAID-RANK.jsonl; $BUSY: modes of hold()."""
import sys
p = sys.argv[1] + "/dcpbench/workloads/step_times.py"
s = open(p).read()
old = "    cases = grid(extent)\n"
assert s.count(old) == 1
s = s.replace(old, old + '''    wanted = [(1, 512, 0), (1, 1024, 0), (1, 2048, 0), (1, 4096, 0), (8, 1024, 0), (2, 1024, 4352)]
    cases = [c for c in cases if (not c.decodes and len(c.chunks) == 1 and (c.chunks[0].chunks, c.chunks[0].tokens, c.chunks[0].prefix) in wanted) or (not c.chunks and c.decodes[0].requests in (8, 32, 48))]
''')
old = "        for index, case in enumerate(cases):\n"
assert s.count(old) == 1
s = s.replace(old, '''        import json, os, msgspec, torch.distributed as dist
        rank = dist.get_rank() if dist.is_initialized() else 0
        with open(os.environ["SAID"] + f"-{rank}.jsonl", "w") as f:
            for busy in map(int, os.environ.get("BUSY", "0").split(",")):
                if "BUSY" in os.environ:
                    from dcpbench.kernels.hold import mode
                    mode(engine.device).fill_(busy)
                for case in cases:
                    i = len(sampler.seen["clock"])
                    one = pipeline.run(maker.steps(case))
                    pipeline.drain()
                    f.write(json.dumps({"busy": busy, "case": msgspec.to_builtins(case), "ms": statistics.median(one.samples_ms), "all": one.samples_ms, "clock": sampler.seen["clock"][i:], "power": sampler.seen["power"][i:]}) + "\\n")
                    f.flush()
        if dist.is_initialized(): dist.barrier()
        os._exit(0)
''' + old)
open(p, "w").write(s)
p = sys.argv[1] + "/dcpbench/measuring/gpu_state.py"
s = open(p).read(); s = s.replace("PERIOD_S = 0.05", "PERIOD_S = 0.02"); open(p, "w").write(s)
