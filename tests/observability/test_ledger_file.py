"""The ledger as a file: it resumes, it is whole at every moment, and whatever happens to it changes no outcome."""

import fcntl
import json
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.catalogue import METRICS, Worker
from metrics.events import event_logger
from metrics.ledger import LARGEST_LEDGER_BYTES, Ledger, ledger_path
from metrics.observer import Outcome, Run, StageResult
from metrics.prometheus import PrometheusObserver
from stages.errors import Reason, RegistrationRejected, Stage, TransferRefused
from stages.model import Receipt
from tests.metrics.test_events import apart
from tests.metrics.watched import Accepting, run
from tests.observability.ledger_workers import Workers, workers
from tests.offers import hybrid

REFUSED = {"stage": "validate", "rule": "none", "reason": "mamba_cache_mode"}
RUN = Run("r", "hybrid", "worker", "0")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A ledger directory, whose ledgers this process gives up at the end."""
    path = tmp_path / "ledgers"
    yield path
    Ledger(path).close()


@pytest.fixture(scope="module")
def forked() -> Iterator[Workers]:
    """Worker processes at will."""
    with workers() as running:
        yield running


def restarted(directory: Path, **options: Any) -> Ledger:
    """The ledger of a process that begins where another ended."""
    Ledger(directory).close()
    return Ledger(directory, "i", **options)


def values(path: Path, name: str, **labels: str) -> list[float]:
    """The samples of a name with these labels, as another reader than ours reads them."""
    return [
        sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def told(lines: list[str]) -> list[dict[str, Any]]:
    """Events."""
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------------------------------------------------- it counts


def test_a_ledger_has_what_a_registry_has(directory: Path) -> None:
    """The same names, labels and values, counted from the same runs."""
    metrics = PrometheusObserver(clock=lambda: 5.0)
    for mode in ("align", "none"):
        run(hybrid(mode=mode), [metrics, Ledger(directory, "i", clock=lambda: 5.0)])
    assert (directory / "kvreg-i-0.prom").read_text() == metrics.text()


def test_three_refused_starts_are_three_refusals(directory: Path) -> None:
    """Each start goes on from the last, where a counter that begins anew would be 1, 1, 1."""
    for count in (1, 2, 3):
        run(hybrid(mode="none"), [restarted(directory)])
        assert values(directory / "kvreg-i-0.prom", "kvreg_rule_rejections_total", **REFUSED) == [count]
        assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [count]


def test_runs_of_one_process_are_each_counted_once(directory: Path) -> None:
    """A process that registers again, through the same observer or a new one, does not count its own file in again."""
    for _ in range(2):
        ledger = Ledger(directory, "i")
        for _ in range(2):
            run(hybrid(mode="none"), [ledger])
    assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [4]


def test_durations_and_times_resume_and_what_was_registered_does_not(directory: Path) -> None:
    """After a restart the histogram goes on and the last refusal is remembered; nothing is registered until it is."""
    run(hybrid(), [restarted(directory, clock=lambda: 10.0)])
    run(hybrid(mode="none"), [restarted(directory, clock=lambda: 20.0)])
    bypassed = restarted(directory, clock=lambda: 30.0)
    run(hybrid(mode="none"), [bypassed])
    bypassed.bypassed(RUN, RuntimeError())
    path = directory / "kvreg-i-0.prom"
    assert values(path, "kvreg_bypassed") == [1]
    run(hybrid(), [restarted(directory, clock=lambda: 40.0)], Accepting(lambda: TransferRefused(Reason.TRANSFER_REFUSED, {})))
    assert values(path, "kvreg_rule_last_rejection_timestamp_seconds", stage="validate") == [30]
    assert values(path, "kvreg_run_last_finished_timestamp_seconds", outcome="registered") == [10]
    assert values(path, "kvreg_run_last_started_timestamp_seconds") == [40]
    assert values(path, "kvreg_stage_duration_seconds_count", stage="edit") == [2]
    assert values(path, "kvreg_stage_duration_seconds_bucket", stage="edit", le="+Inf") == [2]
    assert values(path, "kvreg_registered_layers") == [0]
    assert values(path, "kvreg_bypassed") == [0]


def test_a_resumed_ledger_is_the_same_ledger(directory: Path) -> None:
    """Going on with nothing new, any number of times, changes no value: not the histogram's, not a label's."""
    run(replace(hybrid(), model_name='a\\"b\nc'), [restarted(directory, clock=lambda: 7.0)])
    path = directory / "kvreg-i-0.prom"
    before = path.read_text()
    for _ in range(3):
        restarted(directory).declare_found()
    registered = ("kvreg_registered_",)
    assert [line for line in path.read_text().splitlines() if not line.startswith(registered)] == [
        line for line in before.splitlines() if not line.startswith(registered)
    ]


class Reading:
    """An observer that reads the ledger at the start and the end of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: list[list[float]] = []

    def started(self, run: Run) -> None:
        self.read.append(values(self.path, "kvreg_run_last_started_timestamp_seconds"))

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None: ...

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        self.read.append(values(self.path, "kvreg_rule_rejections_total", **REFUSED))

    def recovered(self, run: Run, outcome: Outcome) -> None: ...

    def bypassed(self, run: Run, cause: BaseException) -> None: ...


