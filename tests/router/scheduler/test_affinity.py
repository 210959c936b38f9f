"""Sessions and the ranks they are bound to."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.protocol.values import Scope
from router.scheduler.affinity import AffinityTable, Session
from support.chaos.fuzzing import examples
from support.values.builders import rank

TTL_S = 10.0


def session(name="s", model_name="m"):
    return Session(Scope(model_name), name)


def test_the_first_binding_wins_until_it_is_idle_for_its_time():
    table = AffinityTable(TTL_S, 10)
    assert table.find(session(), 0.0) is None
    assert table.bind(session(), rank(1), 0.0) == rank(1)
    assert table.bind(session(), rank(2), 9.0) == rank(1)
    assert table.find(session(), 18.9) == rank(1)
    assert table.find(session(), 19.0) is None
    assert table.bind(session(), rank(2), 19.0) == rank(2)
    assert table.expired == 1


def test_looking_does_not_keep_a_session_alive():
    table = AffinityTable(TTL_S, 10)
    table.bind(session(), rank(1), 0.0)
    assert table.find(session(), 9.9) == rank(1)
    assert table.find(session(), 10.0) is None


def test_a_binding_to_a_rank_that_is_gone_gives_way():
    table = AffinityTable(TTL_S, 10)
    table.bind(session(), rank(1), 0.0)
    assert table.bind(session(), rank(2), 1.0, gone=rank(1)) == rank(2)
    assert table.bind(session(), rank(3), 2.0, gone=rank(1)) == rank(2)


def test_the_same_name_in_another_scope_is_another_session():
    table = AffinityTable(TTL_S, 10)
    table.bind(session(), rank(1), 0.0)
    assert table.find(session(model_name="other"), 0.0) is None


def test_beyond_the_limit_the_one_idle_longest_is_forgotten():
    table = AffinityTable(TTL_S, 2)
    for name, now_s in (("a", 0.0), ("b", 1.0), ("a", 2.0), ("c", 3.0)):
        table.bind(session(name), rank(1), now_s)
    assert list(table) == [session("a"), session("c")]
    assert table.evicted == 1


class AgainstADict(RuleBasedStateMachine):
    """The table, beside a dictionary without limits that is searched whole."""

    def __init__(self):
        super().__init__()
        self.table = AffinityTable(TTL_S, 1000)
        self.model = {}
        self.now_s = 0.0

    def alive(self, name):
        at, until = self.model.get(name, (None, 0.0))
        return at if until > self.now_s else None

    @rule(passed_s=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def wait(self, passed_s):
        self.now_s += passed_s

    @rule(name=st.sampled_from("abc"))
    def find(self, name):
        assert self.table.find(session(name), self.now_s) == self.alive(name)

    @rule(name=st.sampled_from("abc"), to=st.integers(1, 3), gone=st.none() | st.integers(1, 3))
    def bind(self, name, to, gone):
        bound = self.alive(name)
        expected = rank(to) if bound is None or bound == (gone and rank(gone)) else bound
        found = self.table.bind(session(name), rank(to), self.now_s, gone and rank(gone))
        assert found == expected
        self.model[name] = (expected, self.now_s + TTL_S)

    @invariant()
    def holds(self):
        self.table.check_invariants()


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=examples(30), stateful_step_count=30)
