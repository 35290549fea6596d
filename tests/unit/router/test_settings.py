"""The router's flags, as people write them."""

from pathlib import Path

import pytest

from radixmesh.settings import load
from router.settings import RouterSettings


def read(*argv: str) -> RouterSettings:
    return load(RouterSettings, argv, prog="radixmesh-router")


def test_lists_are_comma_separated_or_repeated() -> None:
    settings = read("--groups=a=h:1,h:2", "--tokenizers", "t:1", "--tokenizers", "t:2")
    assert settings.groups == ["a=h:1", "h:2"]
    assert settings.tokenizers == ["t:1", "t:2"]


def test_a_file_holds_lists(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("groups: [a=h:1, h:2]\npolicy: random\n")
    settings = read("--config", str(file), "--policy=round_robin")
    assert settings.groups == ["a=h:1", "h:2"]
    assert settings.policy == "round_robin"


def test_the_environment_holds_lists_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXMESH_ROUTER_GROUPS", "a=h:1,h:2")
    assert read().groups == ["a=h:1", "h:2"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--groups", "nowhere"),
        ("--groups", "a=h:1,b=h:1"),
        ("--detokenizers", ":1"),
        ("--policy", "best"),
        ("--max-concurrent", "-1"),
        ("--default-max-tokens", "0"),
        ("--attempt-timeout-s", "-1"),
        ("--breaker-failures", "-1"),
        ("--breaker-open-s", "0"),
        ("--outlier-ratio", "0.5"),
    ],
)
def test_a_bad_value_ends_with_a_message_that_names_the_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        read(f"{flag}={value}")
    assert leaving.value.code == 2
    assert f"radixmesh-router: {flag}" in capsys.readouterr().err


def test_help_leaves_out_defaults_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in shown
    assert "(default: )" not in shown
    assert "(default: price)" in shown


def test_tenants_limits_are_json_or_a_mapping_in_the_file(tmp_path: Path) -> None:
    given = read('--tenant-limits={"acme": {"tokens_per_minute": 7}, "b": {}}')
    assert given.tenant_limits["acme"].tokens_per_minute == 7
    assert given.tenant_limits["b"].requests_per_minute is None
    file = tmp_path / "router.yaml"
    file.write_text("tenant_limits:\n  acme: {requests_per_minute: 0}\n")
    assert read("--config", str(file)).tenant_limits["acme"].requests_per_minute == 0


@pytest.mark.parametrize("given", ['{"a": {"tokens": 1}}', '{"a": {"tokens_per_minute": -1}}'])
def test_a_tenant_limit_that_is_none_is_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(f"--tenant-limits={given}")
    assert ended.value.code == 2
    assert "--tenant-limits.a.tokens" in capsys.readouterr().err


def test_processes_have_ports_in_steps_and_zero_stays_zero() -> None:
    settings = read(
        "--processes=3", "--port-step=1", "--port=4000", "--http-port=0", "--fleet-port=4100"
    )
    assert settings.ports_of(2) == {
        "port": 4002,
        "http_port": 0,
        "fleet_port": 4102,
        "metrics_port": 0,
    }
    assert "http_port" not in read("--no-http", "--processes=2", "--port-step=9").ports_of(0)


def test_ports_that_would_meet_are_refused_with_a_step_that_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read("--processes=2", "--port-step=1")
    assert "--port-step=4" in capsys.readouterr().err
    assert read("--processes=2").ports_of(1)["http_port"] == 30004