def test_the_file_is_written_at_the_start_and_before_the_refusal_is_raised(directory: Path) -> None:
    """A run that never ends is seen to have begun, and whoever catches the error finds it counted."""
    reading = Reading(directory / "kvreg-i-0.prom")
    run(hybrid(mode="none"), [Ledger(directory, "i", clock=lambda: 9.0), reading])
    assert reading.read == [[9.0], [1.0]]


def test_recoveries_are_written(directory: Path) -> None:
    """A plan that was sent again is in the file at once."""
    ledger = Ledger(directory, "i")
    run(hybrid(), [ledger])
    ledger.recovered(RUN, Outcome.REGISTERED)
    assert values(directory / "kvreg-i-0.prom", "kvreg_recoveries_total", outcome="registered") == [1]


def test_each_worker_has_its_own_file(directory: Path) -> None:
    """Ranks of one engine, engines that share a directory, and the scheduler's own checks do not meet."""
    for instance in ("a", "b"):
        for rank in range(2):
            run(replace(hybrid(rank=rank), model_name=instance), [Ledger(directory, instance)])
    Ledger(directory, "a").started(Run("r", "hybrid", "scheduler", "0"))
    assert sorted(path.name for path in directory.glob("*.prom")) == [
        "kvreg-a-0.prom",
        "kvreg-a-1.prom",
        "kvreg-a-scheduler-0.prom",
        "kvreg-b-0.prom",
        "kvreg-b-1.prom",
    ]


def test_a_file_holds_one_models_series(directory: Path) -> None:
    """Another model on the same worker starts its own counts; the one that left is not served for ever, and the log says so."""
    logger, lines = apart()
    run(hybrid(mode="none"), [restarted(directory)])
    run(replace(hybrid(), model_name="next"), [restarted(directory, logger=event_logger(logger))])
    path = directory / "kvreg-i-0.prom"
    assert values(path, "kvreg_runs_total", model_name="hybrid") == []
    assert values(path, "kvreg_runs_total", model_name="next", outcome="registered") == [1]
    (resumed,) = told(lines.lines)
    assert (resumed["event"], resumed["model_name"], resumed["file"]) == ("ledger.resumed", "next", "kvreg-i-0.prom")
    assert resumed["dropped_series"] > 200


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "", ".", "..", "x" * 500, "näme\n", "\udc80", "-", "a b"])
def test_any_name_is_a_file_in_the_directory(directory: Path, name: str) -> None:
    """An instance or worker of any name has one file, inside the directory, that no other name has."""
    paths = {ledger_path(directory, name, Worker("", "worker", "0")), ledger_path(directory, "i", Worker("", "worker", name))}
    others = {ledger_path(directory, other, Worker("", "worker", "0")) for other in ("a_b", "a.b", "_", "x" * 80, "x" * 501, "n_me_")}
    for path in paths:
        assert path.parent == directory
        assert path.suffix == ".prom"
        assert len(path.name) < 250
    assert not paths & others


