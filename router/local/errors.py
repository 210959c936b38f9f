"""What stops a fleet of one machine."""

from collections.abc import Mapping

from router.errors import KvRouterError


class FleetNotReadyError(KvRouterError):
    """Processes were started, and not all of them serve. `last_lines`: of each one's log."""

    code = "fleet_not_ready"
    http_status = 503

    def __init__(self, waited_s: float, last_lines: Mapping[str, str]) -> None:
        said = "".join(f"\n  {name}: {line}" for name, line in last_lines.items())
        super().__init__(
            f"the fleet is not ready after {waited_s:g} s; the last line of each log:{said}"
        )
        self.waited_s = waited_s
        self.last_lines = last_lines
