# ruff: noqa: ARG001, BLE001, C901, FURB171, PLR0911, PLR0912, PLR0915, RUF059, S110, SIM103, SIM105
# A generator of streams, kept as it was written.
"""Serve OpenAI's API on loopback with one quirk per path prefix, and record what was sent when."""

import asyncio
import json
import sys
import time

TRUTH = {}
COUNT = {}
GAP, FIRST = 0.010, 0.050
NOIDS = (
    "no_ids",
    "hidden",
    "usage_wrong",
    "usage_zero",
    "delta_usage",
    "usage_first0",
    "mtp_text",
    "tools",
    "role_first",
    "empty_delta",
    "usage_final_total",
    "split_usage",
    "each_usage_noids",
    "tok_late",
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def read_request(r):
    head = await r.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    h = {l.split(":", 1)[0].lower(): l.split(":", 1)[1].strip() for l in lines[1:] if ":" in l}
    body = await r.readexactly(int(h.get("content-length", "0") or 0))
    return method, path, h, body


async def plain(w, status, obj, extra=b"", close=False, ctype=b"application/json"):
    body = obj if isinstance(obj, bytes) else json.dumps(obj).encode()
    w.write(
        b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n" % (status, ctype, len(body), extra) + body
    )
    await w.drain()


def evt(obj, mode, final=False):
    s = obj if isinstance(obj, str) else json.dumps(obj, ensure_ascii=(mode != "utf8"), separators=(",", ":"))
    b = s.encode("utf-8")
    if mode == "nospace":
        return b"data:" + b + b"\n\n"
    if mode == "crlf":
        return b"data: " + b + b"\r\n\r\n"
    if mode == "cr":
        return b"data: " + b + b"\r\r"
    if mode == "single_nl":
        return b"data: " + b + b"\n"
    if mode == "event_id":
        return b"id: 1\nevent: message\ndata: " + b + b"\nretry: 10\n\n"
    return b"data: " + b + b"\n\n"


async def handle(r, w):
    try:
        while True:
            try:
                method, path, h, body = await read_request(r)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            t0 = time.time()
            parts = path.strip("/").split("/")
            mode, rest = parts[0], "/" + "/".join(parts[1:])
            if rest == "/_truth":
                await plain(w, 200, TRUTH.get(mode, []))
                continue
            if rest == "/_reset":
                TRUTH.pop(mode, None)
                COUNT.pop(mode, None)
                await plain(w, 200, {})
                continue
            if rest == "/health":
                await plain(w, 200, {})
                continue
            if rest == "/v1/models":
                if mode == "nomodels":
                    await plain(w, 404, {"error": "no"})
                    continue
                await plain(w, 200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
                continue
            if method == "GET":
                await plain(w, 404, {"error": {"message": "Not Found"}})
                continue
            q = json.loads(body)
            if not await answer(r, w, mode, rest, q, t0):
                break
    except (ConnectionError, asyncio.CancelledError):
        pass
    finally:
        try:
            w.close()
        except Exception:
            pass


async def answer(r, w, mode, rest, q, t0):
    chat = rest.endswith("/chat/completions")
    n = COUNT[mode] = COUNT.get(mode, 0) + 1
    measured = (q.get("max_tokens") or q.get("max_completion_tokens") or 0) > 16
    rec = {
        "t0": t0,
        "sent": [],
        "tokens": [],
        "ok": True,
        "body": {k: (v if k not in ("prompt", "messages") else None) for k, v in q.items()},
    }
    if mode == "keep":
        rec["prompt"] = q.get("prompt") or q.get("messages")
    if measured or mode == "keep":
        TRUTH.setdefault(mode, []).append(rec)
    k = sum(1 for _ in TRUTH.get(mode, []))
    so = q.get("stream_options") or {}
    want_usage = so.get("include_usage")
    each = so.get("continuous_usage_stats")
    ids_ok = q.get("return_token_ids")
    # what a mode does not take
    strict = {
        "no_extras": ("return_token_ids", "ignore_eos", "stream_options"),
        "no_ids": ("return_token_ids",),
        "no_usage": ("stream_options", "return_token_ids"),
        "no_usage_noids": ("stream_options", "return_token_ids"),
    }.get(mode, ())
    bad = [f for f in strict if f in q]
    if bad:
        await plain(
            w,
            400,
            {
                "error": {
                    "message": f"Unrecognized request argument supplied: {bad[0]}",
                    "type": "invalid_request_error",
                }
            },
        )
        return True
    if mode == "strict500" and any(f in q for f in ("return_token_ids", "ignore_eos")):
        await plain(w, 500, {"error": {"message": "Internal Server Error: unexpected keyword"}})
        return True
    if mode == "max_completion" and "max_tokens" in q:
        await plain(
            w,
            400,
            {
                "error": {
                    "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
                }
            },
        )
        return True
    if mode == "chatonly" and not chat:
        await plain(w, 404, {"error": {"message": "Not Found"}})
        return True
    p = q.get("prompt")
    plen = len(p) if isinstance(p, list) else len((p or json.dumps(q.get("messages"))).split())
    if mode in (
        "text_only",
        "no_usage_noids",
        "hidden",
        "tools",
        "usage_zero",
        "abort",
        "delta_usage",
        "usage_first0",
        "mtp_text",
        "surrogate",
        "toollong",
        "tgi500",
    ) and isinstance(p, list):
        await plain(w, 500 if mode == "tgi500" else 400, {"error": {"message": "prompt must be a string"}})
        return True
    if not q.get("stream"):
        await plain(
            w,
            200,
            {
                "id": "x",
                "object": "text_completion",
                "choices": [
                    {
                        "index": 0,
                        "text": " a",
                        "message": {"role": "assistant", "content": "a"},
                        "finish_reason": "length",
                    }
                ],
                "usage": {"prompt_tokens": plen, "completion_tokens": 1, "total_tokens": plen + 1},
            },
        )
        return True
    if mode == "first503" and n <= 2:
        await plain(w, 503, {"error": {"message": "model is loading"}}, b"Retry-After: 1\r\n")
        return True
    if mode in ("busy429", "busy503") and measured and k % 3 == 0:
        rec["ok"] = False
        await plain(w, 429 if mode == "busy429" else 503, {"error": {"message": "overloaded"}}, b"Retry-After: 1\r\n")
        return True
    if mode == "drop" and measured and k % 3 == 0:
        rec["ok"] = False
        w.close()
        return False
    if mode == "rst" and measured and k % 3 == 0:
        rec["ok"] = False
        await asyncio.sleep(0.2)
        w.transport.abort()
        return False
    max_tokens = q.get("max_tokens") or q.get("max_completion_tokens") or 16
    out = max_tokens
    per = 1
    if mode in ("mtp", "mtp_text"):
        per = 4
    if mode == "early":
        out = max(max_tokens // 2, 1)
    if mode == "slowhead":
        await asyncio.sleep(0.3)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    chunked = True
    if mode == "http10":
        head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n"
        chunked = False
    if mode == "close":
        head += b"Connection: close\r\n"
    if mode == "gzip":
        head += b"Content-Encoding: gzip\r\n"
    if mode == "ctype_plain":
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    if mode == "ctype_ndjson":
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n"
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n"
    w.write(head + b"\r\n")
    await w.drain()
    z = None
    if mode == "gzip":
        import zlib

        z = zlib.compressobj(wbits=31)

    async def put(b, split=False):
        if z:
            b = z.compress(b) + z.flush(2)
        if split and len(b) > 20:
            a = len(b) * 2 // 3
            for piece in (b[:a], b[a:]):
                w.write(chunk(piece) if chunked else piece)
                await w.drain()
                await asyncio.sleep(0.001)
            return
        w.write(chunk(b) if chunked else b)
        await w.drain()

    def base():
        return {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "m"}

    def choice(text, ids=None, fr=None, field="content"):
        c = {"index": 0, "finish_reason": fr}
        if chat:
            c["delta"] = {field: text}
        else:
            c["text"] = text
        if ids is not None and ids_ok and mode not in NOIDS:
            c["token_ids"] = ids
        return c

    if mode == "pings":
        await put(b": ping\n\n")
    if chat or mode == "role_first":
        d = base()
        d["choices"] = [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            if chat
            else {"index": 0, "text": "", "finish_reason": None}
        ]
        if mode == "promptids":
            pass
        await put(evt(d, mode))
    if mode == "empty_choices_first":
        d = base()
        d["choices"] = []
        d["prompt_filter_results"] = [{"prompt_index": 0}]
        await put(evt(d, mode))
    if mode == "usage_first0":
        pass
    if mode == "hidden":  # reasons first, and shows nothing of it
        await asyncio.sleep(0.5)
    await asyncio.sleep(FIRST)
    done = 0
    while done < out:
        m = min(per if done else 1, out - done) if mode != "mtp_fixed" else min(4, out - done)
        done += m
        last = done >= out
        d = base()
        text = " tok" * m
        if mode == "utf8":
            text = " 日本語🙂"
        field = "content"
        if mode == "reasoning":
            field = "reasoning_content" if done <= out // 2 else "content"
        if mode == "reasoning2":
            field = "reasoning" if done <= out // 2 else "content"
        c = choice(text, list(range(100, 100 + m)), ("length" if last else None), field)
        if mode == "tools" and chat:
            c["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": " tok"}}]}
        if mode == "content_parts" and chat:
            c["delta"] = {"content": [{"type": "text", "text": text}]}
        if mode == "delta_null" and chat and last:
            c["delta"] = None
        if mode == "surrogate":
            d["choices"] = [c]
        d["choices"] = [c]
        if each and mode not in (
            "usage_zero",
            "delta_usage",
            "usage_first0",
            "hidden",
            "usage_wrong",
            "usage_final_total",
            "mtp_text",
            "tools",
        ):
            d["usage"] = {"prompt_tokens": plen, "completion_tokens": done, "total_tokens": plen + done}
        if mode == "usage_null":
            d["usage"] = None
        if mode == "usage_zero":
            d["usage"] = {"prompt_tokens": plen, "completion_tokens": 0 if not last else done, "total_tokens": plen}
        if mode == "delta_usage":
            d["usage"] = {"prompt_tokens": plen, "completion_tokens": m, "total_tokens": plen + m}
        if mode == "usage_final_total":
            d["usage"] = {"prompt_tokens": plen, "completion_tokens": out, "total_tokens": plen + out}
        if mode == "usage_first0" and done == 1:
            d["usage"] = {"prompt_tokens": plen, "completion_tokens": 0, "total_tokens": plen}
        if mode == "promptids" and done == m and isinstance(p, list) and ids_ok:
            c["prompt_token_ids"] = p
        if mode == "abort" and measured and k % 3 == 0 and done >= out // 3:
            c["finish_reason"] = "abort"
            rec["ok"] = False
            await put(evt(d, mode))
            rec["sent"].append(time.time())
            rec["tokens"].append(m)
            break
        if mode == "miderror" and measured and k % 3 == 0 and done >= out // 3:
            rec["ok"] = False
            await put(evt({"error": {"message": "CUDA error: an illegal memory access", "code": 500}}, mode))
            await put(evt("[DONE]", mode))
            break
        if mode == "sglangerr" and measured and k % 3 == 0 and done >= out // 3:
            rec["ok"] = False
            await put(evt({"object": "error", "message": "boom", "code": 500}, mode))
            break
        if mode == "midreset" and measured and k % 3 == 0 and done >= out // 3:
            rec["ok"] = False
            w.transport.abort()
            return False
        if mode == "midfin" and measured and k % 3 == 0 and done >= out // 3:
            rec["ok"] = False
            w.write(b"0\r\n\r\n")
            await w.drain()
            return True
        if mode == "empty_delta" and done % 3 == 0:
            c["text" if not chat else "delta"] = "" if not chat else {"content": ""}
        s = evt(d, mode)
        if mode == "surrogate":
            s = s.replace(b" tok", b"\\ud83d")
        rec["sent"].append(time.time())
        rec["tokens"].append(m)
        await put(s, split=(mode in ("split", "utf8")))
        if mode == "pings":
            await put(b": keep-alive\n\n")
        if not last:
            await asyncio.sleep(GAP)
    if mode == "usage_wrong":
        want_usage = True
    if mode == "finish_late":
        d = base()
        d["choices"] = [choice("", None, "length")]
        await put(evt(d, mode))
    if (
        want_usage
        and (not each or mode in ("hidden", "usage_wrong", "mtp_text", "tools", "usage_first0"))
        and mode not in ("no_usage",)
        and mode != "abort"
    ):
        d = base()
        d["choices"] = []
        tot = sum(rec["tokens"])
        if mode == "hidden":
            tot += 500
        if mode == "usage_wrong":
            tot = tot * 2
        d["usage"] = {"prompt_tokens": plen, "completion_tokens": tot, "total_tokens": plen + tot}
        if mode == "hidden":
            d["usage"]["completion_tokens_details"] = {"reasoning_tokens": 500}
        if mode == "usage_nochoices":
            d.pop("choices")
        await put(evt(d, mode))
    if mode not in ("nodone", "abort2"):
        await put(evt("[DONE]", mode))
    rec["end"] = time.time()
    if chunked:
        w.write(b"0\r\n\r\n")
        await w.drain()
    if mode in ("http10", "close"):
        return False
    return True


async def main(port):
    s = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 26)
    async with s:
        await s.serve_forever()


asyncio.run(main(int(sys.argv[1])))