# ------------------------------------------------------------------------------------------------ before the first run


def test_series_are_at_zero_before_the_first_run(directory: Path) -> None:
    """What a plug-in declares while the model loads is every series there will be, and the first refusal adds one."""
    Ledger(directory, "i").declare([Worker("hybrid", "worker", "0")])
    path = directory / "kvreg-i-0.prom"
    assert values(path, "kvreg_rule_rejections_total", **REFUSED) == [0]
    assert values(path, "kvreg_build_info") == [1]
    declared = {line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()}
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert {line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()} == declared
    assert values(path, "kvreg_rule_rejections_total", **REFUSED) == [1]


def test_declaring_loses_no_count(directory: Path) -> None:
    """A start that guesses the model's name wrong, or knows none, keeps what is there until a run says whose it is."""
    run(hybrid(mode="none"), [restarted(directory)])
    Ledger(directory).close()
    Ledger(directory, "i").declare([Worker("guessed", "worker", "0")])
    assert Ledger(directory, "i").declare_found() == 1
    path = directory / "kvreg-i-0.prom"
    assert values(path, "kvreg_runs_total", model_name="hybrid", outcome="rejected") == [1]
    assert values(path, "kvreg_runs_total", model_name="guessed", outcome="rejected") == [0]
    assert values(path, "kvreg_registered_layers", model_name="hybrid") == [0]
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert values(path, "kvreg_runs_total", outcome="rejected") == [2]


def test_declaring_leaves_a_running_worker_alone(directory: Path, forked: Workers) -> None:
    """A process that loads plug-ins while a worker runs, such as another API server, touches nothing and reports nothing."""
    pid = forked.start(directory, mode="align")
    assert forked.outcome(pid) == {"outcome": "registered"}
    path = directory / "kvreg-i-0.prom"
    logger, lines = apart()
    Ledger(directory, "i", logger=event_logger(logger)).declare([Worker("hybrid", "worker", "0")])
    assert values(path, "kvreg_registered_layers") == [4]
    assert lines.lines == []
    run(hybrid(mode="none"), [Ledger(directory / "own", "i")])
    Ledger(directory / "own", "i").declare([Worker("hybrid", "worker", "0")])
    assert values(directory / "own" / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [1]
    Ledger(directory / "own").close()
    forked.kill(pid)


# ------------------------------------------------------------------------------------------------- what can be in it


WHOLE = 'kvreg_runs_total{model_name="hybrid",outcome="rejected",role="worker",worker_id="0"} '

FOREIGN = {
    "binary": bytes(range(256)) * 10,
    "html": b"<html><body>not found</body></html>",
    "cut in a label": (WHOLE + "3\n" + WHOLE[:40]).encode(),
    "cut before the value": WHOLE.encode(),
    "no number": (WHOLE + "three\n").encode(),
    "no utf-8": (WHOLE + "3\n").encode() + b"\xff\xfe",
    "too large": b"#" * (LARGEST_LEDGER_BYTES + 1),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_broken_file_is_put_aside_and_counting_begins_anew(directory: Path, content: bytes) -> None:
    """The refusal is raised and counted, the log says what happened, and the old content is kept for whoever wonders."""
    directory.mkdir()
    path = directory / "kvreg-i-0.prom"
    path.write_bytes(content)
    logger, lines = apart()
    assert isinstance(run(hybrid(mode="none"), [Ledger(directory, "i", logger=event_logger(logger))]), RegistrationRejected)
    assert values(path, "kvreg_runs_total", outcome="rejected") == [1]
    assert (directory / "kvreg-i-0.prom.broken").read_bytes() == content
    (resumed,) = told(lines.lines)
    assert (resumed["event"], resumed["level"], resumed["series"]) == ("ledger.resumed", "warning", 0)
    assert resumed["error_type"] in {"ValueError", "UnicodeDecodeError"}


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "-Inf"])
def test_a_value_that_no_counter_can_have_is_not_taken(directory: Path, value: str) -> None:
    """One impossible number does not poison the counter for ever, nor the other numbers."""
    directory.mkdir()
    (directory / "kvreg-i-0.prom").write_text(WHOLE + value + "\n" + WHOLE.replace("rejected", "failed") + "3\n")
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [1]
    assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="failed") == [3]


