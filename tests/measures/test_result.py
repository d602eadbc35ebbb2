"""A result through JSON: back as it was, NaN too, and nothing of another kind gets in."""

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
NUMBERS_AS_TEXT = ["2.5", "", "NaN ", " inf", "1e3", "infinity"]
WRONG = {
    "str": [None, 1, 2.5, True, [], {}, ["x"]],
    "int": [None, 2.5, "3", True, [], {}],
    "float": [None, *NUMBERS_AS_TEXT, True, False, [], {}, [1.0], 10**400],
    "bool": [None, 0, 1, "true", "", []],
}
OPTIONAL = {"protocol": "", "better": "higher", "warning": "", "seconds": 0.0}
COUNTS = st.integers(0, 10**9)


def send_through_json(result):
    text = json.dumps(to_jsonable(asdict(result)), allow_nan=False)
    return MetricResult.from_json(json.loads(text))


@given(
    st.builds(
        MetricResult,
        st.text(),
        st.floats(),
        st.floats(),
        COUNTS,
        st.text(),
        COUNTS,
        st.booleans(),
        st.text(),
        st.sampled_from(["higher", "lower"]),
        st.text(),
        st.floats(),
    )
)
def test_a_result_comes_back_as_it_was(result):
    assert repr(send_through_json(result)) == repr(result)  # NaN equals nothing


def test_numbers_that_json_lacks_come_back_and_a_whole_number_is_a_number():
    odd = replace(PLAIN, value=math.inf, standard_error=math.nan, seconds=-math.inf)
    assert repr(send_through_json(odd)) == repr(odd)
    assert repr(MetricResult.from_json({**asdict(PLAIN), "value": 61}).value) == "61.0"


def test_what_has_a_default_may_be_left_out():
    least = {key: value for key, value in asdict(PLAIN).items() if key not in OPTIONAL}
    assert MetricResult.from_json(least) == replace(PLAIN, **OPTIONAL)


@pytest.mark.parametrize(
    "junk",
    [
        *(
            {**asdict(PLAIN), field.name: value}
            for field in fields(MetricResult)
            for value in WRONG[field.type]
        ),
        *(None, 3, "x", [], [1], {}, {"name": "x"}, {**asdict(PLAIN), "more": 1}, {3: 1}),
    ],
)
def test_refuses_what_is_no_result(junk):
    with pytest.raises(ReleaseError, match="not the result of a metric"):
        MetricResult.from_json(junk)


def test_a_file_of_results_is_read(tmp_path):
    path = tmp_path / "r.json"
    results = [PLAIN, replace(PLAIN, standard_error=math.nan)]
    facts = {"subject": "x", "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(to_jsonable(facts)))
    assert repr(load_metric_results(path)) == repr(results)
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
