"""Command lines of SGLang's gateway."""

import re

import pytest

from radixmesh.settings import load
from router.__main__ import main
from router.gateway import REFUSALS, TURNS, Refused, translate
from router.settings import RouterSettings


def read(line: str) -> RouterSettings:
    return load(RouterSettings, translate(line.split()), prog="radixmesh-router")


def test_a_line_of_the_gateway_is_understood() -> None:
    settings = read(
        "--worker-urls grpc://w1:30100 w2:30100 grpc://[::1]:7/ --policy cache_aware"
        " --cache-threshold 0.5 --balance-abs-threshold 32 --balance-rel-threshold 1.1"
        " --host 127.0.0.2 --port 8000 --prometheus-port 29000 --prometheus-host 127.0.0.3"
        " --max-concurrent-requests 100 --queue-size 50 --queue-timeout-secs 5"
        " --request-timeout-secs 60 --shutdown-grace-period-secs 7 --api-key k --log-level warn"
        " --cb-failure-threshold 3 --cb-timeout-duration-secs 9 --cors-allowed-origins a b"
        " --dp-aware --enable-igw"
    )
    assert settings.groups == ["w1:30100", "w2:30100", "[::1]:7"]
    assert settings.policy == "cache_aware"
    assert (settings.cache_threshold, settings.balance_abs_threshold) == (0.5, 32)
    assert settings.balance_rel_threshold == 1.1
    assert (settings.host, settings.http_port, settings.port) == ("127.0.0.2", 8000, 30001)
    assert (settings.metrics_host, settings.metrics_port) == ("127.0.0.3", 29000)
    assert (settings.max_concurrent, settings.max_queued) == (100, 50)
    assert (settings.queue_timeout_s, settings.request_timeout_s) == (5, 60)
    assert (settings.drain_grace_s, settings.api_key, settings.log_level) == (7, "k", "warning")
    assert (settings.breaker_failures, settings.breaker_open_s) == (3, 9)
    assert settings.cors_origins == ["a", "b"]


def test_the_defaults_of_the_cache_aware_policy_are_those_of_the_gateway() -> None:
    settings = read("")
    thresholds = settings.balance_abs_threshold, settings.balance_rel_threshold
    assert (settings.cache_threshold, *thresholds) == (0.3, 64, 1.5)


def test_pods_are_found_by_labels() -> None:
    settings = read(
        "--service-discovery --selector app=w tier=gpu --service-discovery-port 8000"
        " --service-discovery-namespace inference --port 8001"
    )
    assert settings.groups_selector == "app=w,tier=gpu"
    assert (settings.kubernetes_port, settings.kubernetes_namespace) == ("8000", "inference")
    assert settings.http_port == 8001


def test_pods_are_found_everywhere_unless_a_namespace_is_named() -> None:
    assert read("--service-discovery --selector app=w").kubernetes_namespace == "*"
    assert read("--groups-selector app=w").kubernetes_namespace == ""


def test_a_line_of_ours_stays_as_it_is() -> None:
    line = ["--groups=a=h:1", "--groups", "h:2", "--port", "5", "--http", "--no-log-json"]
    assert translate(line) == line
    assert read("--port 5").port == 5


def test_no_limit_is_written_differently() -> None:
    assert read("--max-concurrent-requests -1").max_concurrent == 0
    assert read("--max-concurrent-requests=4").max_concurrent == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--worker-urls http://w1:8000", "grpc://HOST:PORT"),
        ("--prefill http://w1:8000 9001 --decode http://w2:1", "every replica prefills"),
        ("--worker-urls w:1 --model-path some/model", "--tokenizers"),
        ("--service-discovery", "--selector"),
        ("--service-discovery --selector app", "KEY=VALUE"),
        ("--service-discovery yes --selector a=b", "takes no value"),
        ("--prometheus-port", "takes one value"),
        ("--worker-urls w:1 --retry-max-retries 3", "--resume-wait-s"),
        ("--tool-call-parser=json", "not parsed"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_what_to_use(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        translate(line.split())
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith("radixmesh-router: --")


def test_everything_that_is_named_in_its_place_exists() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in RouterSettings.model_fields}
    known = flags | TURNS.keys()
    for refusal in REFUSALS.values():
        for flag in re.findall(r"--[a-z-]+", refusal):
            assert flag in known, refusal
    for flag in TURNS.keys() - {"--service-discovery", "--enable-igw", "--dp-aware"}:
        values = ["a=b"] if flag == "--selector" else ["w:1"] if flag == "--worker-urls" else ["1"]
        for made in TURNS[flag](flag, values):
            assert made.split("=")[0] in flags
