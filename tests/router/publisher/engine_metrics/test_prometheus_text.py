"""Lines of Prometheus's text format."""

import pytest

from router.errors import WireError
from router.publisher.engine_metrics.prometheus_text import Sample, parse_samples


def parsed(text, *names):
    return list(parse_samples(text, names or ("a",)))


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("a 1", {}, 1.0),
        ("a{} 1.5e3", {}, 1500.0),
        ('a{x="1",y="two words"}   -2 1700000000000', {"x": "1", "y": "two words"}, -2.0),
        ('a{x="1",} 3', {"x": "1"}, 3.0),
        ('a{ x = "1" , y="}" } 4', {"x": "1", "y": "}"}, 4.0),
        (r'a{x="say \"hi\"\\\n"} 5', {"x": 'say "hi"\\\n'}, 5.0),
        ('a 6 # {trace="1"} 0.5', {}, 6.0),
    ],
)
def test_samples(line, labels, value):
    assert parsed(line) == [Sample("a", labels, value)]


def test_only_what_is_wanted_is_read():
    text = '# HELP a text\n# TYPE a counter\n\na 1\nab 2\na_total{ nonsense\nb{x="1"} 3\n'
    assert [sample.name for sample in parsed(text, "a", "b")] == ["a", "b"]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_non_numeric_samples_are_omitted(value):
    assert parsed(f"a {value}\na 1") == [Sample("a", {}, 1.0)]


@pytest.mark.parametrize(
    "line", ["a", "a x", 'a{x="1" 1', "a{x=1} 1", 'a{x="1"}', "a 1 x", 'a{"} 1']
)
def test_a_malformed_sample_is_named(line):
    with pytest.raises(WireError, match="line 2 is no sample"):
        parsed(f"b 1\n{line}")
