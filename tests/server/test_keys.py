"""Keys as people write them: names, marks, weights, and the policy that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import ConfigError, parse_settings
from server.keys import digest_of, parse_entry, tenants
from server.wire import Plan


@pytest.mark.parametrize(
    ("entry", "tenant", "key", "is_admin", "weight"),
    [
        ("team:sk", "team", "sk", False, None),
        ("team+weight=3:sk", "team", "sk", False, 3.0),
        ("team+weight=0.5:s:k", "team", "s:k", False, 0.5),
        ("ops+admin+weight=2:sk", "ops", "sk", True, 2.0),
        ("ops+weight=2+admin:sk", "ops", "sk", True, 2.0),
    ],
)
def test_marks_stand_between_name_and_key(
    entry: str, tenant: str, key: str, is_admin: bool, weight: float | None
) -> None:
    found = parse_entry(entry)
    assert (found.tenant, found.is_admin, found.weight) == (tenant, is_admin, weight)
    assert found.digest == digest_of(key.encode())


@pytest.mark.parametrize(
    "weight", ["", "0", "-1", "nan", "inf", "1e9", "3x", "\u0661", "0.001", "1001"]
)
def test_weight_that_is_none_is_refused(weight: str) -> None:
    with pytest.raises(ValueError, match="weight"):
        parse_entry(f"team+weight={weight}:sk")


@pytest.mark.parametrize("marks", ["+weight=1+weight=2", "+admin+admin", "+weight=1+weight=1"])
def test_mark_that_is_given_twice_is_refused(marks: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_entry(f"team{marks}:sk")


def test_keys_of_one_tenant_have_one_weight() -> None:
    assert tenants(["a:1", "a+weight=2:2", "a:3", "b:4", "5"]).items() >= {("a", 2.0), ("b", 1.0)}
    assert len(tenants(["a:1", "a:2", "5", "6"])) == 3
    with pytest.raises(ValueError, match="two weights, 2 and 3"):
        tenants(["a+weight=2:1", "a+weight=3:2"])


@pytest.mark.parametrize("other", ["b:1", "a+admin:1", "1"])
def test_one_key_is_not_two(other: str) -> None:
    """Whose it is would depend on the order of the lines."""
    assert tenants(["a:1", "a:1", "a+weight=2:1"]) == {"a": 2.0}
    with pytest.raises(ValueError, match="one key stands in two entries"):
        tenants(["a:1", other])


def settings(*flags: str) -> tuple[str, int, tuple[tuple[str, float], ...]]:
    found = parse_settings(flags, {})
    return found.engine.policy, found.limits.num_tenants, found.limits.weights


def test_policy_is_fair_where_there_are_several_tenants() -> None:
    assert settings() == ("fcfs", 1, ())
    assert settings("--api-key", "a:1", "--api-key", "a:2") == ("fcfs", 1, ())
    assert settings("--api-key", "a:1", "--api-key", "2") == ("fair", 2, ())
    weighted = ("--api-key", "a+weight=3:1", "--api-key", "b:2")
    assert settings(*weighted) == ("fair", 2, (("a", 3.0),))
    assert settings(*weighted, "--policy", "priority")[0] == "priority"
    assert settings("--policy", "fair")[0] == "fair"


def test_nonsense_in_a_key_file_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in ("a+weight=many:1\n", "a+weight=2:1\na+weight=3:2\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="weight"):
            parse_settings(["--api-key-file", str(file)], {})


def test_no_key_is_on_the_command_line_of_the_core() -> None:
    """What the early core is told may be read by others on the machine."""
    found = parse_settings(["--api-key", "a+weight=3:sk-1", "--api-key", "sk-secret"], {})
    plan = str(Plan(found.engine, found.limits))
    assert "sk-" not in plan
    assert digest_of(b"sk-secret").hex()[:16] not in plan
