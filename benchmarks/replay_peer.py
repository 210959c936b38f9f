"""One run of NVIDIA's own replay, in its environment: `run_mocker_trace_replay` of its runtime.

    python replay_peer.py '{"trace": …, "workers": 16, "mode": "kv_router", "speed": 1.0, …}'

Prints its summary as JSON; a line for each decision goes to stderr (`DYN_LOG=info`).
"""

import importlib
import json
import sys


def main() -> None:
    wanted = json.loads(sys.argv[1])
    runtime = importlib.import_module("dynamo._core")
    by_router = wanted["mode"] == "kv_router"
    engine = {"backend": "vllm", "num_gpu_blocks": wanted["blocks"], "block_size": 512}
    result = runtime.run_mocker_trace_replay(
        [wanted["trace"]],
        {"engine": engine},
        num_workers=wanted["workers"],
        router_mode=wanted["mode"],
        router_config=runtime.KvRouterConfig() if by_router else None,
        arrival_speedup_ratio=wanted["speed"],
        trace_block_size=512,
        report_jsonl_path=wanted["report"],
    )
    json.dump({key: result.summary[key] for key in wanted["figures"]}, sys.stdout)


if __name__ == "__main__":
    main()
