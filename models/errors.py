"""Refusals of the models room, one line each that names what is wrong; nothing was loaded or written."""

from __future__ import annotations

from pathlib import Path


class ModelError(Exception):
    """Base of the family."""

    reason = "model_error"


class ModelFileMissing(ModelError):
    """A model's file is not there; the cache folder is unchanged."""

    reason = "model_file_missing"

    def __init__(self, path: Path | str, detail: str = "") -> None:
        self.path = str(path)
        super().__init__(f"model file missing: {path}" + (f" ({detail})" if detail else ""))


class ModelFileInvalid(ModelError):
    """A model's file cannot be read as what it claims to be; the cache folder is unchanged."""

    reason = "model_file_invalid"

    def __init__(self, path: Path | str, detail: str) -> None:
        self.path = str(path)
        super().__init__(f"model file invalid: {path}: {' '.join(detail.split())}")


class UnsupportedModel(ModelError):
    """The model is well formed but not one this runtime computes; the cache folder is unchanged."""

    reason = "unsupported_model"

    def __init__(self, path: Path | str, detail: str) -> None:
        self.path = str(path)
        super().__init__(f"unsupported model: {path}: {detail}")


class ModelPackageMissing(ModelError):
    """No model was named and the package that carries the default one is not installed."""

    reason = "model_package_missing"


class TooManyRanks(ModelError):
    """A tensor-parallel size above the number of KV heads; nothing was partitioned."""

    reason = "too_many_ranks"

    def __init__(self, ranks: int, kv_heads: int) -> None:
        self.ranks = ranks
        self.kv_heads = kv_heads
        super().__init__(f"{ranks} tensor-parallel ranks for a model with {kv_heads} KV heads")


class InvalidRankCount(ModelError):
    """A tensor-parallel size below one; nothing was partitioned."""

    reason = "invalid_rank_count"


class TokenOutOfVocabulary(ModelError):
    """A token id the model has no embedding for; no K/V row was written."""

    reason = "token_out_of_vocabulary"

    def __init__(self, token: int, vocab_size: int) -> None:
        self.token = token
        self.vocab_size = vocab_size
        super().__init__(f"token id {token} is outside the vocabulary of {vocab_size}")


class PositionOutOfRange(ModelError):
    """A row lies beyond the model's context length; no K/V row was written."""

    reason = "position_out_of_range"

    def __init__(self, position: int, max_positions: int) -> None:
        self.position = position
        self.max_positions = max_positions
        super().__init__(f"position {position} is beyond the model's {max_positions} positions")


class NonFiniteLogits(ModelError):
    """A row's best logit is not a number; raised on every rank alike, no token was chosen."""

    reason = "non_finite_logits"


class ChatTemplateError(ModelError):
    """The model has no chat template, or it refused these messages; nothing was encoded."""

    reason = "chat_template_error"


class CollectiveError(ModelError):
    """A peer was lost or did not enter in time; tensors handed in hold unspecified values.

    The generation is over: every surviving rank joins the next one before it computes again.
    """

    reason = "collective_failed"

    def __init__(self, generation: int, detail: str) -> None:
        self.generation = generation
        super().__init__(f"collective generation {generation} failed: {' '.join(detail.split())}")


class SharedMemoryRefused(ModelError):
    """A rank cannot map the others' segment: another host, an untested processor, no right to open it.

    Raised on every rank alike, so that all of them can form a group of another kind at once; nothing is left.
    """

    reason = "shared_memory_refused"


class DeterminismUnavailable(ModelError):
    """This machine's matrix library gives equal rows of one product different bits; nothing is served."""

    reason = "determinism_unavailable"

    def __init__(self, out_features: int, in_features: int, dtype: str) -> None:
        self.shape = (out_features, in_features)
        super().__init__(
            f"a row's place changes its bits in a {dtype} product with [{out_features}, {in_features}]"
        )
