"""SmolLM2 from its GGUF file: greedy text equals transformers' on the same file, cold and over cached K/V blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_ranks import ModelRanks
from paged_run import make_batch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from copyhold.models.convert import convert, default_source
from copyhold.models.manifest import ConvertedCheckpoint
from copyhold.models.oneshot import audit_kv
from copyhold.models.tokenizer import ChatTokenizer

NEW_TOKENS = 64
NEAR_TIE_LOGITS = 1e-3
BLOCK = 16
PROMPTS = (
    "What is the capital of France?",
    "Write two sentences about a cat and a dog.",
    "List three primary colours and one use of each.",
    "Explain in simple words why the sky is blue.",
    "Translate 'good morning' into Spanish, Italian and German.",
    "What is 17 + 25? Explain each step.",
    "Give me a short recipe for pancakes with 4 ingredients.",
    "Who wrote Romeo and Juliet, and in which century?",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    return convert(None, tmp_path_factory.mktemp("smollm2"), 1)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' model with transformers' own reading of the file.

    Its one-call loader for GGUF insists on a further package; the reader underneath it does not.
    """
    source = default_source()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    assert isinstance(config, LlamaConfig)
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    absent, unknown = model.load_state_dict(tensors, strict=False)
    assert set(absent) <= {"lm_head.weight"} and not unknown
    model.tie_weights()
    return model.float().eval()


class Run:
    """Eight conversations side by side over one pool: prefill of what is not cached, then batched decode."""

    def __init__(self, ranks: ModelRanks, prompts: list[list[int]]) -> None:
        self.shard = ranks.shards[0]
        self.prompts = prompts
        self.blocks_each = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK)
        self.free = np.random.default_rng(4).permutation(self.shard.pool.num_blocks).astype(np.int32)
        self.prefilled_tokens = 0

    def tables(self) -> np.ndarray:
        """Fresh blocks for every conversation."""
        count = len(self.prompts) * self.blocks_each
        taken, self.free = self.free[:count], self.free[count:]
        return taken.reshape(len(self.prompts), self.blocks_each)

    def generate(self, tables: np.ndarray, cached: list[int]) -> np.ndarray:
        """Greedy tokens `[prompts, NEW_TOKENS]`; the first `cached[s]` rows are in the tables' blocks already."""
        rest = [prompt[done:] for prompt, done in zip(self.prompts, cached, strict=True)]
        self.prefilled_tokens = sum(map(len, rest))
        chosen = [self._step(rest, cached, tables)]
        lengths = [len(prompt) for prompt in self.prompts]
        for step in range(NEW_TOKENS - 1):
            rows = [[int(token)] for token in chosen[-1]]
            chosen.append(self._step(rows, [length + step for length in lengths], tables))
        return np.stack(chosen, axis=1)

    def _step(self, rows: list[list[int]], starts: list[int], tables: np.ndarray) -> np.ndarray:
        return self.shard.greedy(self.shard.forward(make_batch(rows, starts, tables)))


def assert_greedy(oracle: Any, tokenizer: ChatTokenizer, prompt: list[int], chosen: np.ndarray) -> None:
    """Every chosen token is transformers' best after the same tokens, or within a near tie of it, which is printed."""
    tokens = [*prompt, *chosen.tolist()]
    logits = oracle(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).numpy()
    for step in np.flatnonzero(best != chosen):
        gap = float(logits[step].max() - logits[step, int(chosen[step])])
        text = tokenizer.decode(chosen[:step].tolist())
        print(f"near tie of {gap:.2e} at token {step} after {text!r}: {best[step]} or {chosen[step]}")
        assert gap <= NEAR_TIE_LOGITS, f"token {step}: transformers prefers {best[step]} by {gap}"


def test_greedy_text_equals_transformers_cold_and_cached(
    checkpoint: ConvertedCheckpoint, oracle: Any
) -> None:
    tokenizer = ChatTokenizer.load(checkpoint.path)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS]
    ranks = ModelRanks(checkpoint, num_blocks=2 * len(PROMPTS) * 9)
    run = Run(ranks, prompts)
    first = run.tables()
    cold = run.generate(first, [0] * len(prompts))
    assert run.prefilled_tokens == sum(map(len, prompts))
    for prompt, chosen in zip(prompts, cold, strict=True):
        assert_greedy(oracle, tokenizer, prompt, chosen)

    reused = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    second = run.tables()
    for seq, rows in enumerate(reused):
        second[seq, : rows // BLOCK] = first[seq, : rows // BLOCK]
    cached = run.generate(second, reused)
    assert min(reused) >= BLOCK and run.prefilled_tokens == sum(map(len, prompts)) - sum(reused)
    for prompt, chosen, before in zip(prompts, cached, cold, strict=True):
        if not np.array_equal(chosen, before):
            assert_greedy(oracle, tokenizer, prompt, chosen)

    tokens = np.array([*prompts[3], *cached[3]], dtype=np.int32)
    sample = np.array([0, reused[3] - 1, reused[3], len(prompts[3]), len(tokens) - 2])
    assert audit_kv(run.shard, tokens, second[3], sample).max_abs_difference < 1e-3


def test_digits_code_and_many_scripts_encode_as_transformers_does(checkpoint: ConvertedCheckpoint) -> None:
    source: Path = default_source()
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ours = ChatTokenizer.load(checkpoint.path)
    for text in (
        "Year 1984, pi = 3.14159",
        "def f(x):\n\treturn x  # ok",
        "世界 한글 😀 naïve",
        "  two  spaces ",
    ):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "Hello!"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == text
    assert ours.eos_ids == {2} and ours.vocab_size == 49152
