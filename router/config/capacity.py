"""Settings of the signals for scaling; `--help` prints them."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct

from router.runtime.process.settings import about

if TYPE_CHECKING:
    from router.core.capacity import CapacitySettings


class CapacityConfig(Struct, frozen=True, kw_only=True):
    """Settings of `GET /capacity` and of the metrics that scalers read."""

    GROUP: ClassVar[str] = "scaling"

    capacity_window_s: Annotated[
        float,
        about("window of arrivals from which demand is computed", ge=1, le=3_600),
    ] = 60.0
    capacity_target_saturation: Annotated[
        float,
        about(
            "saturation up to which workers are loaded in the numbers of needed, spare and wanted "
            "workers",
            gt=0,
            le=1,
            unit="FRACTION",
        ),
    ] = 0.7

    @property
    def settings(self) -> "CapacitySettings":
        """The settings of the core's monitor."""
        from router.core.capacity import CapacitySettings

        return CapacitySettings(self.capacity_window_s, self.capacity_target_saturation)
