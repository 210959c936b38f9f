"""The connector: what it costs an engine's scheduler, and how fast workers give each other blocks.

    python benchmarks/connector.py [--quick] [--json] [--only slots,plan,prefix,peer]

Measured in processor time of this process, against rates and times as goals; blocks between two
processes in wall time, beside a plain socket that moves the same bytes.
"""

import sys

from command_line import section_parser
from connector_rows import SECTIONS, measured


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    return measured(arguments)


if __name__ == "__main__":
    sys.exit(main())
