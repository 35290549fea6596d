"""What the client heard, for people: tables and JSON. Calls nothing."""

from collections.abc import Iterable

import msgspec
from rich.table import Table

from radixmesh.client import Explanation, Model, Phase, Receipt, Replica, Usage, View

__all__ = ["as_json", "explanation_table", "footer", "models_table", "replicas_table"]

_VIEW_STYLES = {View.EXACT: "green", View.DEGRADED: "yellow", View.BLIND: "red"}
_PHASE_STYLES = {Phase.READY: "green", Phase.DOWN: "red"}


def as_json(value: object) -> str:
    """Return client values as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def replicas_table(replicas: Iterable[Replica]) -> Table:
    """Return the fleet: state, trust, load, cache."""
    table = Table(title="fleet", title_justify="left")
    for name in ("replica", "model", "state", "view"):
        table.add_column(name)
    for name in ("running", "waiting", "cached blocks", "free blocks", "requests", "hit rate"):
        table.add_column(name, justify="right")
    table.add_column("topology")
    for replica in replicas:
        rate = replica.hit_rate
        table.add_row(
            f"{replica.group_id}/{replica.dp_rank}",
            replica.model,
            _styled(replica.phase.value, _PHASE_STYLES.get(replica.phase, "yellow")),
            _styled(replica.view.value, _VIEW_STYLES.get(replica.view, "red")),
            str(replica.running_count),
            str(replica.waiting_count),
            f"{replica.cached_block_count}/{replica.kv_block_count}",
            str(replica.free_block_count),
            str(replica.routed_count),
            "-" if rate is None else f"{rate:.0%}",
            replica.topology,
        )
    return table


def explanation_table(explanation: Explanation) -> Table:
    """Return the price of every candidate, cheapest first."""
    title = f"{explanation.prompt_token_count} tokens, policy {explanation.policy}; seconds"
    table = Table(title=title, title_justify="left")
    table.add_column("replica")
    table.add_column("view")
    for name in ("matched", "wait", "prefill", "alpha", "crowding", "eviction", "total"):
        table.add_column(name, justify="right")
    table.add_column("")
    for price in explanation.candidates:
        table.add_row(
            f"{price.group_id}/{price.dp_rank}",
            price.view.value,
            f"{price.matched_blocks}/{price.prompt_blocks}",
            f"{price.wait_s:.4f}",
            f"{price.prefill_s:.4f}",
            f"{price.alpha:.1f}",
            f"{price.crowding_s:.4f}",
            f"{price.eviction_s:.4f}",
            f"{price.total_s:.4f}",
            price.reason,
        )
    return table


def models_table(models: Iterable[Model]) -> Table:
    """Return the served models."""
    table = Table(title="models", title_justify="left")
    for name in ("name", "context", "ready replicas", "tokenizer"):
        table.add_column(name)
    for model in models:
        table.add_row(
            model.name,
            str(model.max_model_len),
            str(model.ready_replica_count),
            model.fingerprint[:12],
        )
    return table


def footer(usage: Usage, receipt: Receipt) -> str:
    """Return one line on where an answer came from."""
    return (
        f"{usage.completion_tokens} tokens from {receipt.group_id}/{receipt.dp_rank}; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused "
        f"(blocks predicted {receipt.predicted_blocks}, reused {receipt.actual_blocks})"
    )


def _styled(text: str, style: str) -> str:
    return f"[{style}]{text}[/{style}]"
