"""Messages that real Dynamo workers sent, as `vectors/dynamo_bus.json` keeps them."""

import json
from pathlib import Path

from router.discovery.dynamo.fleet.messages import decode_envelope, decode_events, decode_json_event

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "dynamo_bus.json").read_text())


def message_of(row):
    payload = bytes.fromhex(row["payload_hex"])
    if row["encoding"] == "json":
        return decode_json_event(payload)
    return decode_events(decode_envelope(payload))
