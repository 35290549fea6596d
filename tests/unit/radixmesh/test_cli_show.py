"""What people read: every column whole on a terminal of 80, whatever the numbers."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from radixmesh.cli.show import explanation_table, footer, harmless, replicas_table
from radixmesh.client import CandidatePrice, Explanation, Phase, Receipt, Replica, Usage, View

MODEL = "SmolLM2-135M-Instruct.Q4_1-5599fa6d4e93"


def shown(what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(what)
    return console.export_text().splitlines()


def replica(group_id: str = "worker-10", model: str = MODEL) -> Replica:
    return Replica(
        group_id=group_id,
        address="127.0.0.1:30100",
        dp_rank=3,
        model=model,
        incarnation=1,
        phase=Phase.CONNECTING,
        view=View.DEGRADED,
        running_count=256,
        waiting_count=1024,
        in_flight_count=1300,
        cached_block_count=28120,
        kv_block_count=29120,
        free_block_count=0,
        block_tokens=16,
        routed_count=123456,
        prompt_token_count=100,
        cached_token_count=100,
        prefill_rate=1.0,
        topology="dp=4 pp=1 tp=1",
    )


def test_a_fleet_of_one_model_fits_and_names_it_once() -> None:
    lines = shown(replicas_table([replica(), replica("worker-9")]))
    assert lines[0].strip() == f"fleet: {MODEL}"
    cells = ["worker-10/3", "connecting", "degraded", "256", "1024", "28120/29120", "123456"]
    assert lines[4].split() == [*cells, "100%"]
    assert not any("…" in line for line in lines)


def test_why_a_replica_gets_nothing_is_said_where_its_state_does_not() -> None:
    why = "the same process as group worker-9"
    rows = [
        replica("worker-9"),
        replace(replica(), reason=why),
        replace(replica(), reason="connecting"),
    ]
    lines = shown(replicas_table(rows))
    assert [line.strip() for line in lines if ": " in line][1:] == [f"worker-10/3: {why}"]


def test_long_names_go_on_in_the_next_line() -> None:
    models = [MODEL, "another-model-with-a-long-name"]
    lines = shown(replicas_table([replica("europe-west-4-inference", one) for one in models]))
    assert lines[0].strip() == "fleet"
    assert not any("…" in line for line in lines)
    joined = "".join("".join(line.split()) for line in lines)
    assert all(word in joined for word in ("connecting", "28120/29120", "123456", "100%"))


def test_an_explanation_fits() -> None:
    price = CandidatePrice(
        group_id="worker-1",
        dp_rank=3,
        eligible=True,
        reason="",
        prompt_blocks=500,
        matched_blocks=500,
        wait_s=123.45678,
        prefill_s=9.87654,
        alpha=8.0,
        crowding_s=0.01234,
        eviction_s=0.01234,
        total_s=1234.5,
        view=View.DEGRADED,
        chosen=True,
        held_blocks=480,
    )
    other = replace(price, dp_rank=4, chosen=False, held_blocks=500, reason="0.123 s dearer")
    away = replace(other, dp_rank=5, eligible=False, reason="it failed 5 times in a row")
    rows = (price, other, away)
    explanation = Explanation(prompt_token_count=8000, policy="price", candidates=rows)
    lines = shown(explanation_table(explanation))
    joined = "".join("".join(line.split()) for line in lines)
    cells = ["degraded", "480+20/500", "123.5", "9.8765", "8.0", "0.0123", "0.0123", "1234.5"]
    assert all(cell in joined for cell in [*cells, "→", "500/500"])
    assert lines[-1].strip() == "worker-1/5: it failed 5 times in a row"
    assert not any("…" in line for line in lines)


USAGE = Usage(prompt_tokens=800, cached_tokens=400, completion_tokens=512)


def receipt(*, attempts: int = 1, last_group_id: str = "worker-1") -> Receipt:
    return Receipt(
        group_id="worker-1",
        dp_rank=0,
        block_tokens=16,
        prompt_blocks=50,
        predicted_blocks=25,
        actual_blocks=25,
        predicted_wait_s=0.0,
        actual_wait_s=0.0,
        policy="price",
        attempts=attempts,
        seed=1,
        last_group_id=last_group_id,
    )


def test_the_line_below_an_answer_fits() -> None:
    assert len(footer(USAGE, receipt())) <= 80


@pytest.mark.parametrize(("attempts", "times"), [(2, "once"), (4, "3 times")])
def test_the_line_below_a_resumed_answer_says_where_it_ended_and_began(
    attempts: int, times: str
) -> None:
    line = footer(USAGE, receipt(attempts=attempts, last_group_id="worker-0"))
    assert line.startswith("worker-0/0: 512 tokens; ")
    assert line.endswith(f" (resumed {times}, began on worker-1/0)")


def test_a_router_that_does_not_say_where_an_answer_ended_is_believed_as_to_the_beginning() -> None:
    assert footer(USAGE, receipt(last_group_id="")).startswith("worker-1/0: ")


def test_a_models_text_can_not_drive_a_terminal() -> None:
    assert harmless("a\x1b[2Jb\r\x7f\x9b31m") == "a\\x1b[2Jb\\x0d\\x7f\\x9b31m"


def test_ordinary_text_is_shown_as_it_is() -> None:
    text = "tab\tline\n你好 👩\u200d💻 é"
    assert harmless(text) == text
