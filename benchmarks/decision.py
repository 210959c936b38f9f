"""One decision: which of 16 workers, or of 2,048 ranks, should serve a prompt?

    python benchmarks/decision.py [--quick] [--json] [--only select,hashes,cycle,fleet]

Both run in one process on one core, on fleets that hold the same blocks and have the same bookings.
Ours is asked with every policy, from token ids in a numpy array to the choice; the peer's
`SelectionService` has one policy, and takes a list of tokens or, at less cost, of hashes
(`hashes`). Of its module this is what has its index for many threads, with as many as it has
by default; that index is not to be had alone. The service follows each rank over a socket of its
own, with a handful of files each, so that it has 256 ranks where ours has 2,048.
"""

import os
import sys

import peer
from command_line import section_parser

SECTIONS = {
    "select": "16 workers: hash, match, weigh, choose",
    "hashes": "the same from hashes, answers read: the peer one at a time, and 16 awaited together",
    "cycle": "16 workers: choose, book, mark the prefill complete, free",
    "fleet": "256 workers of 8 ranks: hash, match, weigh, choose",
}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    os.environ.setdefault("DYN_LOG", "error")  # the peer logs every choice
    peer.enter()
    from decision_rows import measured  # can be imported only now, in the peer's environment

    return measured(SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
