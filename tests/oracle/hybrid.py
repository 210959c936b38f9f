"""How much of a prompt an engine with a hybrid model finds cached, one block at a time.

The definition that the kernels are held to: the lookup of vLLM 0.32's
`v1/core/kv_cache_coordinator.py` (`HybridKVCacheCoordinator.find_longest_cache_hit`) and
`v1/core/single_type_kv_cache_manager.py`. Blocks are named by their ends in tokens.
"""

from collections.abc import Callable

from router.protocol.hybrid import LayerClass, Layout

Held = Callable[[int], bool]


def cached_tokens(  # noqa: C901 - one procedure, as the engine has it
    layout: Layout,
    holds_full: Callable[[int], bool],
    holds_class: Callable[[int, int], bool],
    prompt_tokens: int,
) -> int:
    """The tokens that are not computed again.

    `holds_full(end)`, `holds_class(c, end)`: is the block that ends there held? Every kind of layer
    accepts the length found so far or shortens it, until all accept. Full attention comes first,
    then the classes in order.
    """
    most = prompt_tokens - 1  # the last token is always computed
    kinds: list[LayerClass | None] = [None] if layout.full_block_tokens else []
    kinds += [each for each in layout.classes if each.kind != "tail"]
    if not kinds or most <= 0:
        return 0
    full: int | None = None
    dropped: set[LayerClass | None] = set()
    hit = most
    while True:
        now = hit
        for kind in kinds:
            if kind is None and full is not None:
                now = min(now, full)  # looked up once: every prefix of a run is a run
                continue
            is_eagle = layout.is_full_eagle if kind is None else kind.is_eagle
            drops = is_eagle and kind not in dropped
            top = now
            if drops and len(kinds) > 1 and (kind is None or kind.kind != "state"):
                size = layout.full_block_tokens if kind is None else kind.block_tokens
                size = min(size, layout.alignment_tokens) if _has_tails(layout) else size
                top = min(now + size, prompt_tokens)  # one block further, which is dropped
            if kind is None:
                found = full = _full_attention(layout, holds_full, holds_class, top, drops)
            else:
                found = _of_class(layout, kind, holds_class, top, drops)
            if drops:
                dropped.add(kind)
            elif found < now:
                dropped.clear()
            now = found
        is_settled = len(kinds) == 1 or (len(kinds) == 2 and kinds[0] is None)
        if now >= hit or now <= 0 or is_settled:  # below 0: the layout is not one of an engine
            return max(0, min(now, hit))
        hit = now


def _has_tails(layout: Layout) -> bool:
    return any(each.kind == "tail" for each in layout.classes)


def _full_attention(
    layout: Layout,
    holds: Held,
    holds_class: Callable[[int, int], bool],
    top: int,
    drops: bool,
) -> int:
    """A hit may end inside the block after the last full one, where a tail is held."""
    size, end, step = layout.full_block_tokens, 0, layout.alignment_tokens
    while end + size <= top and holds(end + size):
        end += size
    for index, each in enumerate(layout.classes):
        if each.kind == "tail":
            inside = range(min(end + size - step, top // step * step), end, -step)
            end = next((e for e in inside if holds_class(index, e)), end)
    if drops and end:
        end -= min(size, step) if _has_tails(layout) else size
    return end - end % step


def _of_class(
    layout: Layout,
    kind: LayerClass,
    holds_class: Callable[[int, int], bool],
    top: int,
    drops: bool,
) -> int:
    class_index = layout.classes.index(kind)

    def holds(end: int) -> bool:
        return holds_class(class_index, end)

    if kind.kind == "window":
        return _window(layout.alignment_tokens, kind, holds, top, drops)
    if kind.kind == "state":
        return _state(layout.alignment_tokens, kind, holds, top)
    return _chunk(kind, holds, top)


def _window(alignment: int, kind: LayerClass, holds: Held, top: int, drops: bool) -> int:
    size = kind.block_tokens
    need = -(-(kind.span_tokens - 1) // size) + drops
    end = top // size * size
    run = 0  # held blocks from `end` on, the last of which ends where a hit may
    while end > 0 and run < need:
        may_begin = (end - drops * size) % alignment == 0
        run = run + 1 if holds(end) and (run or may_begin) else 0
        end -= size
    found = end + run * size
    if run < need:  # it reaches the prompt's begin: nothing is missing
        found -= found % alignment
    if drops and found:
        found -= size
        found -= found % alignment
    return found


def _state(alignment: int, kind: LayerClass, holds: Held, top: int) -> int:
    end = top // kind.block_tokens * kind.block_tokens
    while end > 0 and not (end % alignment == 0 and holds(end)):
        end -= kind.block_tokens
    return end


def _chunk(kind: LayerClass, holds: Held, top: int) -> int:
    """What lies before the chunk counts as held."""
    size = kind.block_tokens
    end = top // kind.span_tokens * kind.span_tokens // size * size
    while end + size <= top and holds(end + size):
        end += size
    return end