def test_a_time_in_the_future_becomes_now(directory: Path) -> None:
    """A clock that ran ahead when it refused does not page until the day it had."""
    run(hybrid(mode="none"), [restarted(directory, clock=lambda: 5e9)])
    run(hybrid(), [restarted(directory, clock=lambda: 100.0)])
    assert values(directory / "kvreg-i-0.prom", "kvreg_rule_last_rejection_timestamp_seconds", stage="validate") == [100]


def test_series_of_no_metric_of_ours_are_not_taken(directory: Path) -> None:
    """Whatever someone writes into the file, the labels stay the closed sets they are."""
    directory.mkdir()
    path = directory / "kvreg-i-0.prom"
    more = [
        "node_load1 3",
        WHOLE.replace("rejected", "made up") + "3",
        WHOLE.replace("outcome", "layer") + "3",
        'kvreg_build_info{version="9"} 1',
    ]
    path.write_text("\n".join(["# EOF", *more, WHOLE + "3", ""]))
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert values(path, "kvreg_runs_total", outcome="rejected") == [4]
    assert {
        line.split("{")[0] for line in path.read_text().splitlines() if "made up" in line or "layer=" in line or "node" in line
    } == set()
    assert len(values(path, "kvreg_build_info")) == 1


def test_a_histogram_of_other_bounds_is_taken_over(directory: Path) -> None:
    """A release with other buckets goes on counting: what was observed moves to the bucket that holds it for sure."""
    directory.mkdir()
    path = directory / "kvreg-i-0.prom"
    labels = 'model_name="hybrid",role="worker",stage="edit",worker_id="0"'
    name = "kvreg_stage_duration_seconds"
    path.write_text(
        "".join(f'{name}_bucket{{le="{le}",{labels}}} {count}\n' for le, count in (("0.2", 2), ("40", 5), ("+Inf", 6)))
        + f"{name}_count{{{labels}}} 6\n{name}_sum{{{labels}}} 100.5\n"
    )
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    bucket = {le: values(path, f"{name}_bucket", stage="edit", le=le)[0] for le in ("0.1", "0.25", "30.0", "60.0", "300.0", "+Inf")}
    assert bucket == {"0.1": 0, "0.25": 2, "30.0": 2, "60.0": 5, "300.0": 5, "+Inf": 6}
    assert values(path, f"{name}_count", stage="edit") == [6]
    assert values(path, f"{name}_sum", stage="edit") == [100.5]


# ----------------------------------------------------------------------------------------- what can be in its place


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is not the ledger's."""
    path = tmp_path / "outside"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("place", ["kvreg-i-0.prom", "kvreg-i-0.prom.tmp", "kvreg-i-0.lock"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "device"])
def test_whatever_lies_in_its_place_changes_no_outcome(directory: Path, outside: Path, place: str, kind: str) -> None:
    """A directory, a pipe nobody reads, a link, a full device: the refusal is raised, nothing hangs or is written through."""
    directory.mkdir()
    path = directory / place
    if kind == "directory":
        (path / "full").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else "/dev/full")
    logger, lines = apart()
    ledger = Ledger(directory, "i", logger=event_logger(logger))
    assert isinstance(run(hybrid(mode="none"), [ledger]), RegistrationRejected)
    assert isinstance(run(hybrid(), [ledger]), Receipt)
    assert outside.read_text() == "precious"
    written = (directory / "kvreg-i-0.prom").is_file() and values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [
        1
    ]
    assert written or "ledger.write_failed" in {event["event"] for event in told(lines.lines)}


