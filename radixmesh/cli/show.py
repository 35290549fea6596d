"""What the client heard, for people: tables and JSON. Calls nothing."""

from collections.abc import Iterable

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from radixmesh.client import Explanation, Model, Phase, Receipt, Replica, Usage, View

__all__ = ["as_json", "explanation_table", "footer", "models_table", "replicas_table"]

_VIEW_STYLES = {View.EXACT: "green", View.DEGRADED: "yellow", View.BLIND: "red"}
_PHASE_STYLES = {Phase.READY: "green", Phase.DOWN: "red"}


def as_json(value: object) -> str:
    """Return client values as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def replicas_table(replicas: Iterable[Replica]) -> Table:
    """Return the fleet: state, trust, load, cache; `sent` and `hits` are this router's."""
    table = _table("fleet", ("replica", "model", "state", "view"))
    for name in ("run", "wait", "blocks", "sent", "hits"):
        table.add_column(name, justify="right")
    for replica in replicas:
        rate = replica.hit_rate
        _add(
            table,
            f"{replica.group_id}/{replica.dp_rank}",
            replica.model,
            Text(replica.phase.value, _PHASE_STYLES.get(replica.phase, "yellow")),
            Text(replica.view.value, _VIEW_STYLES.get(replica.view, "red")),
            str(replica.running_count),
            str(replica.waiting_count),
            f"{replica.cached_block_count}/{replica.kv_block_count}",
            str(replica.routed_count),
            "-" if rate is None else f"{rate:.0%}",
        )
    return table


def explanation_table(explanation: Explanation) -> Table:
    """Return the price of every candidate, cheapest first."""
    title = f"{explanation.prompt_token_count} tokens, policy {explanation.policy}; seconds"
    table = _table(title, ("replica", "view"))
    for name in ("matched", "wait", "prefill", "alpha", "crowding", "eviction", "total"):
        table.add_column(name, justify="right")
    table.add_column("")
    for price in explanation.candidates:
        _add(
            table,
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
    table = _table("models", ("name", "context", "ready replicas", "tokenizer"))
    for model in models:
        _add(
            table,
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


def _table(title: str, columns: Iterable[str]) -> Table:
    return Table(*columns, title=Text(title), title_justify="left", box=SIMPLE_HEAD)


def _add(table: Table, *cells: str | Text) -> None:
    # As Text: names come from outside and are no markup.
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
