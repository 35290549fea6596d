"""Load: absolute reports, bookings that they can't include yet, and silence."""

from router.fleet.workload import REPORT_LIFE_S, Charge, Report, Workload


def booked(workload: Workload, *entry_ids: int, tokens: int = 100) -> Charge:
    charge = Charge(tokens=tokens, blocks=7, entry_ids=list(entry_ids))
    workload.book(charge)
    return charge


def test_a_booking_counts_from_the_moment_it_is_made() -> None:
    workload = Workload()
    workload.report(Report(running=2, waiting=1, uncached_tokens=50, free_blocks=20), 0.0)
    booked(workload)
    load = workload.at(0.0)
    assert (load.running, load.waiting, load.uncached_tokens, load.free_blocks) == (2, 2, 150, 13)


def test_a_report_replaces_only_the_bookings_that_it_has_seen() -> None:
    workload = Workload()
    booked(workload, 5)
    booked(workload, 6)
    booked(workload)
    workload.report(Report(waiting=1, uncached_tokens=100, seen_entry_id=5), 0.0)
    assert (workload.at(0.0).waiting, workload.at(0.0).uncached_tokens) == (3, 300)
    workload.report(Report(waiting=2, uncached_tokens=200, seen_entry_id=6), 0.0)
    assert (workload.at(0.0).waiting, workload.at(0.0).uncached_tokens) == (3, 300)


def test_an_old_report_does_not_wipe_what_it_cannot_know() -> None:
    workload = Workload()
    for entry_id in range(1, 11):
        booked(workload, entry_id)
    workload.report(Report(seen_entry_id=0), 0.0)
    assert workload.at(0.0).waiting == 10


def test_when_reports_stop_own_bookings_are_what_is_left() -> None:
    workload = Workload()
    workload.kv_blocks = 100
    workload.report(Report(running=50, waiting=9, prefill_rate=5.0, seen_entry_id=9), 0.0)
    started = booked(workload, 10)
    started.started = True
    booked(workload, 11, 12)
    assert workload.at(REPORT_LIFE_S).running == 50
    load = workload.at(REPORT_LIFE_S + 0.1)
    assert (load.running, load.waiting, load.uncached_tokens) == (1, 2, 100)
    assert load.free_blocks == 86
    assert load.prefill_rate == 5.0


def test_a_release_takes_back_exactly_its_own_and_once() -> None:
    workload = Workload()
    one, two = booked(workload), booked(workload)
    workload.release(one)
    workload.release(one)
    assert workload.at(0.0).waiting == 1
    assert workload.entries == 1
    workload.release(two)
    assert workload.at(0.0) == Report()


def test_siblings_share_their_prompt() -> None:
    workload = Workload()
    booked(workload, 1, 2, 3)
    load = workload.at(0.0)
    assert (load.waiting, load.uncached_tokens) == (3, 100)


def test_interrupted_streams_count_until_they_start() -> None:
    workload = Workload()
    charge = Charge(tokens=1, blocks=1, resume=True)
    workload.book(charge)
    assert workload.unstarted_resumes == 1
    charge.started = True
    assert workload.unstarted_resumes == 0
