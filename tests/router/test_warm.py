"""What is compiled before anybody waits for it."""

import re
from pathlib import Path

import router
from router.warm import KERNEL_MODULES


def test_every_module_of_kernels_is_compiled():
    root = Path(router.__file__).parent
    with_kernels = {
        f"router.{'.'.join(path.relative_to(root).with_suffix('').parts)}"
        for path in root.rglob("_*.py")
        if re.search(r"^@kernel", path.read_text(), re.MULTILINE)
    }
    assert with_kernels == {module.__name__ for module in KERNEL_MODULES}
