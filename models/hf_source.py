"""Owns the reading of a Hugging Face folder: config.json, safetensors (one file or an index), tokenizer,
template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .config import checked, config_from_hf, token_ids
from .errors import ModelFileInvalid
from .source import TokenizerSpec, required, tensor_shapes

_INDEX = "model.safetensors.index.json"
_OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")


class HuggingFaceSource:
    """An opened folder.

    Raises: `ModelFileMissing`, `ModelFileInvalid`, `UnsupportedModel`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = source_files(folder)
        config = config_from_hf(read_json(folder / "config.json"), folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file():
            ends = set(config.eos_token_ids) | set(token_ids(read_json(generation).get("eos_token_id")))
            config = msgspec.structs.replace(config, eos_token_ids=tuple(sorted(ends)))
        self.config = checked(config, folder / "config.json")
        self._shapes = tensor_shapes(self.config)
        self._where = self._locate()

    def tokenizer(self) -> TokenizerSpec:
        """Tokenizer file as it is; the template from its own file or from the tokenizer's configuration."""
        path = self._folder / "tokenizer.json"
        text = _read_text(path)
        extra_path = self._folder / "tokenizer_config.json"
        extra = read_json(extra_path) if extra_path.is_file() else {}
        template = extra.get("chat_template")
        if isinstance(template, list):
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        own = self._folder / "chat_template.jinja"
        if own.is_file():
            template = _read_text(own)
        if template is not None and not isinstance(template, str):
            raise ModelFileInvalid(extra_path, "chat_template is not text")
        return TokenizerSpec(text, template, _token_text(extra, "bos_token"), _token_text(extra, "eos_token"))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, widened to float32."""
        import torch
        from safetensors import SafetensorError, safe_open

        path = self._where[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileInvalid(path, f"tensor {name}: {error}") from error
        if tuple(tensor.shape) != self._shapes[name] or not tensor.dtype.is_floating_point:
            raise ModelFileInvalid(path, f"tensor {name} is {tuple(tensor.shape)} {tensor.dtype}")
        return tensor.to(torch.float32).numpy()

    def _locate(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        where: dict[str, Path] = {}
        for path in self.files:
            if path.suffix != ".safetensors":
                continue
            try:
                with safe_open(path, framework="np") as file:
                    where.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise ModelFileInvalid(path, str(error)) from error
        absent = [name for name in self._shapes if name not in where]
        if absent:
            index = self._folder / _INDEX
            named = index if index.is_file() else self._folder / "model.safetensors"
            raise ModelFileInvalid(named, f"no tensor {absent[0]} ({len(absent)} absent)")
        return where


def source_files(folder: Path) -> tuple[Path, ...]:
    """Every file of the folder that conversion reads, sorted; they define the source's digest.

    Raises: `ModelFileMissing`, `ModelFileInvalid`.
    """
    files = {required(folder, "config.json"), required(folder, "tokenizer.json")}
    files |= {folder / name for name in _OPTIONAL if (folder / name).is_file()}
    index = folder / _INDEX
    if not index.is_file():
        return tuple(sorted(files | {required(folder, "model.safetensors")}))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileInvalid(index, "no weight_map")
    for name in set(weight_map.values()):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileInvalid(index, f"weight_map names {name!r}, not a safetensors file of this folder")
        files.add(required(folder, name))
    return tuple(sorted(files | {index}))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises: `ModelFileInvalid`.
    """
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelFileInvalid(path, str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileInvalid(path, "not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileInvalid(path, str(error)) from error


def _token_text(extra: dict[str, Any], field: str) -> str | None:
    value = extra.get(field)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
