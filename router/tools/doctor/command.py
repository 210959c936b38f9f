"""`kv-router doctor`: connects to an engine as the router would, and says what it finds.

Exit status: 0 if nothing is wrong, 1 if something is, 2 for a wrong command line.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from random import Random

from router.errors import InvalidFieldError
from router.process.serving import run_until_signal
from router.publisher.engine_address import engine_address
from router.tools.doctor.attachment import Attachment, attachment
from router.tools.doctor.config import DoctorConfig, load_doctor_config
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.examination import Examination, findings_of
from router.tools.doctor.findings import Finding, has_wrong, wrong
from router.tools.doctor.report import json_report, text_report


def doctor(arguments: Sequence[str]) -> int:
    """Examine an engine, print the findings, return the exit status. Raises ConfigError."""
    config = load_doctor_config(arguments, os.environ)
    ill_formed = _address_findings(config)
    if ill_formed:
        return _told(config, ill_formed, None)
    examined: list[EngineSeen] = []

    async def examine(stop: asyncio.Event) -> None:
        examined.append(await Examination(config, Random()).run(stop))

    run_until_signal(examine)
    (seen,) = examined
    return _told(config, findings_of(seen), attachment(seen) if seen.is_publisher else None)


def _told(config: DoctorConfig, findings: Sequence[Finding], how: Attachment | None) -> int:
    report = json_report if config.json else text_report
    sys.stdout.write(report(findings, how) + "\n")
    return int(has_wrong(findings))


def _address_findings(config: DoctorConfig) -> list[Finding]:
    try:
        engine_address(config.zmq, config.replay or None)
    except InvalidFieldError as error:
        check = "replay endpoint" if error.field == "replay_endpoint" else "events endpoint"
        why = "it is where the engine is reached from here, not where it binds"
        return [wrong(check, f"{error.reason}", why, f"give {error.allowed}")]
    return []
