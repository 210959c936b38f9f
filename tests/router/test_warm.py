"""Compilation of all kernels before a process needs them."""

import re
from importlib import import_module
from pathlib import Path

import router
from router.runtime.kernels.numba_runtime import cache_folder
from router.warm import kernel_modules, main


def test_every_module_with_kernels_is_compiled():
    root = Path(router.__file__).parent
    with_kernels = {
        f"router.{'.'.join(path.relative_to(root).with_suffix('').parts)}"
        for path in root.rglob("*.py")
        if re.search(r"^@kernel", path.read_text(), re.MULTILINE)
    }
    assert with_kernels <= set(kernel_modules())


def test_kernel_modules_are_importable():
    assert all(import_module(name).__name__ == name for name in kernel_modules())


def test_main_prints_the_cache_folder(capsys):
    assert main([]) == 0
    assert str(cache_folder() or "memory only") in capsys.readouterr().out
