"""Configuration: every key has a name, a type, bounds and a unit, and a wrong one is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from copyhold.cluster.config import FIELDS, Config, load_config
from copyhold.cluster.errors import ConfigError


def test_the_default_needs_no_file() -> None:
    config = load_config()
    assert (config.host, config.port, config.tp) == ("127.0.0.1", 8000, 2)
    assert config.num_blocks * config.block_size == config.pool_tokens == 8192


def test_every_field_is_documented_with_unit_and_bounds() -> None:
    assert list(FIELDS) == [field.name for field in msgspec.structs.fields(Config)]
    for spec in FIELDS.values():
        assert spec.doc.endswith("."), spec.name
        if spec.kind not in (str, bool):
            assert spec.least is not None and spec.most is not None, spec.name
            assert spec.unit or spec.name == "port", spec.name
            assert isinstance(spec.default, int | float)
            assert spec.least <= spec.default <= spec.most, spec.name


def test_options_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "copyhold.toml"
    file.write_text('tp = 1\nport = 9000\nlease_s = 3\nmodel = "m"\n')
    config = load_config(file, {"port": 9001, "host": None}, {"tp": 4, "state_dir": ""})
    assert (config.tp, config.port, config.state_dir, config.host) == (1, 9001, "", "127.0.0.1")
    assert config.lease_s == 3.0 and isinstance(config.lease_s, float)


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"tpp": 1}, "tpp", "did you mean 'tp'"),
        ({"pool_token": 1}, "pool_token", "did you mean 'pool_tokens'"),
        ({"zzz": 1}, "zzz", "unknown key 'zzz'"),
        ({"tp": 9}, "tp", "tp = 9 is out of range: 1 to 8 ranks"),
        ({"tp": 0}, "tp", "out of range"),
        ({"tp": "2"}, "tp", "must be a whole number"),
        ({"tp": 2.0}, "tp", "must be a whole number"),
        ({"tp": True}, "tp", "must be a whole number"),
        ({"lease_s": False}, "lease_s", "must be a number"),
        ({"lease_s": float("nan")}, "lease_s", "out of range"),
        ({"port": 65536}, "port", "0 to 65535"),
        ({"host": 1}, "host", "must be text"),
        ({"host": "a\nb"}, "host", "control character"),
        ({"dtype": "float16"}, "dtype", "'float16' is not one of float32, bfloat16"),
        ({"kv_dtype": "int8"}, "kv_dtype", "'int8' is not one of auto, float32, bfloat16, float16"),
        ({"kernel_backend": "cuda"}, "kernel_backend", "'cuda' is not one of auto, triton, cpu, reference"),
        ({"collective": "nccl"}, "collective", "'nccl' is not one of auto, shm, gloo"),
        ({"shared_prefix": "on"}, "shared_prefix", "'on' is not one of auto, off, hydragen, chunk"),
        ({"block_size": 24}, "block_size", "multiple of 16"),
        ({"pool_tokens": 8200}, "pool_tokens", "multiple of block_size"),
        ({"max_model_len": 9000}, "max_model_len", "exceeds the pool"),
        ({"max_requests": 600}, "step_budget_tokens", "below max_requests"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, object], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        load_config(None, values)
    assert refused.value.key == key
    assert refused.value.exit_code == 2


def test_a_config_cannot_be_made_wrong_by_any_way() -> None:
    with pytest.raises(ConfigError):
        Config(tp=99)
    with pytest.raises(ConfigError):
        msgspec.structs.replace(Config(), port=-1)
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        msgspec.json.decode(b'{"tp": 99}', type=Config)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("tp = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(broken)
    broken.write_text("[server]\ntp = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'server'"):
        load_config(broken)


def test_the_configuration_survives_the_way_to_the_driver() -> None:
    config = Config(tp=3, lease_s=2.5, model="/x")
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
