"""The outbox and its thread, with a service in this process that fails as it is told: order, retries, refusals."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.storage.filesystem import Storage
from rlx.tracking import delivery, outbox
from rlx.tracking.base import Failure
from rlx.tracking.delivery import Delivery
from rlx.tracking.outbox import EntryKind, OutboxQueue, RunRecord

PATIENCE_S = 10.0


class Refused(Exception):
    """A record that the service will never take."""


class Deleted(Exception):
    """A run that the service has no more."""


class Service:
    """Takes records unless the next of `errors` is one; each stays until it is used."""

    name, title, address = "mlflow", "A service", "http://host"

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.records = list(errors), list[tuple[str, Mapping[str, Any]]]()
        self.runs: set[str] = set()

    def _next(self) -> None:
        if self.errors and (error := self.errors.pop(0)):
            raise error

    def failure(self, error: Exception) -> Failure:
        kinds = {Refused: Failure.REFUSED, Deleted: Failure.DELETED}
        return kinds.get(type(error), Failure.AWAY)

    def cause(self, error: Exception) -> str:
        return f"because {error}"

    def reopen_run(self, run_id: str, at: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._next()
        if run_id not in self.runs:
            raise Deleted(run_id)

    def make_run(self, key: str, *, parent: str | None, at: int, **description: Any) -> str:
        self._next()
        self.runs.add(f"run of {key}")
        self.records.append(("make", {"parent": parent, "at": at, **description}))
        return f"run of {key}"

    def writer(self, run_id: str) -> Any:
        service = self

        class Writer:
            def missing(self) -> str:
                return ""

            def __getattr__(self, kind: str) -> Any:
                def record(**content: Any) -> None:
                    service._next()
                    service.records.append((kind, content))

                return record

        return Writer()


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return Storage.local(tmp_path / "run")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_FIRST_PAUSE_S", 1e-4)


class Sent:
    """A delivery that runs until its queue is empty, and what it has told."""

    def __init__(
        self, folder: Storage, service: Service, *entries: tuple[EntryKind, dict[str, Any]], writer: str = "rank_0"
    ) -> None:
        self.told: list[str] = []
        self.queue = OutboxQueue(outbox.entries_of(folder, writer, "mlflow"))
        for kind, content in entries:
            self.queue.add(kind, content)
        self.delivery = Delivery(service, folder, self.queue, self.told.append)  # type: ignore[arg-type]

    def run(self) -> "Sent":
        self.delivery.start()
        self.queue.wait_until_empty(PATIENCE_S)
        assert len(self.queue) == 0
        self.queue.close()
        return self


def opened(parent: str | None = None) -> tuple[EntryKind, dict[str, Any]]:
    return EntryKind.OPEN, {"parent": parent, "at": 5, "name": "one", "params": {}, "tags": {}}


def log(step: int) -> tuple[EntryKind, dict[str, Any]]:
    return EntryKind.LOG, {"metrics": {"a": 0.5}, "step": step, "at": 6}


def steps(service: Service) -> list[int]:
    return [content["step"] for kind, content in service.records if kind == "log"]


def test_texts_of_records_have_no_halves_of_characters_also_those_that_an_earlier_version_left(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    queue = outbox.entries_of(folder, "rank_0", "mlflow")
    old = {"kind": "set_tags", "content": {"tags": {"b": "\udcff"}}}
    (queue / "000001.json").write_text(json.dumps(old))
    service = Service()
    sent = Sent(folder, service)
    sent.queue.add(*opened())
    sent.queue.add(EntryKind.LOG_SAMPLES, {"rows": [{"a\ud83d": ("\udcff", 1, None)}], "step": 0})
    assert sent.queue.load() == []
    sent.run()
    assert [content for _, content in service.records[1:]] == [
        {"rows": [{"a?": ["?", 1, None]}], "step": 0},
        {"tags": {"b": "?"}},
    ]


def test_a_record_that_cannot_be_encoded_is_left_out(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    service = Service(None, UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"))
    sent = Sent(folder, service, opened(), log(0), log(1)).run()
    assert steps(service) == [1] and len(sent.told) == 1 and "refused a record" in sent.told[0]


def test_records_arrive_in_order_and_the_id_is_written_once(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    outbox.add_key(folder, "other")  # has no effect: there is one
    service = Service()
    sent = Sent(folder, service, opened(), log(0), log(1)).run()
    assert service.records[0] == ("make", {**opened()[1]}) and steps(service) == [0, 1]
    assert sent.delivery.run_id == outbox.run_id(folder) == "run of k" and sent.told == []
    again = Sent(folder, service, opened(), log(2)).run()  # the run is continued
    assert [kind for kind, _ in service.records].count("make") == 1 and steps(service) == [0, 1, 2]
    assert again.told == []


def test_two_failures_in_a_row_are_told_once_and_so_is_the_end_of_them(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    away = OSError("it is away")
    service = Service(None, away, None, away, away, away, None)
    told = Sent(folder, service, opened(), log(0), log(1)).run().told
    assert steps(service) == [0, 1]
    assert told == [
        "A service at http://host takes no records (because it is away): training goes on, they are kept in "
        f"{folder.path}/outbox",
        "A service at http://host takes records again",
    ]


def test_a_refused_record_is_left_out_and_the_opening_is_asked_for_again(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    service = Service(Refused("no runs"), None, Refused("bad"), None, Refused("bad"), None)
    told = Sent(folder, service, opened(), log(0), log(1), log(2), log(3)).run().told
    assert steps(service) == [1, 3] and len(service.runs) == 1
    assert told == ["A service refused a record, which is left out: because bad"]  # the same message is told once


def test_a_run_that_the_service_refuses_is_told_as_that_until_it_takes_it(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    service = Service(*[Refused("too long")] * 10**6)
    sent = Sent(folder, service, opened())
    sent.delivery.start()
    sent.queue.wait_until_empty(PATIENCE_S)
    assert sent.queue.is_held and len(sent.queue) == 1
    assert sent.told == [
        "A service at http://host refuses the run, and with it its records (because too long): training goes on, "
        f"they are kept in {folder.path}/outbox"
    ]
    service.errors.clear()
    sent.queue.is_held = False
    sent.run()


def test_a_run_that_is_deleted_while_the_service_was_away_is_told_as_deleted(folder: Storage) -> None:
    outbox.add_run_id(folder, "mlflow", "one")
    away = OSError("it is away")
    sent = Sent(folder, Service(away, away, away, *[Deleted("no run")] * 10**6), log(0))
    sent.delivery.start()
    sent.queue.wait_until_empty(PATIENCE_S)
    assert sent.queue.is_held and [told.partition("(")[2].partition(")")[0] for told in sent.told] == [
        "because it is away",
        "because no run",
    ]
    sent.queue.close()


def test_no_run_takes_the_place_of_a_deleted_one_while_another_writer_has_records_of_it(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    outbox.add_run_id(folder, "mlflow", "gone")
    of_others = [outbox.entries_of(folder, "rank_0", service) for service in ("mlflow", "wandb")]
    for place in of_others:
        (place / "000001.json").write_text("{}")
    service = Service()
    sent = Sent(folder, service, opened(), writer="driver")
    sent.delivery.start()
    sent.queue.wait_until_empty(PATIENCE_S)
    assert sent.queue.is_held and not service.runs
    of_others[0].delete()  # what waits for another service is no matter
    sent.queue.is_held = False
    sent.run()
    assert outbox.run_id(folder) == "run of k"


def test_a_run_that_is_gone_is_made_anew_and_its_new_id_kept(folder: Storage) -> None:
    outbox.add_key(folder, "k")
    outbox.add_run_id(folder, "mlflow", "gone")
    told = Sent(folder, Service(), opened(), log(0)).run().told
    assert told == ["A service run gone is not in http://host: what comes now is recorded in a new one"]
    assert outbox.read_run_record(folder) == RunRecord({"mlflow": "run of k"}, "k")


def test_what_needs_a_run_that_another_process_makes_waits_for_it(folder: Storage, tmp_path: Path) -> None:
    parent = Storage.local(tmp_path / "sweep")
    outbox.add_key(folder, "k")
    service = Service()
    child = Sent(folder, service, opened(parent.path))
    other = Sent(folder, service, log(0), writer="rank_1")
    for each in (child, other):
        each.delivery.start()
        each.queue.save(PATIENCE_S)  # returns because the thread is stuck, and has written the entry
    assert service.records == [] and outbox.pending(folder) == 2
    outbox.add_run_id(parent, "mlflow", "the sweep")
    for each in (child, other):
        each.delivery.hurry()
        each.queue.wait_until_empty(PATIENCE_S)
        each.queue.close()
    assert [kind for kind, _ in service.records] == ["make", "log"]
    assert service.records[0][1]["parent"] == "the sweep"
    assert (child.told, other.told, outbox.pending(folder)) == ([], [], 0)


def test_entries_are_saved_as_files_and_read_back_in_order(folder: Storage) -> None:
    place = outbox.entries_of(folder, "rank_0", "wandb")
    queue = OutboxQueue(place)
    queue.set_stuck(True)
    for step in range(2):
        queue.add(*log(step))
    queue.save(PATIENCE_S)
    queue.save(PATIENCE_S)  # each is written once
    assert outbox.entry_names(place) == ["000001.json", "000002.json"]
    assert outbox.unfinished_writers(folder) == ["rank_0"] and outbox.pending(folder) == 2
    (place / "000003.json").write_text("{}")
    (place / "notes.txt").write_text("of a person")
    later = OutboxQueue(place)
    assert [file.path.rpartition("/")[2] for file in later.load()] == ["000003.json"] and len(later) == 2
    later.set_stuck(True)
    later.add(*log(2))
    later.save(PATIENCE_S)  # under a number of its own
    assert "000004.json" in outbox.entry_names(place)
    first = later.oldest()
    assert first and first.content["step"] == 0
    later.remove_oldest()
    assert "000001.json" not in outbox.entry_names(place) and len(later) == 2


def test_a_closed_queue_takes_nothing_and_wakes_who_waits_for_an_entry(folder: Storage) -> None:
    queue, found = OutboxQueue(folder), list[object]()
    waiting = threading.Thread(target=lambda: found.append(queue.oldest()))
    waiting.start()
    queue.close()
    waiting.join(PATIENCE_S)
    queue.add(*log(0))
    assert found == [None] and len(queue) == 0 and queue.oldest() is None


def test_a_record_of_a_run_has_ids_by_service_and_a_key(folder: Storage) -> None:
    assert outbox.read_run_record(folder) == RunRecord() and outbox.run_id(folder) is None
    outbox.add_run_id(folder, "wandb", "w")
    outbox.add_key(folder, "k")
    saved = json.loads((folder / "run.json").read_text())
    assert saved == {"mlflow_run": None, "wandb_run": "w", "key": "k"}
    assert (outbox.run_id(folder), outbox.run_id(folder, "wandb")) == (None, "w")
    (folder / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        outbox.add_key(folder, "k")


def test_pauses_double_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_FIRST_PAUSE_S", 0.25)
    pauses = delivery._pauses()
    assert [next(pauses) for _ in range(8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
