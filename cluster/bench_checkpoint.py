"""A random Llama as a Hugging Face folder: the model of the rows ``56m``, small enough that a step's overhead shows.

Owns its shape and its bytes. Invariant: the folder appears whole, by one rename; one that is there is taken as it is, since
equal seeds give equal weights. Weights are bfloat16, so that no reader rounds them differently; text of its tokens means
nothing.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CONFIG_56M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_SEED = 56
_END_TOKENS = ("<|begin|>", "<|end|>")


def random_llama(cache_dir: Path, config: dict[str, Any] | None = None, name: str = "random-56m-v1") -> Path:
    """The folder of that name below ``cache_dir``, written where it is missing; ``config`` is CONFIG_56M without one."""
    folder = cache_dir / name
    if folder.is_dir():
        return folder
    from safetensors.torch import save_file

    shape = config or CONFIG_56M
    scratch = folder.with_name(f".{name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        (scratch / "config.json").write_text(json.dumps(shape, indent=2), "utf-8")
        (scratch / "tokenizer.json").write_text(_tokenizer_json(shape["vocab_size"]), "utf-8")
        save_file(_weights(shape), scratch / "model.safetensors", metadata={"format": "pt"})
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _tokenizer_json(vocab_size: int) -> str:
    """Two ends, every byte, then words of four letters up to the vocabulary's size; no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ("".join(letters) for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    names = itertools.chain(_END_TOKENS, sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    vocab = {token: index for index, token in enumerate(itertools.islice(names, vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _END_TOKENS])
    return tokenizer.to_str()


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Matrices scaled so that activations keep their size; norms of ones."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": ones.clone(),
            at + "self_attn.q_proj.weight": matrix(q, hidden),
            at + "self_attn.k_proj.weight": matrix(kv, hidden),
            at + "self_attn.v_proj.weight": matrix(kv, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, q),
            at + "post_attention_layernorm.weight": ones.clone(),
            at + "mlp.gate_proj.weight": matrix(ffn, hidden),
            at + "mlp.up_proj.weight": matrix(ffn, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, ffn),
        }
    return weights
