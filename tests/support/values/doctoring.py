"""The doctor at work, and what it is expected to say."""

import asyncio
from random import Random

from router.tools.doctor.config import DoctorConfig
from router.tools.doctor.examination import Examination, findings_of

SECONDS = 0.5


async def examine(zmq_endpoint, replay=None, **settings):
    """What was seen, and the findings by check."""
    fields = {"seconds": SECONDS, "replay": replay or "", **settings}
    config = DoctorConfig(zmq=zmq_endpoint, **fields)
    seen = await Examination(config, Random(5)).run(asyncio.Event())
    return seen, {finding.check: finding for finding in findings_of(seen)}


def verdicts(found):
    return {check: str(finding.verdict) for check, finding in found.items()}


def says(found, check, verdict, *parts):
    finding = found[check]
    assert finding.verdict == verdict, finding
    for part in parts:
        assert part in f"{finding.text} | {finding.why} | {finding.fix}", finding
    if verdict == "wrong":
        assert finding.why
        assert finding.fix


async def while_repeating(action, examination):
    """Return the result of an examination during which an action is repeated."""
    task = asyncio.create_task(examination)
    try:
        while not task.done():
            action()
            await asyncio.wait([task], timeout=0.05)
        return await task
    finally:
        task.cancel()
