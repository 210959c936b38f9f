"""A routing strategy of LiteLLM: among the deployments of a model, the one that the router names.

    kv-router up                                     # in another terminal
    pip install litellm==1.110.2
    python examples/litellm_strategy.py --router http://127.0.0.1:8092 "What is a key-value cache?"

Of a chat the strategy books the worker, and sends its data-parallel rank along; as a callback of
LiteLLM it reports the end of each attempt. LiteLLM calls it for no other piece of a stream than the
last, so the first token is not reported.
"""

import argparse
import asyncio
import copy
from typing import Any

import httpx
import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

BOOKED = "kv_router_booking"


class KvRouterStrategy(CustomRoutingStrategyBase, CustomLogger):
    """Chooses by the router at a URL. Its deployments' `api_base` is an engine's URL and `/v1`."""

    def __init__(self, router_url: str, deployments: list[dict[str, Any]]) -> None:
        super().__init__()
        self._client = httpx.AsyncClient(timeout=60)
        self._router_url = router_url
        self._deployments = {each["litellm_params"]["api_base"]: each for each in deployments}

    async def async_get_available_deployment(
        self, model, messages=None, input=None, specific_deployment=False, request_kwargs=None
    ):
        """Return the deployment of the worker that was booked. Raises httpx.HTTPError."""
        engine_url = next(iter(self._deployments)).removesuffix("/v1")
        chat = {"messages": messages}
        tokens = (await self._post(f"{engine_url}/tokenize", chat))["tokens"]
        place = await self._post(f"{self._router_url}/select_and_reserve", {"token_ids": tokens})
        request_kwargs.setdefault("metadata", {})[BOOKED] = place["request_id"]
        deployment = copy.deepcopy(self._deployments[f"{place['endpoint']}/v1"])
        rank = {"x-data-parallel-rank": str(place["dp_rank"])}
        deployment["litellm_params"]["extra_headers"] = rank
        return deployment

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        """Report the end of an attempt, with the engine's usage."""
        usage = getattr(response_obj, "usage", None)
        await self._free(kwargs, usage and usage.model_dump(include={"prompt_tokens"}))

    async def async_log_failure_event(self, kwargs, response_obj, start_time, end_time):
        """Report the end of an attempt that failed."""
        await self._free(kwargs, None)

    async def _free(self, kwargs: dict[str, Any], usage: dict[str, Any] | None) -> None:
        booked = _booked(kwargs)
        if booked is not None:
            url = f"{self._router_url}/reservations/{booked}"
            await self._client.request("DELETE", url, json={"usage": usage})

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        return (await self._client.post(url, json=body)).raise_for_status().json()


def _booked(details: dict[str, Any]) -> str | None:
    """Return the booking that the details of a call name."""
    return (details["litellm_params"].get("metadata") or {}).get(BOOKED)


async def main() -> None:
    """Read the command line, and print a chat and how much of its prompt was cached."""
    parser = argparse.ArgumentParser(description="A chat, placed by the router.")
    parser.add_argument("prompt")
    parser.add_argument("--router", default="http://127.0.0.1:8092", help="its URL")
    parser.add_argument("--max-tokens", type=int, default=64, help="of the answer")
    options = parser.parse_args()
    async with httpx.AsyncClient() as client:
        workers = (await client.get(f"{options.router}/workers")).raise_for_status().json()
    deployments = [
        {
            "model_name": "chat",
            "litellm_params": {
                "model": "hosted_vllm/default",
                "api_base": f"{worker['endpoint']}/v1",
                "api_key": "none",
            },
        }
        for worker in workers
    ]
    router = litellm.Router(model_list=deployments)
    strategy = KvRouterStrategy(options.router, router.model_list)
    router.register_plugin(strategy)
    litellm.callbacks.append(strategy)
    stream = await router.acompletion(
        model="chat",
        messages=[{"role": "user", "content": options.prompt}],
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    async for piece in stream:
        print("".join(each.delta.content or "" for each in piece.choices), end="", flush=True)
        usage = getattr(piece, "usage", None) or usage
    await asyncio.sleep(1)  # LiteLLM runs callbacks behind the answer
    print(f"\n{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens cached")


if __name__ == "__main__":
    asyncio.run(main())
