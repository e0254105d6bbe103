"""A random tiny Llama as a Hugging Face folder: grouped heads, whole blocks, small enough for any test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    max_positions: int = 2048,
    tied: bool = True,
    config_overrides: dict[str, Any] | None = None,
) -> Path:
    """Write config, weights, tokenizer and template; equal arguments give equal bytes. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    config |= config_overrides or {}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    )
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """About 300 tokens: three special ones, every byte, and a few merges of common English pairs."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    merges = []
    for pair in (
        "t h",
        "th e",
        "Ġ the",
        "i n",
        "e r",
        "a n",
        "an d",
        "Ġ and",
        "o n",
        "r e",
        "a t",
        "Ġ a",
        "o u",
    ):
        left, right = pair.split(" ")
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    while len(vocab) < 300:
        vocab[f"<|unused_{len(vocab)}|>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = norm()
        weights[at + "self_attn.q_proj.weight"] = linear(q, hidden)
        weights[at + "self_attn.k_proj.weight"] = linear(kv, hidden)
        weights[at + "self_attn.v_proj.weight"] = linear(kv, hidden)
        weights[at + "self_attn.o_proj.weight"] = linear(hidden, q)
        weights[at + "post_attention_layernorm.weight"] = norm()
        weights[at + "mlp.gate_proj.weight"] = linear(ffn, hidden)
        weights[at + "mlp.up_proj.weight"] = linear(ffn, hidden)
        weights[at + "mlp.down_proj.weight"] = linear(hidden, ffn)
    return weights
