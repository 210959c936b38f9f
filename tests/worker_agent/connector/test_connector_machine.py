"""Leader, worker and scheduler together, in any order of events: in the end all blocks are back.

After every step the engine has looked at every byte that it read.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.protocol.values import Tier
from support.blocks.connectors import groups_of
from support.chaos.fuzzing import examples
from support.engines.connector_engine import Engine

LAYOUTS = [
    [(4, None)],
    [(4, None), (4, 9)],
    [(4, 6), (4, None), (4, 6)],
    [(4, None), (8, 12)],
    [(8, None), (4, 5), (4, 11)],
    [(4, None), (4, None), (4, 3)],
]
"""Block size and window of each group."""

PROMPTS = [range(9), range(12), [*range(9), 77, 78, 79, 80, 81], range(200, 221)]


class ConnectorMachine(RuleBasedStateMachine):
    """Any order of what engines, tiers and reports do."""

    def __init__(self):
        super().__init__()
        self.engine = None
        self.keys = 0

    @initialize(layout=st.sampled_from(LAYOUTS))
    def begin(self, layout):
        blocks = 6 * len(layout)
        self.engine = Engine(blocks, blocks + 3, groups=groups_of(layout))

    @rule(prompt=st.sampled_from(PROMPTS))
    def add(self, prompt):
        self.keys += 1
        self.engine.add(self.keys if self.keys % 2 else str(self.keys), prompt)

    @rule(chunk=st.sampled_from([1, 4, 7, 30]), choice=st.randoms(), is_idle=st.booleans())
    def step(self, chunk, choice, is_idle):
        skipped = {key for key in self.engine.requests if choice.random() < 0.2}
        self.engine.step(chunk, skipped)
        if is_idle:
            self.engine.quiesce()

    @rule(choice=st.randoms(), is_preempted=st.booleans())
    def end(self, choice, is_preempted):
        if self.engine.requests:
            key = choice.choice(list(self.engine.requests))
            (self.engine.preempt if is_preempted else self.engine.finish)(key)

    @rule(tier=st.sampled_from([Tier.HOST, Tier.DISK]), block=st.integers(0, 5))
    def corrupt(self, tier, block):
        self.engine.corrupt(tier, block)

    @rule(is_lost=st.booleans())
    def disturb(self, is_lost):
        self.engine.lost_reports += is_lost
        self.engine.doubled_reports += not is_lost

    @rule(chance=st.integers(0, 4))
    def lose_worker(self, chance):
        if not chance:
            self.engine.lose_worker()

    @rule(seconds=st.sampled_from([0.5, 2.0, 40.0]))
    def wait(self, seconds):
        self.engine.now_s += seconds

    @invariant()
    def holds(self):
        if self.engine is not None:
            self.engine.check()

    def teardown(self):
        if self.engine is not None:
            self.engine.drain()
            self.engine.close()


TestConnectorMachine = ConnectorMachine.TestCase
TestConnectorMachine.settings = settings(max_examples=examples(12), stateful_step_count=40)
