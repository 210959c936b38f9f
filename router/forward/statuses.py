"""What a refusal's status says of who refused."""

ANOTHER_MAY_TAKE = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Refusals of one engine, of which others know nothing."""

NOT_ITS_FAULT = frozenset((408, 425, 429))
