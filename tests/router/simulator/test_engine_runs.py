import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.simulator.engine_runs import Run


def step_ends(run):
    """When each step ends, one after the other."""
    ends, now_s = [], run.start_s
    for step in range(run.steps):
        now_s += run.first_step_s + step * run.growth_s
        ends.append(now_s)
    return ends


RUNS = st.builds(
    Run,
    start_s=st.floats(0, 1e4),
    steps=st.integers(1, 300),
    first_step_s=st.floats(1e-3, 1),
    growth_s=st.sampled_from([0.0, 1e-8, 1e-4, 1e-3]),
    requests=st.integers(0, 100),
    kv_tokens=st.integers(0, 10**6),
    grown_tokens=st.integers(0, 400),
)


@given(RUNS, st.floats(0, 1))
def test_the_closed_form_is_the_sum_of_the_steps(run, fraction):
    ends = step_ends(run)
    assert run.end_s == pytest.approx(ends[-1])
    contexts = [run.kv_tokens + run.grown_tokens * step for step in range(run.steps)]
    assert run.resident_kv_tokens(run.steps) == sum(contexts)
    at_s = run.start_s + fraction * (run.end_s - run.start_s)
    begun = run.steps_begun(at_s)
    assert begun == 1 or run.start_s + run.duration_s(begun - 1) < at_s + 1e-9
    assert run.start_s + run.duration_s(begun) > at_s - 1e-9
    assert run.steps_done(at_s) in (begun - 1, begun)


@given(RUNS)
def test_closed_form_holds_at_its_ends(run):
    assert run.steps_begun(run.start_s) == 1
    assert run.steps_done(run.start_s) == 0
    assert run.steps_begun(run.end_s + 1) == run.steps_done(run.end_s + 1) == run.steps
