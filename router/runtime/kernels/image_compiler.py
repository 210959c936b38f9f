"""Compile kernels in several processes, each kernel to an object file of its own.

    modules, the longest first          ──▶ process ─┐
    (one pipe: each takes the next one) ──▶ process ─┴─▶ a folder of parts ──▶ an image

Kernels of one module share most functions that they call, so that one process compiles them all. A
kernel that calls another is compiled after it, in the same process: the caller needs the signature
of the called one, and may have it inlined. Parts that are there are not made again, so that little
is lost with a process that is killed.
"""

import gc
import inspect
import os
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

MOST_PROCESSES = 8
"""More are no faster: the longest module takes a fifth of the time of all."""

PROCESS_BYTES = 600_000_000
"""What one process takes at most, with room to spare."""

GARBAGE_OBJECTS = 100_000
"""Objects between two looks for garbage. What is compiled stays, and looking through it often takes
time; without looking, a process grows to 850 MB."""

_NUMBER = struct.Struct("<H")


class Kernel(NamedTuple):
    """A kernel that is not compiled yet: its key, Numba's function, and its signature."""

    key: str
    function: Any
    signature: str


class CompilationError(Exception):
    """Not all kernels could be compiled."""


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """LLVM's code of one function, optimized. No machine code is made of it here."""

    def get_pointer_to_function(self, name: str) -> int:
        del name
        self._ensure_finalized()  # linked and optimized
        return 0

    def _finalize_specific(self) -> None:
        """Leave out Numba's own machine code, a fifth of the time."""


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library

    def set_env(self, env_name: str, env: object) -> None:
        """Leave out the place for Python's objects: kernels have none."""

    def _add_module(self, module: object) -> None:
        pass


def _processes() -> int:
    """Return how many processes may compile: within a container's share of cores and memory too."""
    most = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    quota, period = _limits("cpu.max") or (most, 1)
    (memory_bytes,) = _limits("memory.max") or (most * PROCESS_BYTES,)
    return max(1, min(most, quota // period, memory_bytes // PROCESS_BYTES))


def _limits(name: str) -> tuple[int, ...] | None:
    """Return the numbers of a limit of this control group; None if there is no such limit."""
    try:
        return tuple(map(int, (Path("/sys/fs/cgroup") / name).read_text().split()))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def make_parts(
    kernels: Sequence[Kernel],
    folder: Path,
    object_of: Callable[[Kernel, Any], bytes],
    progress: Callable[[int, int], None],
) -> list[bytes]:
    """Return an object file of each kernel. Raises CompilationError.

    `object_of`: makes it of what Numba compiled (`CompileResult`); `progress`: is called with how
    many there are, and of how many.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    cpu_target.target_context._internal_codegen = _Codegen("numba.exec")
    compiler = _Compiler(kernels, folder, object_of)
    count = len(kernels) - len(compiler.missing())
    progress(count, len(kernels))
    tasks, given = os.pipe()
    done, finished = os.pipe()
    for number in range(len(compiler.modules)):
        os.write(given, _NUMBER.pack(number))
    os.close(given)
    gc.freeze()
    children = []
    for _ in range(min(_processes(), len(compiler.modules))):
        child = os.fork()
        if not child:
            os.close(done)
            os._exit(compiler.work(tasks, finished))
        children.append(child)
    os.close(finished)
    os.close(tasks)
    while os.read(done, 1):
        count += 1
        progress(count, len(kernels))
    os.close(done)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    _check(kernels, compiler.missing(), ends)
    return [compiler.part(number).read_bytes() for number in range(len(kernels))]


def _check(kernels: Sequence[Kernel], missing: Sequence[int], ends: Sequence[int]) -> None:
    if missing:
        names = ", ".join(kernels[number].key.partition("(")[0] for number in missing[:3])
        killed = "".join(f"; a process was killed by signal {-end}" for end in ends if end < 0)
        raise CompilationError(
            f"{len(missing)} of {len(kernels)} kernels are not compiled ({names}…){killed}"
        )


class _Compiler:
    """What every process has from the one that forked it."""

    def __init__(
        self, kernels: Sequence[Kernel], folder: Path, object_of: Callable[[Kernel, Any], bytes]
    ) -> None:
        self._kernels, self._folder, self._object_of = kernels, folder, object_of
        self._known = {id(each.function): each for each in kernels}
        self.modules = self._modules()

    def part(self, number: int) -> Path:
        """Return where the object file of a kernel is, or will be."""
        return self._folder / f"{number}.o"

    def missing(self) -> list[int]:
        """Return the numbers of kernels without a part."""
        return [i for i in range(len(self._kernels)) if not self.part(i).exists()]

    def _modules(self) -> list[list[int]]:
        """Return the missing kernels of each module, the longest module first."""
        modules: dict[str, list[int]] = {}
        for number in self.missing():
            function = self._kernels[number].function.py_func
            modules.setdefault(function.__module__, []).append(number)
        return sorted(modules.values(), key=lambda each: -sum(map(self._length, each)))

    def work(self, tasks: int, finished: int) -> int:
        """Compile what is to be compiled; return the status to exit with."""
        gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
        try:
            while number := os.read(tasks, _NUMBER.size):
                for each in self.modules[_NUMBER.unpack(number)[0]]:
                    self._make(each)
                    os.write(finished, b".")
        except BaseException:  # noqa: BLE001 - a forked process may not go on with its parent's work
            traceback.print_exc()
            sys.stderr.flush()
            while os.read(tasks, 1 << 16):  # the others end too
                pass
            return 1
        return 0

    def _make(self, number: int) -> None:
        kernel = self._kernels[number]
        content = self._object_of(kernel, self._compiled(kernel))
        handle, made = tempfile.mkstemp(dir=self._folder)
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(made, self.part(number))

    def _compiled(self, kernel: Kernel) -> Any:
        """Return what Numba compiled of a kernel, after the kernels that it calls."""
        function = kernel.function
        if not function.overloads:
            for each in _functions_below(function):
                called = self._known.get(id(each))
                if called is not None:
                    self._compiled(called)
            function.compile(kernel.signature)
            function.disable_compile()
        return next(iter(function.overloads.values()))

    def _length(self, number: int) -> int:
        """Return about how long a kernel takes to compile: the code of all that it calls."""
        function = self._kernels[number].function
        functions = [function, *_functions_below(function)]
        return sum(len(each.py_func.__code__.co_code) for each in functions)


def _functions_below(function: Any) -> Iterator[Any]:
    """Yield the compiled functions that a function calls, at any depth, each once."""
    found: dict[int, Any] = {id(function): function}
    waiting = [function]
    while waiting:
        names = inspect.getclosurevars(waiting.pop().py_func)
        for each in [*names.nonlocals.values(), *names.globals.values()]:
            if isinstance(each, Dispatcher) and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
                yield each
