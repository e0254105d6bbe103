"""The peer of ``copyhold bench kernels``: vLLM's CPU kernel for paged decode, run by the interpreter of its own environment.

Never imported. Reads the shape from its argument, then one count a line from standard input, and answers each with the least
CPU time in seconds of so many calls, so that the two kernels can take turns. One thread; blocks in shuffled order.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    shape = json.loads(sys.argv[1])
    batch, context, block = shape["batch"], shape["context"], shape["block"]
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["dim"]
    ops, kind = torch.ops._C, torch.float32
    isa = "vec" if block % 32 == 0 else "vec16"
    each = -(-context // block)
    cache = torch.zeros(batch * each, kv_heads, 2 * block, dim, dtype=kind)
    keys, values = cache.chunk(2, dim=2)
    table = torch.randperm(batch * each).view(batch, each).int()
    for at in range(batch):
        rows = torch.randn(2, context, kv_heads, dim)
        positions = torch.arange(context)
        slots = table[at].long()[positions // block] * block + positions % block
        ops.cpu_attn_reshape_and_cache(rows[0], rows[1], keys, values, slots, isa, 1.0, 1.0, "auto")
    q, lens = torch.randn(batch, heads, dim), torch.full((batch,), context, dtype=torch.int32)
    out, starts = torch.empty_like(q), torch.arange(batch + 1, dtype=torch.int32)
    plan = ops.get_scheduler_metadata(
        batch, heads, kv_heads, dim, lens, kind, starts, True, -1, isa, True, None, "auto"
    )

    def decode() -> None:
        ops.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lens, dim**-0.5, True, None, -1, table, 0.0, plan, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip

    decode()
    assert torch.isfinite(out).all()
    print(json.dumps({"isa": isa}), flush=True)
    for line in sys.stdin:
        least = float("inf")
        for _ in range(int(line)):
            started = time.thread_time()
            decode()
            least = min(least, time.thread_time() - started)
        print(json.dumps(least), flush=True)


if __name__ == "__main__":
    main()
