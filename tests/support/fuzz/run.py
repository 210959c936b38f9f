"""Fuzzing of the parsers in the table.

    PYTHONPATH=.:tests python tests/support/fuzz/run.py [--target NAME …] [--inputs 100000]
        [--seed 0] [--seconds S] [--corpus build/fuzz] [--atheris]

Without `--atheris`, inputs are random mutations of valid ones, the same ones for the same seed.
With it, libFuzzer chooses half of them, guided by the coverage of the Python of this project.
Inputs that reach something new are kept in the corpus, from which the next run continues. Results
are added to `results.jsonl` in that folder; an input that is a finding is kept beside it.
"""

import argparse
import hashlib
import json
import logging
import re
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path
from random import Random

from support.fuzz import (
    agent_targets,
    edge_targets,
    engine_targets,
    file_targets,
    router_targets,
)
from support.fuzz.guided import guided
from support.fuzz.mutation import Mutator
from support.fuzz.target import SLOW_S

PARTS = (engine_targets, edge_targets, router_targets, agent_targets, file_targets)
TARGETS = {each.name: each for part in PARTS for each in part.TARGETS}
"""All parsers that are fuzzed, by name."""

MOST_FINDINGS = 20
MOST_MEMORY_KB = 4 << 20
"""A process that once held more is a finding."""


def main():
    chosen = _arguments()
    logging.disable(logging.CRITICAL)
    Path(chosen.corpus).mkdir(parents=True, exist_ok=True)
    if chosen.child:
        guided(TARGETS[chosen.target[0]], chosen.rest)
        return
    run = _run_guided if chosen.atheris else _run_random
    found = 0
    for name in chosen.target or TARGETS:
        result = run(TARGETS[name], chosen)
        found += result["findings"]
        with Path(chosen.corpus, "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(" ".join(f"{key}={value}" for key, value in result.items()), flush=True)
    sys.exit(found > 0)


def _run_random(target, chosen):
    seeds = [*target.seeds(), *_corpus(chosen.corpus, target.name)]
    mutator, check = Mutator(seeds, target.form, Random(chosen.seed)), target.make()
    places, accepted, done, start_s = set(), 0, 0, time.monotonic()
    while done < chosen.inputs and len(places) < MOST_FINDINGS:
        data, begun_s = mutator.next(), time.monotonic()
        if chosen.seconds and begun_s - start_s > chosen.seconds:
            break
        done += 1
        try:
            check(data)
            accepted += 1
        except target.refusals:
            pass
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            _note(target, chosen, data, error, places)
            check = target.make()
        if time.monotonic() - begun_s > SLOW_S:
            _note(target, chosen, data, TimeoutError(f"more than {SLOW_S} s"), places)
    seconds = time.monotonic() - start_s
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY_KB:
        _note(target, chosen, b"", MemoryError(f"more than {MOST_MEMORY_KB} KiB"), places)
    return _result(target, "random", done, seconds, len(places), accepted=accepted)


def _note(target, chosen, data, error, places):
    """Report a finding once for each place in the source."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/fuzz/" not in frame.filename] or frames
    place = (type(error).__name__, *((own[-1].filename, own[-1].lineno) if own else ()))
    if place in places:
        return
    places.add(place)
    file = Path(chosen.corpus, f"finding-{target.name}-{hashlib.sha256(data).hexdigest()[:12]}")
    file.write_bytes(data)
    print(f"{target.name}: {place}: {error!s:.200}: {data[:200]!r}; see {file}", flush=True)


def _run_guided(target, chosen):
    """Run libFuzzer in a process of its own, which it ends itself."""
    folder = Path(chosen.corpus, target.name)
    folder.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (folder / f"seed-{number}").write_bytes(seed)
    options = [
        f"-runs={chosen.inputs}", f"-seed={chosen.seed + 1}", f"-max_total_time={chosen.seconds}",
        "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1",
        f"-artifact_prefix={Path(chosen.corpus, f'finding-{target.name}-')}", str(folder),
    ]  # fmt: skip
    start_s = time.monotonic()
    command = [sys.executable, __file__, "--child", "--target", target.name, "--", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, text = time.monotonic() - start_s, ended.stderr
    if ended.returncode:
        print(ended.stdout[-3000:], text[-3000:], flush=True)
    edges = re.findall(r" cov: (\d+) ", text) or ["0"]
    inputs = re.findall(r"number_of_executed_units: +(\d+)", text) or re.findall(r"#(\d+)", text)
    done = int(inputs[-1]) if inputs else 0
    corpus = len([*folder.iterdir()])
    found = int(ended.returncode != 0)
    return _result(target, "libFuzzer", done, seconds, found, edges=int(edges[-1]), corpus=corpus)


def _result(target, engine, inputs, seconds, findings, **more):
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "target": target.name, "engine": engine, "inputs": inputs, "seconds": round(seconds),
        "findings": findings, "commit": commit, **more,
    }  # fmt: skip


def _corpus(folder, name):
    place = Path(folder, name)
    return [path.read_bytes() for path in sorted(place.iterdir())] if place.is_dir() else []


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), default=[])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="per target; 0: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", default="build/fuzz")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
