"""Our index of held blocks against the peer's, a radix tree in Rust.

    python benchmarks/index.py [--quick] [--json] [--only find,cold,…] [--plot]

Both run in one process on one core, hold the same blocks and must give the same answers. The peer
is searched by local hashes, which is what it takes. A ratio says how many times as fast ours is;
where the goal bounds our own figure (memory, mixed, hashing), the ratio is ours / peer.
"""

import sys

import peer
from command_line import section_parser

SECTIONS = {
    "find": "a warm path: from sequence or local hashes, depth × holders",
    "cold": "another path every time, by depth",
    "hybrid": "a path whose holders can resume it only at their last checkpoints",
    "uneven": "paths of 8,192 and 512 blocks, held unevenly",
    "store": "new blocks, from bytes to visible: blocks an event, workers",
    "remove": "removals, from bytes to visible: blocks an event",
    "memory": "resident memory, one holder a block, 128 workers",
    "restore": "a snapshot, from file to visible",
    "mixed": "searches due at random, 90 % of the time spent ingesting in slices of 512 blocks",
    "hashing": "8,192 tokens hashed and chained",
}


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.add_argument("--plot", action="store_true", help="measure and draw growth instead")
    arguments = parser.parse_args()
    peer.enter()
    from index_report import measured  # can be imported only now, in the peer's environment

    sections = (
        {"growth": "by blocks of the tree, and by workers"}
        if arguments.plot
        else {n: SECTIONS[n] for n in arguments.only}
    )
    return measured(sections, arguments)


if __name__ == "__main__":
    sys.exit(main())