@pytest.fixture
def nobody() -> Iterator[None]:
    """For root: the rights of nobody, as most engines have."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_directory_that_cannot_be_written_changes_no_outcome(directory: Path, request: pytest.FixtureRequest) -> None:
    """Read-only, or somebody else's: the run ends as it would have, and each write that failed is logged with its error."""
    directory.mkdir(mode=0o555)
    request.getfixturevalue("nobody")
    logger, lines = apart()
    assert isinstance(run(hybrid(mode="none"), [Ledger(directory, "i", logger=event_logger(logger))]), RegistrationRejected)
    failed = told(lines.lines)
    assert [(event["event"], event["error_code"], event["level"]) for event in failed] == [("ledger.write_failed", "EACCES", "error")] * 2
    assert {(event["worker_id"], event["model_name"], event["file"]) for event in failed} == {("0", "hybrid", "kvreg-i-0.prom")}
    assert len({event["run_id"] for event in failed}) == 1


def test_a_directory_that_cannot_be_made_changes_no_outcome(outside: Path) -> None:
    """Below a file, or below /proc, there is no directory to be had."""
    for place in (outside / "ledgers", Path("/proc/kvreg")):
        logger, lines = apart()
        assert isinstance(run(hybrid(), [Ledger(place, "i", logger=event_logger(logger))]), Receipt)
        assert [event["event"] for event in told(lines.lines)] == ["ledger.write_failed"] * 2


def test_what_could_not_be_written_is_written_when_it_can(directory: Path, outside: Path) -> None:
    """The disk is repaired while the engine lives: the next write has everything since its start."""
    directory.mkdir()
    blocked = directory / "kvreg-i-0.prom.tmp"
    (blocked / "full").mkdir(parents=True)
    ledger = Ledger(directory, "i")
    run(hybrid(mode="none"), [ledger])
    (blocked / "full").rmdir()
    blocked.rmdir()
    run(hybrid(mode="none"), [ledger])
    assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [2]


def test_a_full_disk_changes_no_outcome_and_keeps_the_old_text(directory: Path, forked: Workers) -> None:
    """The worker is refused as it would have been; the file is what it was, and no half of a new one is left."""
    for file_bytes in (None, 1000):
        pid = forked.start(directory, file_bytes=file_bytes)
        assert forked.outcome(pid) == {"outcome": "RegistrationRejected"}
        forked.kill(pid)
    assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [1]
    assert sorted(path.name for path in directory.iterdir()) == ["kvreg-i-0.lock", "kvreg-i-0.prom"]


def test_a_file_for_every_reader_and_no_rest(directory: Path) -> None:
    """The exporter is another user: whatever the engine's umask, it can read; and it never meets a file half written."""
    before = os.umask(0o077)
    try:
        run(hybrid(), [Ledger(directory, "i")])
    finally:
        os.umask(before)
    assert stat.S_IMODE((directory / "kvreg-i-0.prom").stat().st_mode) == 0o644
    assert sorted(path.name for path in directory.iterdir()) == ["kvreg-i-0.lock", "kvreg-i-0.prom"]


def test_the_rest_of_a_killed_writer_is_no_obstacle(directory: Path) -> None:
    """A worker that died while it wrote left a part; the next start replaces it."""
    directory.mkdir()
    (directory / "kvreg-i-0.prom.tmp").write_text(WHOLE[:30])
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert sorted(path.name for path in directory.iterdir()) == ["kvreg-i-0.lock", "kvreg-i-0.prom"]


# ------------------------------------------------------------------------------------------------------- one writer


