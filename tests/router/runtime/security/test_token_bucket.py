from hypothesis import given
from hypothesis import strategies as st

from router.runtime.security.guard import TokenBucket


class NaiveBucket:
    """The definition: what is in it, refilled at every look."""

    def __init__(self, rate, burst):
        self.rate, self.burst = rate, max(burst, 1.0)
        self.level, self.seen_s = self.burst, 0.0

    def wait_s(self, now_s):
        self.level = min(self.burst, self.level + (now_s - self.seen_s) * self.rate)
        self.seen_s = now_s
        return max(0.0, (1.0 - self.level) / self.rate)

    def take(self):
        self.level -= 1.0


@given(st.floats(0.1, 100), st.floats(0, 50), st.lists(st.floats(0, 3), max_size=60))
def test_token_bucket_equals_its_definition(rate, burst, pauses_s):
    bucket, naive, now_s = TokenBucket(rate, burst), NaiveBucket(rate, burst), 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s, expected_s = bucket.wait_s(now_s), naive.wait_s(now_s)
        assert abs(wait_s - expected_s) < 1e-6
        if wait_s < 1e-9:
            bucket.take(now_s)
            naive.take()


def test_zero_rate_admits_every_request():
    bucket = TokenBucket(0.0, 0.0)
    for _ in range(1000):
        bucket.take(0.0)
    assert bucket.wait_s(0.0) == 0.0


def test_unchanged_limits_keep_spent_tokens():
    bucket = TokenBucket(1.0, 1.0)
    bucket.take(0.0)
    assert bucket.resized(1.0, 1.0).wait_s(0.0) > 0
    assert bucket.resized(2.0, 1.0).wait_s(0.0) == 0
