"""The same checks under libFuzzer, guided by the coverage of the Python of this project.

Parsers in C and in compiled kernels show no coverage; half of the inputs are therefore mutations of
values (`mutation.py`), and the other half libFuzzer's own.
"""

import sys
from contextlib import suppress
from random import Random
from types import FunctionType

from support.fuzz.mutation import Mutator

OURS = ("router.", "worker_agent.")


def guided(target, options):
    """Fuzz until libFuzzer ends the process."""
    import atheris

    check, refusals = target.make(), target.refusals
    mutator = Mutator(target.seeds(), target.form, Random())
    rng = Random()

    def one(data):
        with suppress(refusals):
            check(data)

    def mutate(data, max_size, seed):
        if seed & 1:
            return atheris.Mutate(data, max_size)
        rng.seed(seed)
        mutator.restart(rng)
        return (mutator.next() if seed & 2 else mutator.changed(data))[:max_size]

    for function in _functions():
        atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def _functions():
    """Yield the functions of all loaded modules of this project that are not compiled."""
    for name, module in [*sys.modules.items()]:
        is_kernel = "._" in name or name.startswith("router.runtime.kernels")
        if not name.startswith(OURS) or is_kernel:
            continue
        for value in [*vars(module).values()]:
            if getattr(value, "__module__", None) != name:
                continue
            yield from _of(value)
            if isinstance(value, type):
                for member in [*vars(value).values()]:
                    yield from _of(member)


def _of(value):
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        yield value
