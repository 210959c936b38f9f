"""What the policies of `offload/policies.py` are called, for settings too."""

from typing import Literal, TypeAlias

OffloadRule: TypeAlias = Literal["all", "frequency", "popularity"]
"""Of a tier: PassAll, Frequency, Popularity."""
