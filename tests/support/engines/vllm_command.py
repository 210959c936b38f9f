"""The command `vllm serve`, reduced to an engine's cache and its OpenAI server."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from support.engines.openai_engine import OpenAiEngine

ROOT = Path(__file__).parents[3]


def install_vllm(folder):
    """Write the command `vllm` into a folder, which is to be put in PATH."""
    folder.mkdir()
    command = folder / "vllm"
    command.write_text(
        f"#!{sys.executable}\n"
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from support.engines.vllm_command import main\nmain()\n"
    )
    command.chmod(0o755)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    known, others = parser.parse_known_args()
    asyncio.run(serve(known))
    assert others[0] == "serve"


async def serve(known):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    models = [{"id": known.served_model_name, "owned_by": "vllm"}]
    async with OpenAiEngine(port=known.port, models=models).running():
        await stop.wait()
