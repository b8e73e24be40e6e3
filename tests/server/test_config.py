"""Settings: one name in three places, strict values, errors that say which."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from server.config import (
    ConfigError,
    EngineConfig,
    ServerConfig,
    Settings,
    parse_settings,
)
from server.flag_hints import ELSEWHERE, unknown_flag
from server.options import OPTIONS, parse_size


def settings(*flags: str, **environment: str) -> Settings:
    return parse_settings(flags, environment)


def test_without_flags_the_defaults_are_those_of_the_dataclasses() -> None:
    assert settings().server == ServerConfig()
    assert settings().engine == EngineConfig()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5g", 1_500_000_000),
        ("64 KiB", 65536),
        ("4096", 4096),
        ("1Ti", 1 << 40),
    ],
)
def test_sizes_mean_what_their_unit_says(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "-1GiB", "0", "2 G B", "1e9", "nan", "2GiB2"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text('max_running = 1\nport = 1001\nhost = "::1"\nprefix_caching = false\n')
    found = settings(
        "--config", str(file), "--max-running", "3", PACELINE_MAX_RUNNING="2", PACELINE_PORT="1002"
    )
    assert found.limits.max_running == 3
    assert found.server.port == 1002
    assert found.server.host == "::1"
    assert found.limits.prefix_caching is False


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "x"], "--port"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--dtype", "int3"], "--dtype"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--max-waiting", "-1"], "--max-waiting"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "ä"], "--api-key"),
        (["--api-key-file", "/nonexistent/keys"], "--api-key-file"),
        (["--config", "/nonexistent/file"], "--config"),
        (["--cors-origin", "chat.example"], "--cors-origin"),
        (["--cors-origin", "https://chat.example/"], "--cors-origin"),
        (["--max-body-bytes", "100"], "--max-body-bytes"),
        (["--max-header-bytes", "0"], "--max-header-bytes"),
        ([""], "MODEL"),
        (["--served-model-name", "\udcff"], "--served-model-name"),
        (["--served-model-name", "x" * 1025], "--served-model-name"),
        (["--host", "\udcff"], "--host"),
        (["--cors-origin", "https://\udcff"], "--cors-origin"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--max-model-len", "10", "--max-input-tokens", "11"], "--max-input-tokens"),
        (["--max-model-len", "10", "--max-output-tokens", "11"], "--max-output-tokens"),
    ],
)
def test_an_error_names_the_flag(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(*flags)


def test_an_unknown_key_of_the_file_fails(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text("max_runing = 1\n")
    with pytest.raises(ConfigError, match="max_runing"):
        settings("--config", str(file))
    file.write_text("port = [1, 2]\n")
    with pytest.raises(ConfigError, match="port"):
        settings("--config", str(file))
    file.write_text("port = \n")
    with pytest.raises(ConfigError, match="--config"):
        settings("--config", str(file))
    file.write_text("port = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested"):
        settings("--config", str(file))


def test_a_variable_may_name_the_file_and_the_flag_wins(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a.toml", tmp_path / "b.toml"
    ours.write_text("port = 1001\n")
    theirs.write_text("port = 1002\n")
    assert settings(PACELINE_CONFIG=str(theirs)).server.port == 1002
    assert settings("--config", str(ours), PACELINE_CONFIG=str(theirs)).server.port == 1001


def test_a_switch_needs_no_value() -> None:
    assert settings("--deterministic").engine.deterministic is True
    assert settings("--no-deterministic").engine.deterministic is False
    assert settings(PACELINE_DETERMINISTIC="true").engine.deterministic is True


def test_brackets_of_an_ipv6_address_are_no_part_of_it() -> None:
    assert settings("--host", "[::1]").server.host == "::1"


def test_an_origin_is_as_browsers_write_it() -> None:
    found = settings("--cors-origin", "HTTPS://Chat.Example:8443", "--cors-origin", "*")
    assert found.server.cors_origins == ("https://chat.example:8443", "*")


def test_a_name_of_another_server_or_a_slip_brings_ours(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text("max-running = 1\n")
    with pytest.raises(ConfigError, match="here it may be max_running"):
        settings("--config", str(file))
    with pytest.raises(ConfigError, match="here it may be PACELINE_MAX_RUNNING"):
        settings(PACELINE_MAX_NUM_SEQS="1")
    assert "--kv-memory" in unknown_flag("--gpu-memory-utilization=0.9")
    assert "--port" in unknown_flag("--prot")
    assert "serve MODEL" in unknown_flag("-m")
    assert "may be" not in unknown_flag("--tensor-parallel-size")
    assert set(ELSEWHERE.values()) <= set(OPTIONS)
    assert not set(ELSEWHERE) & set(OPTIONS) - {"model"}


def test_an_unknown_variable_fails_unless_kubernetes_made_it() -> None:
    with pytest.raises(ConfigError, match="PACELINE_MAX_RUNING"):
        settings(PACELINE_MAX_RUNING="1")
    with pytest.raises(ConfigError, match="PACELINE_PORT"):
        settings(PACELINE_PORT="http")
    found = settings(
        PACELINE_PORT="tcp://10.0.0.1:8000",
        PACELINE_SERVICE_HOST="10.0.0.1",
        PACELINE_SERVICE_PORT_HTTP="8000",
        PACELINE_PORT_8000_TCP_ADDR="10.0.0.1",
    )
    assert found.server.port == 8000


def test_keys_come_from_flags_variables_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two\n")
    found = settings("--api-key", "a", "--api-key", "b", "--api-key-file", str(file))
    assert found.server.api_keys == ("a", "b", "one", "two")
    assert settings(PACELINE_API_KEY="x, y").server.api_keys == ("x", "y")
    file.write_text("# new since May\none\n  #two\n")
    assert settings("--api-key-file", str(file)).server.api_keys == ("one",)
    for text, reason in (
        (b"\n#\n", "no key"),
        (b"one\n\na b\n", "line 3: a key is"),
        (b"one\na+Admin:k\n", r"line 2: a: a mark is .* not \+Admin"),
        (b"\xff\n", "UTF-8"),
    ):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=reason):
            settings("--api-key-file", str(file))


def test_every_setting_has_exactly_one_flag() -> None:
    """A field that no flag sets, or a flag that no field takes, would be dead."""
    names = set(OPTIONS) - {"api_key_file"}
    given = {"api_keys": "api_key", "cors_origins": "cors_origin"}
    found = [
        given.get(field.name, field.name)
        for part in (settings().server, settings().engine, settings().limits)
        for field in fields(part)
    ]
    derived = ["watermark_blocks", "max_step_seconds", "num_tenants", "weights"]
    assert sorted(found) == sorted([*names, *derived])


def test_settings_can_not_change() -> None:
    with pytest.raises(AttributeError):
        settings().server.port = 1  # type: ignore[misc]


def test_steps_are_paced_to_the_limit_of_tpot() -> None:
    assert settings("--tpot-limit-seconds", "0.05").limits.max_step_seconds == 0.05
