"""Values that are read back from text: any text is read or refused, and what is written is read back as it was."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics.catalogue import METRICS, STAGE_DURATION, Worker
from metrics.series import Series, worker_of_text
from metrics.tally import declare

WORDS = st.text(max_size=20)
SERIES = st.sampled_from(
    [(metric, labels) for metric in METRICS if metric.resumes and metric.type != "histogram" for labels in metric.series]
)


@given(st.tuples(WORDS, WORDS, WORDS), st.lists(st.tuples(SERIES, st.floats(0, 1e12))), st.lists(st.floats(0, 1e4)))
def test_what_was_written_is_read_back(
    names: tuple[str, str, str], values: list[tuple[tuple[object, ...], float]], durations: list[float]
) -> None:
    """Whatever the model is called and whatever was counted, the next process has it: our reader, and prometheus-client's."""
    worker = Worker(*names).label_values
    written = Series()
    for (metric, labels), value in values:
        written.put(metric, worker + labels, value)  # type: ignore[arg-type, operator]
    for duration in durations:
        written.observe(STAGE_DURATION, (*worker, "edit"), duration)
    text = written.text()
    read = Series()
    read.resume(text, math.inf)
    assert read.text() == text
    seen = {
        tuple(sample.labels[name] for name in ("model_name", "role", "worker_id"))
        for f in text_string_to_metric_families(text)
        for sample in f.samples
    }
    assert seen <= {worker}
    assert worker_of_text(text) == (Worker(*worker) if seen else None)


@given(st.tuples(WORDS, WORDS, WORDS), st.lists(st.tuples(SERIES, st.floats())), st.lists(st.floats(0, 1e4)))
def test_the_text_is_prometheus_client_s_own(
    names: tuple[str, str, str], values: list[tuple[tuple[object, ...], float]], durations: list[float]
) -> None:
    """What we write is letter by letter what the reference client would, whatever the model's name and the numbers are."""
    worker = Worker(*names).label_values
    written = Series()
    declare(written, Worker(*names))
    for (metric, labels), value in values:
        written.put(metric, worker + labels, value)  # type: ignore[arg-type, operator]
    for duration in durations:
        written.observe(STAGE_DURATION, (*worker, "edit"), duration)
    registry = CollectorRegistry()
    registry.register(written)
    assert written.text() == generate_latest(registry).decode()


@given(st.one_of(st.text(), st.from_regex(r'(kvreg_runs_total\{(model_name="(\\.|[^"])*",?)*\} [0-9.eE+-]*\n?)*')))
def test_any_text_is_read_or_refused(text: str) -> None:
    """A ledger that something else has written to is refused with ValueError, or adds nothing that is not ours."""
    series = Series()
    with suppress(ValueError):
        series.resume(text, 0.0)
    assert {sample.name for family in series.collect() for sample in family.samples} == set()


@given(st.data())
def test_a_cut_text_never_counts_more(data: st.DataObject) -> None:
    """However much of a ledger is left, no counter comes out larger than it was."""
    written = Series()
    declare(written, Worker("m", "worker", "0"))
    for metric in METRICS:
        if metric.type == "counter":
            written.add(metric, ("m", "worker", "0", *metric.series[0]), 1234)
    text = written.text()
    read = Series()
    try:
        read.resume(text[: data.draw(st.integers(0, len(text)))], 0.0)
    except ValueError:
        return
    assert max((sample.value for family in read.collect() for sample in family.samples), default=0) <= 1234


@pytest.mark.parametrize(
    "text", ["", "# HELP only\n", "kvreg_runs_total 1\n", 'up{job="x"} 1\n', "{}\n", 'kvreg_runs_total{model_name="m"', "\x00"]
)
def test_a_text_without_a_worker_is_nobodys(text: str) -> None:
    """Only a file that begins with our worker's labels is taken for a worker's ledger."""
    assert worker_of_text(text) is None
