"""`kv-router doctor`: connects to an engine as the router would, and prints its findings.

Exit status: 0 if nothing is wrong, 1 if something is, 2 for a wrong command line.
"""

import asyncio
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec

from router.errors import ConfigError, InvalidFieldError
from router.publisher.batch_order.address import engine_address
from router.runtime.http_server.server import run_until_signal
from router.tools.doctor.attached import attached
from router.tools.doctor.attachment import Attachment, attachment
from router.tools.doctor.config import DoctorConfig, load_doctor_config
from router.tools.doctor.examination import Examination, findings_of
from router.tools.doctor.findings import CheckResult, Finding, has_wrong, wrong
from router.tools.doctor.observed_engine import ObservedEngine

_WIDTH = 100
_INDENT = " " * 10


def text_report(findings: Sequence[Finding], how: Attachment | None) -> str:
    """Return one line per check and, unless it is good, why that matters and how to fix it."""
    lines = [line for finding in findings for line in _lines(finding)]
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in CheckResult if counts[verdict]
    )
    lines += ["", summary]
    if how is not None:
        lines += ["", "attach it to a router:", f"  {how.curl}"]
        lines += ["", "or by an agent next to it:", f"  {how.agent}"]
    return "\n".join(lines)


def json_report(findings: Sequence[Finding], how: Attachment | None) -> str:
    """Return the same as one JSON object."""
    value = {
        "is_well": not has_wrong(findings),
        "findings": findings,
        "worker": None if how is None else how.worker,
        "agent": None if how is None else how.agent,
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _lines(finding: Finding) -> list[str]:
    lines = [f"{finding.verdict:<8}  {finding.check}: {finding.text}"]
    for word, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines += textwrap.wrap(
                f"{word}: {text}",
                _WIDTH,
                initial_indent=_INDENT,
                subsequent_indent=f"{_INDENT}     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def doctor(arguments: Sequence[str]) -> int:
    """Examine an engine, print the findings, return the exit status. Raises ConfigError."""
    config = load_doctor_config(arguments, os.environ)
    first: list[Finding] = []
    if not config.zmq:
        config, said = asyncio.run(_attached(config))
        first = [said]
        if not config.zmq:
            return _report(config, first, None)
    ill_formed = _address_findings(config)
    if ill_formed:
        return _report(config, ill_formed, None)
    examined: list[ObservedEngine] = []

    async def examine(stop: asyncio.Event) -> None:
        examined.append(await Examination(config, Random()).run(stop))

    run_until_signal(examine)
    (seen,) = examined
    how = attachment(seen) if seen.is_publisher else None
    return _report(config, [*first, *findings_of(seen)], how)


async def _attached(config: DoctorConfig) -> tuple[DoctorConfig, Finding]:
    try:
        return await attached(config)
    except InvalidFieldError as error:
        raise ConfigError("url", error.reason, error.allowed) from error


def _report(config: DoctorConfig, findings: Sequence[Finding], how: Attachment | None) -> int:
    report = json_report if config.json else text_report
    sys.stdout.write(report(findings, how) + "\n")
    return int(has_wrong(findings))


def _address_findings(config: DoctorConfig) -> list[Finding]:
    try:
        engine_address(config.zmq, config.replay or None)
    except InvalidFieldError as error:
        check = "replay endpoint" if error.field == "replay_endpoint" else "events endpoint"
        why = "it is the address to connect to, not the one that the engine binds"
        return [wrong(check, f"{error.reason}", why, f"give {error.allowed}")]
    return []
