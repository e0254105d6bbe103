"""The peer of the rows ``56m`` of ``copyhold bench serve``: vLLM's CPU wheel in eager mode, asked over pipes, one measure a line.

Run by the interpreter of its own environment (``make bench-peers``), never imported:
``vllm_serve.py MODEL_DIR THREADS``. Each line of standard input is one measure, each line of standard output its
answer. The engine steps in this process, without a server, another process, a tokenizer or text around it, which favours vLLM;
the clock starts when a request is added. Invariant: a prompt that is to be reused is, to the token, or the answer is an error.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
import time
from typing import Any

MODEL, THREADS = sys.argv[1], sys.argv[2]
os.environ |= {
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    """One engine, stepped here."""

    def __init__(self) -> None:
        import torch
        from vllm import LLM, SamplingParams

        torch.set_num_threads(int(THREADS))
        self._params = SamplingParams
        self._engine: Any = LLM(
            model=MODEL,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=16,
            enable_prefix_caching=True,
            block_size=32,
            seed=0,
        ).llm_engine
        torch.set_num_threads(int(THREADS))
        self._sent = 0

    def measure(self, prompts: list[list[int]], new_tokens: int, cached: int | None) -> dict[str, float]:
        """Send all at once; seconds to the earliest first token, and from it to the end of the last.

        `cached`: tokens that every prompt must find; None does not ask.
        """
        params = self._params(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        for prompt in prompts:
            self._sent += 1
            self._engine.add_request(str(self._sent), {"prompt_token_ids": prompt}, params)
        first, tokens, found = 0.0, 0, []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first = first or time.perf_counter() - began
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    found.append(output.num_cached_tokens)
        ended = time.perf_counter() - began
        if tokens != len(prompts) * new_tokens:
            raise RuntimeError(f"{tokens} tokens came of {len(prompts)} x {new_tokens}")
        if cached is not None and any(count != cached for count in found):
            raise RuntimeError(f"{found} tokens were reused, {cached} expected")
        return {"first_s": first, "decode_s": ended - first}


def main() -> None:
    """Answer until standard input ends. vLLM writes to standard output too: the answers keep it for themselves."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(peer.measure(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
