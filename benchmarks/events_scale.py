"""How much of the event plane is measured."""


class EventScale:
    """All of it, or what ends within 45 s."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rounds = 3 if quick else 5
        self.ingest_messages = 2_048 if quick else 16_384
        self.engine_batches = 1_024 if quick else 8_192
        self.fleets = (80,) if quick else (80, 1_000)
        self.visible_s = 1.5 if quick else 10.0
        self.down_s = 0.5 if quick else 2.0
        self.join_blocks = 2_000_000 if quick else 10_000_000

    def __str__(self) -> str:
        return (
            f"streams of {self.ingest_messages:,} messages; latencies over {self.visible_s:g} s; "
            f"late joins of {self.join_blocks:,} blocks; medians of {self.rounds} rounds"
        )
