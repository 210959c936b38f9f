"""Parts of the client that need no router."""

import subprocess
import sys
from array import array
from random import Random

import msgspec
import numpy as np
import pytest

from router.api.errors import DrainingError
from router.client.bodies import EncodedTokens, encoded
from router.client.calls import OVERLAP_SCORES, SELECT, Question, received_fields
from router.client.errors import RefusedError, rebuilt
from router.client.settings import Retries
from router.core.errors import MissingRequestIdError
from router.errors import InvalidFieldError
from router.protocol.replies import RemovedRanks
from router.protocol.requests import RankTarget, SelectRequest
from router.runtime.process.errors import BodyTooLargeError
from router.runtime.security.errors import RateLimitedError, UnauthenticatedError
from router.scheduler.errors import NoEndpointsError
from router.scheduler.queue.errors import QueueFullError

LONG = list(range(100))


@pytest.mark.parametrize(
    "error",
    [
        InvalidFieldError("a", "b", "c", status=422),
        MissingRequestIdError(),
        BodyTooLargeError(5),
        NoEndpointsError("m", "g", "r", [RemovedRanks("pinned_worker", 1, ["1.0"])]),
        QueueFullError("default", "requests", 5, 4, 1.5),
        DrainingError(),
        UnauthenticatedError("missing"),
        RateLimitedError("a", 5.0, 0.25),
    ],
    ids=lambda error: error.code,
)
def test_errors_come_back_as_they_were(error):
    body = msgspec.json.decode(msgspec.json.encode(error.body()))
    again = rebuilt(body, error.http_status, None)
    assert (type(again), str(again)) == (type(error), str(error))
    assert (again.http_status, again.retry_after_s) == (error.http_status, error.retry_after_s)
    assert again.body() == error.body()


@pytest.mark.parametrize("body", [{"code": "novel", "error": "so", "x": 1}, {}, [1], "no"])
def test_unknown_refusal_becomes_a_refused_error(body):
    error = rebuilt(body, 418, "7")
    assert isinstance(error, RefusedError)
    assert (error.http_status, error.retry_after_s) == (418, 7.0)
    assert error.code == ("novel" if "novel" in str(body) else "refused")


def question(call=SELECT, **fields):
    return Question(call, received_fields(SelectRequest(**fields)), fields.get("request_id"))


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda t: array("l", t)])
def test_long_prompts_go_as_bytes_and_the_rest_as_parameters(make):
    asked = question(
        token_ids=make(LONG), request_id="r", model_name="m", explain=True,
        pinned_worker=RankTarget(1),
    )  # fmt: skip
    body = encoded(asked)
    assert np.frombuffer(body.content, "<u4").tolist() == LONG
    assert body.media_type == "application/octet-stream"
    assert body.parameters.pop("pinned_worker") in (
        '{"worker_id":1,"dp_rank":null}', '{"worker_id":1}',
    )  # fmt: skip
    assert body.parameters == {"model_name": "m", "explain": "true"}


@pytest.mark.parametrize(
    "tokens",
    [LONG[:10], [*LONG, -1], [*LONG, 1 << 32], [*LONG, 1.5], np.array([*LONG, -1]),
     np.array(LONG) * 1.0],
    ids=["short", "negative", "large", "float", "negative array", "float array"],
)  # fmt: skip
def test_short_or_unfit_prompts_are_sent_as_json(tokens):
    body = encoded(question(token_ids=tokens))
    assert body.media_type == "application/json"
    assert msgspec.json.decode(body.content) == {"token_ids": list(tokens)}


def test_written_tokens_go_as_they_are():
    fields = {"request_id": "r", "model_name": "m"}
    content = encoded(question(token_ids=EncodedTokens(b"[1,  2]"), **fields)).content
    assert content == b'{"token_ids":[1,  2],"model_name":"m"}'


def test_encoded_tokens_are_decoded_on_first_access():
    tokens = EncodedTokens(b"[1, 2, 3]")
    assert (list(tokens), len(tokens), tokens[1], tokens[1:]) == ([1, 2, 3], 3, 2, [2, 3])
    with pytest.raises(InvalidFieldError) as caught:
        EncodedTokens(b"[1, -2]", "prompt").tolist()
    assert (caught.value.field, caught.value.http_status) == ("prompt", 422)


def test_other_routes_take_json():
    assert encoded(question(OVERLAP_SCORES, token_ids=LONG)).media_type == "application/json"


def test_unset_fields_are_not_sent():
    assert received_fields(SelectRequest(token_ids=[], strict_priority=1)) == {
        "token_ids": [], "strict_priority": 1,
    }  # fmt: skip


def test_pauses_double_at_random_and_respect_the_router():
    retries, random = Retries(attempts=4, first_pause_s=0.1, longest_pause_s=0.3), Random(1)
    for attempt, longest_s in ((1, 0.1), (2, 0.2), (3, 0.3)):
        pauses_s = [retries.pause_s(attempt, None, random) for _ in range(100)]
        assert 0 <= min(pauses_s) < 0.1 * longest_s < 0.9 * longest_s < max(pauses_s) <= longest_s
    assert retries.pause_s(4, None, random) is None
    assert 0.2 <= retries.pause_s(1, 0.2, random) <= 0.3
    assert retries.pause_s(1, 0.4, random) is None


def test_importing_it_compiles_nothing():
    script = "import router.client, sys; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
