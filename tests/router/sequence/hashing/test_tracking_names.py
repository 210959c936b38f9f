"""Names of blocks in bookings under a key: equal for equal prompts, and not revealing them."""

import numpy as np
import pytest

from router.config.load import load_router_config
from router.core.commands import SelectAndReserve
from router.errors import ConfigError
from router.protocol.requests import PromptRequest, SelectRequest
from router.protocol.values import SCHEME, Identity, unpack_hashes
from router.runtime.kernels.hash_key import derive
from router.sequence.active.prompt import prepare
from router.sequence.hashing.keyed_hashes import HashKeying, TrackingKey
from router.sequence.replicas.reservation_log import ReservationLog
from support.fleets.direct import DirectRouter
from support.values.builders import World, rank

KEY = TrackingKey(bytes(range(32)), "1")
NAMING = HashKeying(tracking=KEY)
IDENTITY = Identity(SCHEME, 4)
PROMPT = list(range(40))


def names(key=KEY, identity=IDENTITY, **fields):
    request = PromptRequest(token_ids=PROMPT, **fields)
    return key.names(np.arange(10, dtype=np.uint64), request, identity).tolist()


def test_names_are_of_one_key_and_one_scope():
    others = [
        names(TrackingKey(bytes(32), "1")),
        names(TrackingKey(KEY.secret, "2")),
        names(identity=Identity(SCHEME, 8)),
        names(identity=Identity(SCHEME, 4, eagle=True)),
        *(names(**{field: "x"}) for field in ("model_name", "routing_group", "lora_name")),
        names(cache_salt="x"),
    ]
    assert names() == names()
    assert len({tuple(each) for each in (*others, names(), range(10))}) == len(others) + 2
    assert KEY.secret.hex() not in repr(NAMING)


def test_routers_of_one_scheme_alone_name_blocks_of_bookings_alike():
    keys = [None, KEY, TrackingKey(bytes(32), "1"), TrackingKey(KEY.secret, "2")]
    schemes = [HashKeying(tracking=key).booking_scheme for key in keys]
    schemes.append(HashKeying(derive(b"secret of a fleet")).booking_scheme)
    assert len({*schemes}) == len(schemes)
    assert HashKeying(tracking=TrackingKey(KEY.secret, "1")).booking_scheme == schemes[1]
    assert KEY.secret.hex() not in schemes[1]


def test_bookings_have_them_and_caches_do_not():
    world = World(naming=NAMING)
    world.worker(1)
    world.core.tracker.ledger = ReservationLog(9, incarnation=1)
    world.cache(rank(1), PROMPT)
    request = SelectRequest(token_ids=PROMPT, request_id="a")
    placement, _ = world.core.handle(
        SelectAndReserve(request, prepare(request, (), naming=NAMING)), 0.0
    )
    assert placement.overlap_blocks == 10
    public = prepare(request, (IDENTITY,)).hashed(IDENTITY)
    assert placement.prompt.public_hashes.tolist() == public.sequence_hashes.tolist()
    (reported,) = world.core.tracker.all_shared()
    assert not set(unpack_hashes(reported.sequence_hashes).tolist()) & set(
        public.load_hashes.tolist()
    )
    again = prepare(SelectRequest(token_ids=[*PROMPT, 1]), (), naming=NAMING)
    table = world.core.weigh(request, again, 0.0)
    assert table.terms(0).potential_decode_blocks == 10 + 1


@pytest.mark.parametrize("keyed", ["tracking", "blocks"])
async def test_a_selection_that_is_booked_is_the_prompt_it_was(tmp_path, keyed):
    """Under either kind of names: equal prompts share their blocks."""
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    fields = {"block_key_file": str(file)}
    if keyed == "tracking":
        fields = {"router_tracking_hash": "keyed-xxh3-v1", "router_tracking_key_file": str(file)}
    async with DirectRouter(use_kv_events=False, **fields).running() as router:
        await router.post("/workers", {"worker_id": 1, "endpoint": "http://w", "block_size": 4})
        prompts = [{"token_ids": PROMPT, "cache_salt": "t"}]
        booked = (await router.post("/select_and_reserve", prompts[0])).json()
        prompts.append({"sequence_hashes": booked["sequence_hashes"], "isl_tokens": 40})
        prompts[1]["cache_salt"] = "t"
        for number, prompt in enumerate(prompts):
            selection = {"selection_id": f"s{number}"}
            assert (await router.post("/select", prompt | selection)).status_code == 200
            assert (await router.post("/reservations", selection)).status_code == 201
        (load,) = (await router.client.get("/loads")).json()[0]["loads"]
        assert (load["active_requests"], load["potential_decode_blocks"]) == (3, 10)


def test_the_key_has_32_bytes(tmp_path):
    file = tmp_path / "key"
    flags = ["--router-tracking-hash", "keyed-xxh3-v1", "--router-tracking-key-file", str(file)]
    environment = {"DYN_ROUTER_TRACKING_KEY_ID": "k1"}
    file.write_bytes(bytes(32))
    assert load_router_config(flags, environment).naming.tracking == TrackingKey(bytes(32), "k1")
    file.write_text("ab" * 31)
    with pytest.raises(ConfigError, match="router_tracking_key_file: 31 bytes"):
        load_router_config(flags, {})
