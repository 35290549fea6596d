"""What the client heard, for people: tables that fit 80 columns, and JSON. Calls nothing."""

from collections.abc import Iterable

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from radixmesh.client import (
    CandidatePrice,
    Explanation,
    Model,
    Phase,
    Receipt,
    Replica,
    Usage,
    View,
)

__all__ = [
    "as_json",
    "explanation_table",
    "footer",
    "harmless",
    "models_table",
    "replicas_table",
]

_VIEW_STYLES = {View.EXACT: "green", View.DEGRADED: "yellow", View.BLIND: "red"}
_PHASE_STYLES = {Phase.READY: "green", Phase.DOWN: "red"}
# The control characters of C0, DEL and C1, but for tab and line feed.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def harmless(text: str) -> str:
    """Return a model's text with control characters as escapes: it must not drive a terminal."""
    return text.translate(_CONTROLS)


def as_json(value: object) -> str:
    """Return client values as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def replicas_table(replicas: Iterable[Replica]) -> Table:
    """Return the fleet: state, trust, load, cache; `sent` and `hits` are this router's.

    Why one gets no new requests is said below, where its state doesn't say it.
    """
    replicas = list(replicas)
    models = sorted({replica.model for replica in replicas})
    # One model is named once, not in every row.
    named = ("model",) if len(models) > 1 else ()
    table = _table(": ".join(["fleet", *models[:1]][: 2 - len(named)]), ("replica", *named))
    for name in ("state", "view"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "blocks", "sent", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        rate = replica.hit_rate
        _add(
            table,
            f"{replica.group_id}/{replica.dp_rank}",
            *([replica.model] if named else ()),
            Text(replica.phase.value, _PHASE_STYLES.get(replica.phase, "yellow")),
            Text(replica.view.value, _VIEW_STYLES.get(replica.view, "red")),
            str(replica.running_count),
            str(replica.waiting_count),
            f"{replica.cached_block_count}/{replica.kv_block_count}",
            str(replica.routed_count),
            "-" if rate is None else f"{rate:.0%}",
        )
    table.caption_justify = "left"
    reasons = [
        f"{replica.group_id}/{replica.dp_rank}: {replica.reason}"
        for replica in replicas
        if replica.reason not in {"", replica.phase.value}
    ]
    if reasons:
        table.caption = Text("\n".join(reasons))
    return table


def explanation_table(explanation: Explanation) -> Table:
    """Return the price of every candidate, the chosen one first and marked by an arrow.

    Those that can't be chosen are named below, with the reason.
    """
    title = f"{explanation.prompt_token_count} tokens, policy {explanation.policy}; seconds"
    table = _table(title, ("replica",))
    table.add_column("view", no_wrap=True)
    for name in ("match", "wait", "prefill", "alpha", "crowd", "evict", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for price in explanation.candidates:
        _add(
            table,
            f"{'→ ' if price.chosen else ''}{price.group_id}/{price.dp_rank}",
            price.view.value,
            _match(price),
            _seconds(price.wait_s),
            _seconds(price.prefill_s),
            f"{price.alpha:.1f}",
            _seconds(price.crowding_s),
            _seconds(price.eviction_s),
            _seconds(price.total_s),
        )
    table.caption_justify = "left"
    table.caption = Text(
        "\n".join(
            f"{price.group_id}/{price.dp_rank}: {price.reason}"
            for price in explanation.candidates
            if not price.eligible
        )
    )
    return table


def _match(price: CandidatePrice) -> str:
    """Blocks in the cache, those about to be there when there are any, and of how many."""
    coming = price.matched_blocks - price.held_blocks
    return f"{price.held_blocks}{f'+{coming}' if coming > 0 else ''}/{price.prompt_blocks}"


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
    began = f"{receipt.group_id}/{receipt.dp_rank}"
    ended = f"{receipt.last_group_id}/{receipt.last_dp_rank}" if receipt.last_group_id else began
    return (
        f"{ended}: {usage.completion_tokens} tokens; "
        f"{usage.cached_tokens}/{usage.prompt_tokens} prompt tokens reused "
        f"({receipt.actual_blocks} blocks, {receipt.predicted_blocks} predicted)"
        f"{_resumed(receipt.attempts - 1, began)}"
    )


def _resumed(times: int, began: str) -> str:
    if times < 1:
        return ""
    return f" (resumed {'once' if times == 1 else f'{times} times'}, began on {began})"


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        # Names come from outside: a long one goes on in the next line, and is never cut.
        table.add_column(name, overflow="fold")
    return table


def _seconds(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


def _add(table: Table, *cells: str | Text) -> None:
    # As Text: names come from outside and are no markup.
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
