"""A reading through JSON: back as it was, NaN too, and nothing of another kind gets in."""

import json
import math
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privot.errors import ReleaseError
from privot.io import to_jsonable
from privot.measures.result import MetricResult, load_metric_results

PLAIN = MetricResult(
    "fid", 61.5, 0.4, 60000, "mnist", 60000, True, "Inception", "lower", "few", 12.5
)
KINDS = {"str": "text", "int": 3, "float": 2.5, "bool": True}
WRONG = {
    "str": [None, 1, 2.5, True, [], {}, ["x"]],
    "int": [None, 2.5, "3", True, [], {}],
    "float": [
        None,
        "2.5",
        "",
        "NaN ",
        " inf",
        "1e3",
        "infinity",
        True,
        False,
        [],
        {},
        [1.0],
        10**400,
    ],
    "bool": [None, 0, 1, "true", "", []],
}


def same(one, two):
    return [repr(each) for each in asdict(one).values()] == [
        repr(each) for each in asdict(two).values()
    ]  # NaN equals nothing


def through_json(reading):
    return MetricResult.from_json(
        json.loads(json.dumps(to_jsonable(asdict(reading)), allow_nan=False))
    )


@given(
    st.builds(
        MetricResult,
        st.text(),
        st.floats(),
        st.floats(),
        st.integers(0, 10**9),
        st.text(),
        st.integers(0, 10**9),
        st.booleans(),
        st.text(),
        st.sampled_from(["higher", "lower"]),
        st.text(),
        st.floats(),
    )
)
def test_a_reading_comes_back_as_it_was(reading):
    assert same(through_json(reading), reading)


def test_numbers_that_json_has_not_come_back_too():
    found = through_json(replace(PLAIN, value=math.inf, standard_error=math.nan, seconds=-math.inf))
    assert (found.value, found.seconds) == (math.inf, -math.inf)
    assert math.isnan(found.standard_error)
    assert (
        MetricResult.from_json({**asdict(PLAIN), "value": 61}).value == 61.0
    )  # a whole number is a number
    assert type(MetricResult.from_json({**asdict(PLAIN), "value": 61}).value) is float


def test_what_has_a_default_may_be_left_out():
    least = {
        key: value
        for key, value in asdict(PLAIN).items()
        if key not in ("protocol", "better", "warning", "seconds")
    }
    assert MetricResult.from_json(least) == replace(
        PLAIN, protocol="", better="higher", warning="", seconds=0.0
    )


@pytest.mark.parametrize(
    ("name", "junk"),
    [(each.name, junk) for each in fields(MetricResult) for junk in WRONG[each.type]],
)
def test_fields_of_the_wrong_kind_are_refused(name, junk):
    with pytest.raises(ReleaseError, match="not the result of a metric"):
        MetricResult.from_json({**asdict(PLAIN), name: junk})


@pytest.mark.parametrize(
    "junk",
    [None, 3, "x", [], [1], {}, {"name": "x"}, {**asdict(PLAIN), "more": 1}, {3: 1}],
    ids=repr,
)
def test_what_is_no_reading_is_refused(junk):
    with pytest.raises(ReleaseError, match="not the result of a metric"):
        MetricResult.from_json(junk)


def test_a_file_of_readings_is_read(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(
        json.dumps(
            to_jsonable(
                {
                    "subject": "x",
                    "results": [asdict(PLAIN), asdict(replace(PLAIN, standard_error=math.nan))],
                }
            )
        )
    )
    one, two = load_metric_results(path)
    assert one == PLAIN
    assert math.isnan(two.standard_error)
    path.write_text('{"results": []}')
    assert load_metric_results(path) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"results": 3}',
        '{"results": null}',
        '{"results": {"a": 1}}',
        '{"results": "abc"}',
        '{"results": [{"name": "x"}]}',
        "[" * 100_000,
        "\xff",
        '{"results": [NaN]}',
    ],
    ids=lambda text: text[:20],
)
def test_another_file_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReleaseError, match=r"r\.json is not a file of metric results"):
        load_metric_results(path)


def test_no_file_is_refused_by_its_name(tmp_path):
    for path in (tmp_path / "r.json", tmp_path):
        with pytest.raises(ReleaseError, match="is not a file of metric results"):
            load_metric_results(path)
