"""The flags of SGLang's gateway, as ours. Pure: arguments in, arguments out.

A command line that names its workers as that gateway does, by `--worker-urls` or
`--service-discovery`, is read as one of its: `--port` is the HTTP port then. Its other flags mean
the same on every line. A flag that has no meaning here is refused with what to use instead.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Final

# A flag, its values, and all of it as it was given.
Part = tuple[str, list[str], list[str]]


class Refused(ValueError):
    """A flag has no meaning here; the message says what to use instead."""


Turn = Callable[[str, Sequence[str]], Iterable[str]]


def _one(flag: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        raise Refused(f"{flag} takes one value")
    return values[0]


def _as(ours: str) -> Turn:
    return lambda flag, values: [f"--{ours}={_one(flag, values)}"]


def _worker_urls(flag: str, values: Sequence[str]) -> Iterator[str]:
    for url in ",".join(values).split(","):
        scheme, mark, address = url.rpartition("://")
        if mark and scheme != "grpc":
            raise Refused(f"{flag} {url}: worker groups are reached by gRPC: grpc://HOST:PORT")
        yield f"--groups={address.rstrip('/')}"


def _selector(flag: str, values: Sequence[str]) -> Iterator[str]:
    if any("=" not in value for value in values):
        raise Refused(f"{flag} takes KEY=VALUE ...")
    if values:
        yield f"--groups-selector={','.join(values)}"


def _limit(flag: str, values: Sequence[str]) -> Iterator[str]:
    number = _one(flag, values)
    yield f"--max-concurrent={0 if number == '-1' else number}"


def _log_level(flag: str, values: Sequence[str]) -> Iterator[str]:
    level = _one(flag, values)
    yield f"--log-level={'warning' if level == 'warn' else level}"


def _policy(flag: str, values: Sequence[str]) -> Iterator[str]:
    name = _one(flag, values)
    yield f"--policy={'consistent_hash' if name == 'consistent_hashing' else name}"


def _origins(flag: str, values: Sequence[str]) -> Iterator[str]:
    del flag
    yield f"--cors-origins={','.join(values)}"


def _nothing(flag: str, values: Sequence[str]) -> Iterator[str]:
    if values:
        raise Refused(f"{flag} takes no value")
    return iter(())


TURNS: Final = MappingProxyType(
    {
        "--worker-urls": _worker_urls,
        "--policy": _policy,
        "--prometheus-port": _as("metrics-port"),
        "--prometheus-host": _as("metrics-host"),
        "--max-concurrent-requests": _limit,
        "--queue-size": _as("max-queued"),
        "--queue-timeout-secs": _as("queue-timeout-s"),
        "--request-timeout-secs": _as("request-timeout-s"),
        "--shutdown-grace-period-secs": _as("drain-grace-s"),
        "--cb-failure-threshold": _as("breaker-failures"),
        "--cb-timeout-duration-secs": _as("breaker-open-s"),
        "--service-discovery": _nothing,
        "--selector": _selector,
        "--service-discovery-port": _as("kubernetes-port"),
        "--service-discovery-namespace": _as("kubernetes-namespace"),
        "--cors-allowed-origins": _origins,
        "--log-level": _log_level,
        # What they switch on is always so here.
        "--enable-igw": _nothing,
        "--dp-aware": _nothing,
    }
)

_NO_PD: Final = "every replica prefills and decodes; name them all by --worker-urls or --groups"
_ONE_TOKENIZER: Final = "text is turned into ids by tokenizer services: --tokenizers HOST:PORT"
_LINKS: Final = (
    "a worker is judged by its link, its hello and its snapshot; there is nothing to poll"
)
_NO_MESH: Final = "routers agree by what workers say of their load; start any number of them"
_FEED: Final = "each worker group says its block size and what its cache holds"
_BACKOFF: Final = "pauses between tries follow from what failed; see --resume-wait-s"
_TLS: Final = "it speaks plain text; put a proxy that ends TLS in front of it"
_NO_PARSER: Final = "tool calls and reasoning are not parsed"

REFUSALS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("--pd-disaggregation", "--prefill", "--decode", "--prefill-policy", "--decode-policy"),
            _NO_PD,
        ),
        **dict.fromkeys(("--prefill-selector", "--decode-selector"), _NO_PD),
        **dict.fromkeys(("--model-path", "--tokenizer-path", "--chat-template"), _ONE_TOKENIZER),
        **dict.fromkeys(
            ("--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"), _ONE_TOKENIZER
        ),
        **dict.fromkeys(
            (
                "--health-failure-threshold",
                "--health-success-threshold",
                "--health-check-timeout-secs",
                "--health-check-interval-secs",
                "--health-check-endpoint",
                "--disable-health-check",
                "--remove-unhealthy-workers",
            ),
            _LINKS,
        ),
        **dict.fromkeys(
            ("--worker-startup-timeout-secs", "--worker-startup-check-interval"),
            "workers may come when they like; a request waits for one up to --ready-wait-s",
        ),
        **dict.fromkeys(
            (
                "--enable-mesh",
                "--mesh-server-name",
                "--mesh-host",
                "--mesh-port",
                "--mesh-peer-urls",
            ),
            _NO_MESH,
        ),
        "--router-selector": _NO_MESH,
        "--block-size": _FEED,
        "--eviction-interval": "the index is bounded at all times: --index-bytes",
        "--max-tree-size": "the index is bounded in bytes: --index-bytes",
        "--retry-max-retries": (
            "a request is tried again until its deadline, and while a replica may take it: "
            "--request-timeout-secs, --resume-wait-s"
        ),
        "--disable-retries": "streams always go on elsewhere; --resume-wait-s 0 does not wait",
        **dict.fromkeys(
            (
                "--retry-initial-backoff-ms",
                "--retry-max-backoff-ms",
                "--retry-backoff-multiplier",
                "--retry-jitter-factor",
            ),
            _BACKOFF,
        ),
        "--cb-success-threshold": "one probe that succeeds closes a breaker",
        "--cb-window-duration-secs": "a breaker counts failures in a row: --cb-failure-threshold",
        "--disable-circuit-breaker": "--breaker-failures 0 switches breakers off",
        "--rate-limit-tokens-per-second": "limits are by tenant: --tenant-requests-per-minute",
        "--max-payload-size": "a request has at most 16 MiB",
        "--request-id-headers": "the header is x-request-id",
        "--log-dir": "logs go to standard error; --log-json writes JSON",
        "--prometheus-duration-buckets": "buckets are fixed",
        "--reasoning-parser": _NO_PARSER,
        "--tool-call-parser": _NO_PARSER,
        "--mcp-config-path": _NO_PARSER,
        "--history-backend": "nothing of a conversation is kept",
        "--backend": "workers are groups of radixmesh-worker",
        **dict.fromkeys(
            ("--tls-cert-path", "--tls-key-path", "--client-cert-path", "--client-key-path"), _TLS
        ),
        "--control-plane-api-keys": "the API key opens /workers too, with --workers-api",
    }
)


def translate(argv: Sequence[str]) -> list[str]:
    """Return a command line in which flags of SGLang's gateway have become ours.

    Raises:
        Refused: A flag of it has no meaning here, or a value is none.
    """
    parts = list(_parts(argv))
    as_gateway = _names(parts, "--worker-urls", "--service-discovery")
    if _names(parts, "--service-discovery") and not _names(parts, "--selector"):
        raise Refused("--service-discovery needs --selector KEY=VALUE ...")
    translated: list[str] = []
    if _names(parts, "--service-discovery") and not _names(
        parts, "--service-discovery-namespace", "--kubernetes-namespace"
    ):
        translated.append("--kubernetes-namespace=*")  # as there
    for flag, values, as_given in parts:
        if flag in REFUSALS:
            raise Refused(f"{flag}: {REFUSALS[flag]}")
        if flag in TURNS:
            translated.extend(TURNS[flag](flag, values))
        elif flag == "--port" and as_gateway:
            translated.append(f"--http-port={_one(flag, values)}")
        else:
            translated.extend(as_given)
    return translated


def _names(parts: Iterable[Part], *flags: str) -> bool:
    return any(flag in flags for flag, _, _ in parts)


def _parts(argv: Sequence[str]) -> Iterator[Part]:
    """Take a command line apart."""
    at = 0
    while at < len(argv):
        start = at
        flag, equals, value = argv[at].partition("=")
        values = [value] if equals else []
        at += 1
        while not equals and at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        yield flag, values, list(argv[start:at])
