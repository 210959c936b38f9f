"""How much of direct mode is measured."""


class DirectScale:
    """All of it, or what ends within 45 s."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 1 if quick else 5
        self.engine_batches = 4_096 if quick else 8_192
        self.engines = 200 if quick else 1_000
        self.history_batches = 8
        self.idle_s = 3.0 if quick else 10.0

    def __str__(self) -> str:
        return (
            f"streams of {self.engine_batches:,} batches of 128 blocks, medians of {self.rounds} "
            f"rounds, beside the peer of 5; {self.engines:,} engines that published "
            f"{self.history_batches} batches each"
        )
