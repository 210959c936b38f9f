"""`kv-router inspect`: prints the state of a running router, or what a recording contains.

    arguments ─▶ RouterClient ─response─▶ report, or JSON

Exit status: 0; 1 if the router is unreachable, or does not know the item, or if the recording is
unreadable; 2 for a wrong command line.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import msgspec

from router.errors import InvalidFieldError, ServerError
from router.protocol.requests import PromptRequest
from router.tools.inspect import report
from router.tools.inspect.arguments import inspect_parser, read_tokens
from router.tools.inspect.router_client import InspectClient, client_of


def inspect(arguments: Sequence[str]) -> int:
    """Query the router, print its response, return the exit status."""
    asked = inspect_parser().parse_args(arguments)
    if asked.what == "recording":
        return _recording(asked.file, as_json=asked.json)
    client = client_of(asked)
    try:
        sys.stdout.write(_answer(client, asked).rstrip("\n") + "\n")
    except InvalidFieldError as error:
        sys.stderr.write(f"kv-router inspect: {error}\n")
        return 2
    except ServerError as error:
        sys.stderr.write(f"kv-router inspect: {error}\n")
        return 1
    finally:
        client.close()
    return 0


def _recording(path: Path, *, as_json: bool) -> int:
    """Print what a recording contains, for which no router is asked."""
    from router.recording.format import RecordingError
    from router.tools.recordings.parts import OpenRecording
    from router.tools.recordings.summary import summary_of, summary_report

    try:
        with OpenRecording(path) as recording:
            summary = summary_of(recording)
    except (OSError, RecordingError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"kv-router inspect: {path}: {reason}\n")
        return 1
    sys.stdout.write((_json(summary) if as_json else summary_report(summary)) + "\n")
    return int(summary.problem is not None)


def _answer(client: InspectClient, asked: Namespace) -> str:
    if asked.what == "workers":
        workers = client.workers()
        return _json(workers) if asked.json else report.workers_report(workers)
    if asked.what == "prompt":
        return _prompt(client, asked)
    if asked.what == "block":
        block = client.block_holders(asked.sequence_hash)
        return _json(block) if asked.json else report.block_report(block)
    return _worker(client, asked)


def _prompt(client: InspectClient, asked: Namespace) -> str:
    prompt = PromptRequest(
        token_ids=read_tokens(asked.tokens),
        model_name=asked.model_name,
        routing_group=asked.routing_group,
        lora_name=asked.lora_name,
        cache_salt=asked.cache_salt,
    )
    scores = client.overlap_scores(prompt)
    isl_tokens = len(prompt.token_ids or ())
    return _json(scores) if asked.json else report.prompt_report(scores, isl_tokens)


def _worker(client: InspectClient, asked: Namespace) -> str:
    """Return a worker, or one of its ranks, with their blocks if requested."""
    worker = client.worker(asked.worker_id)
    wanted = getattr(asked, "dp_rank", None)
    ranks = [rank for rank in worker.ranks if wanted in (None, rank.dp_rank)]
    if wanted is not None and not ranks:
        known = ", ".join(str(rank.dp_rank) for rank in worker.ranks)
        raise ServerError(
            asked.url, f"worker {asked.worker_id} has no rank {wanted} (it has {known})"
        )
    held = [client.held(asked.worker_id, rank.dp_rank) for rank in ranks] if asked.blocks else []
    if asked.json:
        shown = msgspec.to_builtins(msgspec.structs.replace(worker, ranks=ranks))
        for rank, blocks in zip(shown["ranks"], held, strict=False):
            rank["blocks"] = report.blocks_value(blocks)
        return _json(shown)
    lists = [
        f"rank {rank.dp_rank}, block by block:\n{report.blocks_report(blocks)}"
        for rank, blocks in zip(ranks, held, strict=False)
    ]
    return "\n\n".join([report.worker_report(worker, ranks), *lists])


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
