"""A request router of Ray Serve: among the replicas of a deployment, the one that the router names.

    kv-router up                                     # in another terminal
    pip install "ray[serve]==2.60.0"
    echo "What is a key-value cache?" | python examples/ray_serve.py --router http://127.0.0.1:8092

Of each request it books the worker, and frees it when the request is completed, rejected or
cancelled. A replica names its worker by `record_routing_stats`, and finds the booking in the
request's `kv_router_request_id`, to report the first token. If the router does not answer, the
shorter queue of two random replicas is chosen, as Ray does. If it refuses a request, since all
workers are busy, none may take it, or the router drains, the caller gets Ray's BackPressureError
with the router's Retry-After, over HTTP a 503 or 429 with that header.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

BOOKING = "kv_router_request_id"
SILENT_S = 1.0
"""For so long a router that has not answered is not asked again."""

REFUSALS = (429, 503, 529)
"""Statuses of a router that has not failed, but wants the request to come later."""


@dataclass
class Booking:
    """What was booked for a request of Ray, and the replica that it was booked at."""

    pending: PendingRequest
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    worker_id: int | None = None
    replica: RunningReplica | None = None


class KvRequestRouter(RequestRouter):
    """Chooses by the router at a URL. A request's first argument is the body of a completion."""

    def initialize_state(
        self, router_url: str, timeout_s: float = 2.0, wait_s: float = 90.0
    ) -> None:
        """Keep `request_router_kwargs`; Ray calls it.

        `timeout_s`: for a connection. `wait_s`: for an answer; more than the router's `max_wait_s`,
        if its requests wait (`router_queue_threshold`).
        """
        self._url = router_url
        self._timeout = aiohttp.ClientTimeout(total=wait_s, sock_connect=timeout_s)
        self._client: aiohttp.ClientSession | None = None
        self._asked_from_s = 0.0
        self._bookings: dict[str, list[Booking]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica of the worker that was booked, or else two at random.

        Called again for a request, its replica was full, or has failed: the next is booked.
        """
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None or not isinstance(pending_request.args[0], dict):
            return [two]
        pending_request.routing_context.should_backoff = True
        pending_request.args[0] = {**pending_request.args[0], BOOKING: None}
        by_id = {
            each.routing_stats["worker_id"]: each
            for each in candidate_replicas
            if "worker_id" in each.routing_stats
        }
        for each in self._of(pending_request):
            by_id.pop(each.worker_id, None)
            self._free(each)
        if not by_id or time.monotonic() < self._asked_from_s:
            return [two]
        booking = Booking(pending_request)
        self._bookings.setdefault(pending_request.metadata.internal_request_id, []).append(booking)
        pending_request.future.add_done_callback(lambda future: self._on_placed(booking, future))
        try:
            place = await self._place(booking, by_id)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._free(booking)
            if self._is_refused(pending_request, error):
                return [two]  # for the loop of Ray, which then sees that the request has ended
            if not isinstance(error, aiohttp.ClientResponseError):
                self._asked_from_s = time.monotonic() + SILENT_S
            logging.getLogger("ray.serve").warning("Placed without kv-router: %r", error)
            return [two]
        booking.worker_id, booking.replica = place["worker_id"], by_id[place["worker_id"]]
        pending_request.args[0][BOOKING] = place["request_id"]
        return [[booking.replica]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Free a booking of the request at this replica; there is none if its replica was full."""
        for each in self._bookings.get(internal_request_id, []):
            if each.replica is not None and each.replica.replica_id == replica_id:
                self._free(each)
                return

    def _of(self, pending: PendingRequest) -> list[Booking]:
        bookings = self._bookings.get(pending.metadata.internal_request_id, [])
        return [each for each in bookings if each.pending is pending]

    def _is_refused(self, pending: PendingRequest, error: Exception) -> bool:
        """Return whether the router refused a request for now; if so, its caller gets that."""
        if not isinstance(error, aiohttp.ClientResponseError) or error.status not in REFUSALS:
            return False
        if not str(error.request_info.url).startswith(self._url):
            return False  # an engine's, whose replica may take it all the same
        after, waiting = (error.headers or {}).get("Retry-After"), len(self._bookings)
        status = 429 if error.status == 429 else 503  # Ray has these two
        refusal = BackPressureError(
            waiting, waiting, status, None if after is None else float(after)
        )
        if not pending.future.done():
            pending.future.set_exception(refusal)
        self._remove_pending_request_from_indices(pending)  # as Ray does where it ends one itself
        logging.getLogger("ray.serve").warning("kv-router refused a request: %d", error.status)
        return True

    def _on_placed(self, booking: Booking, future: "asyncio.Future[RunningReplica]") -> None:
        if future.cancelled():
            self._free(booking)

    async def _place(self, booking: Booking, by_id: dict[int, RunningReplica]) -> Any:
        body = booking.pending.args[0]
        prompt = body.get("prompt")
        if not isinstance(prompt, list):
            engine = next(iter(by_id.values())).routing_stats["endpoint"]
            prompt = (await self._post(f"{engine}/tokenize", body))["tokens"]
        wanted = {
            "token_ids": prompt,
            "request_id": booking.request_id,
            "allowed_worker_ids": list(by_id),
            "expected_output_tokens": body.get("max_tokens"),
        }
        return await self._post(f"{self._url}/select_and_reserve", wanted)

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        if self._client is None:
            self._client = aiohttp.ClientSession(timeout=self._timeout, raise_for_status=True)
        async with self._client.post(url, json=body) as answer:
            return await answer.json()

    def _free(self, booking: Booking) -> None:
        request_id = booking.pending.metadata.internal_request_id
        bookings = self._bookings.get(request_id, [])
        if booking not in bookings:
            return
        bookings.remove(booking)
        if not bookings:
            del self._bookings[request_id]
        task = asyncio.get_running_loop().create_task(self._delete(booking))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete(self, booking: Booking) -> None:
        """End it at the router; one that is not reached lets it expire."""
        if self._client is None:
            return
        try:
            await self._client.delete(f"{self._url}/reservations/{booking.request_id}")
        except (aiohttp.ClientError, TimeoutError):
            return


@serve.deployment
class Engine:
    """A replica that stands for one engine of the fleet; with vLLM in it, `endpoint` is its own."""

    def __init__(self, router_url: str, workers: list[dict[str, Any]]) -> None:
        worker = workers[serve.get_replica_context().rank.rank]
        self._names = {name: worker[name] for name in ("worker_id", "endpoint")}
        self._router_url = router_url

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the worker that the replica is, as the request router reads it."""
        return self._names

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a completion, its usage, the worker, and whether the router named it."""
        booking = body.pop(BOOKING)
        is_booked, text, usage = booking is not None, "", None
        async with (
            aiohttp.ClientSession(raise_for_status=True) as client,
            client.post(f"{self._names['endpoint']}/v1/completions", json=body) as stream,
        ):
            async for line in stream.content:
                if not line.startswith(b"data: {"):
                    continue
                if booking is not None:
                    booked = f"{self._router_url}/reservations/{booking}"
                    await client.post(f"{booked}/prefill_complete")
                    booking = None
                event = json.loads(line.removeprefix(b"data: "))
                text += "".join(each["text"] for each in event["choices"])
                usage = event.get("usage") or usage
        return {"text": text, "usage": usage, "is_booked": is_booked, **self._names}


def config_of(router_url: str) -> RequestRouterConfig:
    """Return what a deployment takes as its `request_router_config`."""
    return RequestRouterConfig(
        request_router_class=KvRequestRouter,
        request_router_kwargs={"router_url": router_url},
        request_routing_stats_period_s=1,
    )


async def workers_of(router_url: str) -> Any:
    """Return the router's workers. Raises aiohttp.ClientError."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.get(f"{router_url}/workers") as answer,
    ):
        return await answer.json()


def main() -> None:
    """Start Ray with a replica for each worker; complete the lines of standard input."""
    parser = argparse.ArgumentParser(description="Completions by Ray Serve, placed by the router.")
    parser.add_argument("--router", default="http://127.0.0.1:8092", help="its URL")
    parser.add_argument("--model", default="default", help="the engines' name of it")
    options = parser.parse_args()
    workers = asyncio.run(workers_of(options.router))
    ray.init(num_cpus=len(workers) + 2, include_dashboard=False, log_to_driver=False)
    config = config_of(options.router)
    engine = Engine.options(num_replicas=len(workers), request_router_config=config)
    handle = serve.run(engine.bind(options.router, workers), route_prefix=None)
    print("ready", flush=True)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for line in sys.stdin:
        prompt = line.rstrip("\n")
        body = {"model": options.model, "prompt": prompt, "max_tokens": 16, **usage}
        try:
            answer = handle.remote(body).result(timeout_s=120)
        except BackPressureError as refusal:
            answer = {"refused": refusal.status_code, "retry_after_s": refusal.retry_after_s}
        print(json.dumps(answer), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
