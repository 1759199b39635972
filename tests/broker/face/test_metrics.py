"""`GET /metrics`: true numbers, few labels, and a page that has each of them."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qmq_broker.face.routes import metrics
from qmq_broker.face.routes.metrics import METRICS
from qmq_broker.face.routes.scrape import PREFIX
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.record import Record, encode_record
from tests.broker.face.asgi import FRAME, Client, error_of
from tests.broker.service.rig import GROUP, SUBJECT, new_ids

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
Samples = dict[tuple[str, ...], float]
OF_GROUP = (GROUP, SUBJECT)


def scrape(client: Client) -> Samples:
    """Every sample by its name, without our prefix, and the values of its labels by their names."""
    reply = client.get("/metrics")
    assert (reply.status, reply.headers[b"content-type"][:10]) == (200, b"text/plain")
    return {
        (
            sample.name.removeprefix(PREFIX),
            *(value for _, value in sorted(sample.labels.items())),
        ): (sample.value)
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def test_what_is_accepted_is_counted_by_subject(client: Client) -> None:
    message = {"subject": SUBJECT, "body": "x", "message_id": "ab" * 16}
    for _ in range(2):
        assert client.post("/v1/send", {"messages": [message]}).status == 200
    both = [{"subject": SUBJECT, "body": "y"}, {"subject": "bills", "body": "z"}]
    assert client.post("/v1/send", {"messages": both}).status == 200
    found = scrape(client)
    assert found["accepted_messages_total", SUBJECT] == 3
    assert found["accepted_requests_total", SUBJECT] == 3
    assert found["accepted_messages_total", "bills"] == 1
    assert found["accepted_bytes_total", SUBJECT] > found["accepted_bytes_total", "bills"] > 0
    assert found["duplicates_total",] == 1
    assert found["remembered_ids",] == 3
    assert (found["subjects",], found["groups",]) == (2, 0)


def test_a_subject_beyond_the_bound_has_no_row_of_its_own(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq_broker.service.metrics.SUBJECTS_MAX", 2)
    for name in ("a", "b", "c", "d"):
        client.post("/v1/send", {"messages": [{"subject": name, "body": "x"}]})
    found = scrape(client)
    accepted = [key for key in found if key[0] == "accepted_messages_total"]
    counted = {key[1]: found[key] for key in accepted}
    assert counted == {"a": 1, "b": 1, "*": 2}


def test_a_group_beyond_the_bound_has_no_rows(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LISTED_MAX", 1)
    for group in ("a", "b"):
        client.rig.pull(group=group)
    found = scrape(client)
    assert found["groups",] == 2
    assert [key for key in found if key[0] == "group_lag_messages"] == [
        ("group_lag_messages", "a", SUBJECT)
    ]


def test_a_commit_is_timed_and_its_requests_are_counted(client: Client) -> None:
    rig = client.rig
    before = rig.store.commit

    def slow_sync() -> None:
        rig.clock.pass_ms(30)
        before()

    rig.store.commit = slow_sync  # type: ignore[method-assign]  # the slow disk
    rig.submit(frame_of(b"a"))
    rig.send(b"b")
    found = scrape(client)
    assert found["commit_requests_count",] == 1
    assert found["commit_requests_sum",] == 2
    assert found["sync_seconds_bucket", "0.025"] == 0
    assert found["sync_seconds_bucket", "0.05"] == 1
    assert found["sync_seconds_sum",] == pytest.approx(0.03)
    assert found["append_seconds_sum",] == 0


def frame_of(body: bytes, due_at_ms: int | None = None) -> bytes:
    record = Record(
        message_id=next(new_ids()),
        subject=SUBJECT,
        body=body,
        born_at_ms=1,
        due_at_ms=due_at_ms,
    )
    kind = FrameKind.MESSAGES if due_at_ms is None else FrameKind.DELAYED
    return build_message_frame({SUBJECT: [encode_record(record)]}, kind=kind)


def test_a_group_is_shown_by_what_it_was_given_and_what_it_lacks(client: Client) -> None:
    rig = client.rig
    rig.send(*[b"x"] * 5)
    given = rig.pull(max_messages=3, lease_ms=1_000, max_attempts=2)
    rig.settle(given.nack(delay_ms=0))
    rig.pull(max_messages=2, lease_ms=1_000, max_attempts=2)
    rig.pass_ms(2_000)
    rig.send(b"x")
    found = scrape(client)
    groups = {key[0]: value for key, value in found.items() if key[1:] == OF_GROUP}
    assert groups["group_given_messages_total"] == 5
    assert groups["group_redelivered_messages_total"] == 2
    assert groups["group_ended_leases_total"] == 2
    assert groups["group_dead_messages"] == 2
    assert groups["group_lag_messages"] == 3
    assert groups["group_lag_seconds"] > 0
    assert groups["group_in_flight_messages"] == 0
    assert groups["group_redelivery_messages"] == 1


def test_refusals_are_counted_by_the_code_that_is_reported_wherever_they_come_from(
    client: Client,
) -> None:
    big = {b"content-length": b"9" * 12}
    asyncio.run(client.call("POST", "/v1/send", b"", headers=list(big.items()), has_length=False))
    client.get("/v1/dead?subject=a%20b")
    client.get("/v1/delayed/nothing")
    client.rig.broker.set_read_only(True, "a test")
    code = error_of(client.post("/v1/send", {"messages": []})).code
    found = {key[1]: value for key, value in scrape(client).items() if "refused" in key[0]}
    assert found.pop("body_too_large") == 1
    assert found.pop("invalid_name") == 1
    assert found.pop(code) == 1
    assert sum(found.values()) == 1, "the id that is none"


def test_the_state_and_the_disk_are_reported(client: Client) -> None:
    found = scrape(client)
    assert (found["state", "serving"], found["state", "read-only"]) == (1, 0)
    assert found["takes_messages",] == 1
    client.rig.broker.set_read_only(True, "a test")
    found = scrape(client)
    assert (found["state", "serving"], found["state", "read-only"]) == (0, 1)
    assert found["takes_messages",] == 0
    assert found["disk_free_bytes",] > 0


def test_how_far_the_times_of_messages_are_ahead_of_the_clock_is_reported(client: Client) -> None:
    client.rig.send(b"x")
    assert scrape(client)["stored_ahead_seconds",] == 0
    client.rig.clock.wall_ms += (
        90_000  # somebody sets the machine's clock; and back, before the restart
    )
    client.rig.send(b"x")
    client.rig.clock.wall_ms -= 90_000
    client.rig.restart()
    ahead_s = scrape(Client(client.rig))["stored_ahead_seconds",]
    client.rig.pass_ms(50_000)
    assert (ahead_s, scrape(Client(client.rig))["stored_ahead_seconds",]) == (90, 40)


def test_delayed_messages_are_reported(client: Client) -> None:
    due_at_ms = client.rig.now_ms + 60_000
    reply = client.post("/v1/send", frame_of(b"x", due_at_ms), content_type=FRAME)
    assert reply.status == 200
    found = scrape(client)
    assert found["delayed_pending_messages", SUBJECT] == 1
    assert found["accepted_messages_total", SUBJECT] == 1
    counts = client.rig.broker.delayed.releaser.counts
    counts.note_late([30])
    found = scrape(client)
    assert found["delayed_late_seconds_bucket", "0.02"] == 0
    assert found["delayed_late_seconds_bucket", "0.05"] == 1
    assert found["delayed_late_seconds_sum",] == pytest.approx(0.03)


def test_long_retries_are_counted_for_their_group_and_as_nothing_else(client: Client) -> None:
    rig = client.rig
    rig.send(b"x")
    rig.settle(rig.pull().nack(delay_ms=24 * 3_600_000))
    rig.broker.step()
    rig.broker.writer.step()
    rig.run_posted()
    found = scrape(client)
    assert found["group_long_retry_messages", *OF_GROUP] == 1
    assert (found["subjects",], found["groups",]) == (1, 1)
    assert not any(label.startswith("_qmq.") for key in found for label in key[1:])


def test_a_second_asker_at_the_same_time_is_asked_to_come_back(client: Client) -> None:
    async def twice() -> list[int]:
        # With its one thread taken, no answer can be made before both have asked.
        is_asked = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        taken = loop.run_in_executor(None, is_asked.wait)
        askers = [asyncio.ensure_future(client.call("GET", "/metrics")) for _ in range(2)]
        await asyncio.wait(askers, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        is_asked.set()
        await taken
        return sorted(reply.status for reply in await asyncio.gather(*askers))

    assert asyncio.run(twice()) == [200, 429]
    assert client.get("/metrics").status == 200


def test_without_the_extra_the_answer_says_what_to_install(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    reply = client.get("/metrics")
    assert (reply.status, error_of(reply).code) == (501, "no_metrics")
    assert "qmq[metrics]" in error_of(reply).remedy


def test_the_page_has_every_metric_with_its_type_unit_labels_and_meaning() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (\w*) \| ([\w, ]*) \| (.+) \|$", PAGE, re.MULTILINE
    )
    ours = [
        (
            f"{metric.name}_total" if metric.kind == "counter" else metric.name,
            metric.kind,
            unit_of(metric.name),
            ", ".join(metric.labels),
            metric.about,
        )
        for metric in METRICS
    ]
    assert listed == ours


def unit_of(name: str) -> str:
    last = name.rpartition("_")[2]
    return last if last in ("seconds", "bytes", "messages", "requests") else ""


def test_the_alarms_of_the_page_are_about_metrics_that_there_are() -> None:
    table = PAGE.partition("## What to alert on")[2].partition("\n\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.count("|") > 2]
    known = {
        f"{metric.name}{end}" for metric in METRICS for end in ("", "_total", "_sum", "_count")
    }
    named = {
        word
        for cell in cells
        for text in re.findall("`(.+?)`", cell)
        for word in re.findall(r"[a-z]+_\w+", text)
    }
    assert named
    assert named <= known