def test_a_second_writer_logs_and_does_not_write(directory: Path) -> None:
    """Two engines under one name: the second leaves the first one's file alone, and goes on."""
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    Ledger(directory).close()
    path = directory / "kvreg-i-0.prom"
    before = path.read_text()
    logger, lines = apart()
    ledger = Ledger(directory, "i", logger=event_logger(logger))
    with (directory / "kvreg-i-0.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert isinstance(run(hybrid(mode="none"), [ledger]), RegistrationRejected)
        assert path.read_text() == before
    failed = told(lines.lines)
    assert [(event["event"], event["error_type"]) for event in failed] == [("ledger.write_failed", "BlockingIOError")] * 2
    run(hybrid(mode="none"), [ledger])
    assert values(path, "kvreg_runs_total", outcome="rejected") == [3]


def test_a_process_a_worker_left_behind_does_not_keep_its_ledger(directory: Path, forked: Workers) -> None:
    """A dead worker's forked child still runs: the worker that is started next writes all the same."""
    first = forked.start(directory, fork=True)
    child = int(forked.outcome(first)["child"])
    try:
        forked.kill(first)
        second = forked.start(directory)
        forked.outcome(second)
        assert values(directory / "kvreg-i-0.prom", "kvreg_runs_total", outcome="rejected") == [2]
        forked.kill(second)
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_a_pod_of_another_name_left_is_taken_over(directory: Path) -> None:
    """A new pod writes to the same host: one file a worker, or its exporter serves the old one and hides the new refusals."""
    for instance in ("pod-a", "pod-b", "pod-c"):
        for rank in range(2):
            run(hybrid(rank=rank, mode="none"), [Ledger(directory, instance)])
        Ledger(directory).close()
    assert sorted(path.name for path in directory.glob("*.prom")) == ["kvreg-pod-c-0.prom", "kvreg-pod-c-1.prom"]
    assert sorted(path.name for path in directory.glob("*.lock")) == ["kvreg-pod-c-0.lock", "kvreg-pod-c-1.lock"]
    for rank in range(2):
        assert values(directory / f"kvreg-pod-c-{rank}.prom", "kvreg_rule_rejections_total", **REFUSED) == [3]


def test_only_the_same_workers_ledger_is_taken_over(directory: Path) -> None:
    """Another model's, another role's, a broken one and whatever else lies there stay."""
    run(replace(hybrid(), model_name="other"), [Ledger(directory, "a")])
    Ledger(directory, "a").started(Run("r", "hybrid", "scheduler", "0"))
    (directory / "kvreg-broken-0.prom").write_bytes(b"\xff" + WHOLE.encode())
    (directory / "kvreg-empty-0.prom").touch()
    (directory / "kvreg-folder-0.prom").mkdir()
    Ledger(directory).close()
    run(hybrid(), [Ledger(directory, "b")])
    assert sorted(path.name for path in directory.glob("*.prom")) == [
        "kvreg-a-0.prom",
        "kvreg-a-scheduler-0.prom",
        "kvreg-b-0.prom",
        "kvreg-broken-0.prom",
        "kvreg-empty-0.prom",
        "kvreg-folder-0.prom",
    ]
    assert values(directory / "kvreg-b-0.prom", "kvreg_runs_total", outcome="registered") == [1]


def test_two_living_engines_with_one_worker_id_are_logged(directory: Path, forked: Workers) -> None:
    """An exporter would show only one of them: the log names the other's file, and each keeps its own."""
    pid = forked.start(directory, instance="a")
    forked.outcome(pid)
    logger, lines = apart()
    run(hybrid(mode="none"), [Ledger(directory, "b", logger=event_logger(logger))])
    (failed,) = told(lines.lines)
    assert (failed["event"], failed["error_type"], failed["file"]) == ("ledger.write_failed", "WorkerIdTaken", "kvreg-a-0.prom")
    forked.kill(pid)
    for instance in ("a", "b"):
        assert values(directory / f"kvreg-{instance}-0.prom", "kvreg_runs_total", outcome="rejected") == [1]


def test_every_metric_that_counts_is_resumed() -> None:
    """Only what is true of a living process starts anew."""
    anew = {metric.name for metric in METRICS if not metric.resumes}
    assert anew == {"kvreg_registered_groups", "kvreg_registered_layers", "kvreg_registered_bytes", "kvreg_bypassed", "kvreg_build_info"}
