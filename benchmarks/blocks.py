"""Blocks of KV: moved at what part of the machine's own speed?

    python benchmarks/blocks.py [--quick] [--json] [--only pool,copy,gather,disk,cuda,remote]

The peer is the machine: one large copy of the same bytes, a plain reader of the same file, a plain
pipeline of the same values; in turn, in one process on one core. What is measured of the pool has
no peer: its goal is a rate.
"""

import sys

from blocks_rows import SECTIONS, measured
from command_line import section_parser


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    return measured(arguments)


if __name__ == "__main__":
    sys.exit(main())
