"""What Numba's arrays and lists call, written for an image of kernels: memory, and new shapes.

    MemInfo: references, is a list, destructor, data, size, allocator │ data of an array

An array's memory begins with its `MemInfo`; a list's data is separate, because it grows.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

_WORD, _HALF, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_POINTER = ir.IntType(8).as_pointer()
_INFO_BYTES = 64
_IS_LIST, _DESTRUCTOR, _DATA, _SIZE = 1, 2, 3, 4
_ALIGN_BYTES = 16


def write_allocator(module: Any) -> None:
    """Write the functions by which Numba's code asks for memory and gives it back."""
    for name in ("NRT_MemInfo_alloc_aligned", "NRT_MemInfo_alloc_safe_aligned"):
        builder, (size, align) = _function(module, name, _POINTER, _WORD, _HALF)
        _allocate(module, builder, size, builder.zext(align, _WORD))
    builder, (size,) = _function(module, "NRT_MemInfo_alloc", _POINTER, _WORD)
    _allocate(module, builder, size, ir.Constant(_WORD, _ALIGN_BYTES))
    builder, (size,) = _function(module, "NRT_Allocate", _POINTER, _WORD)
    builder.ret(_call(module, builder, _POINTER, "malloc", size))
    builder, (data,) = _function(module, "NRT_Free", _VOID, _POINTER)
    _call(module, builder, _VOID, "free", data)
    builder.ret_void()
    _write_lists(module)
    _write_release(module)
    _write_reshape(module)


def _write_lists(module: Any) -> None:
    name = "NRT_MemInfo_new_varsize_dtor"
    builder, (size, destructor) = _function(module, name, _POINTER, _WORD, _POINTER)
    data = _call(module, builder, _POINTER, "malloc", size)
    info = _call(module, builder, _POINTER, "malloc", ir.Constant(_WORD, _INFO_BYTES))
    for each in (data, info):
        _leave_if_null(builder, each)
    one, null = ir.Constant(_WORD, 1), ir.Constant(_WORD, 0)
    called, place = _word(builder, destructor), _word(builder, data)
    _fill(builder, info, one, one, called, place, size, null)
    builder.ret(info)
    name = "NRT_MemInfo_varsize_realloc"
    builder, (info, size) = _function(module, name, _POINTER, _POINTER, _WORD)
    data = builder.inttoptr(builder.load(_field(builder, info, _DATA)), _POINTER)
    grown = _call(module, builder, _POINTER, "realloc", data, size)
    _leave_if_null(builder, grown)
    builder.store(_word(builder, grown), _field(builder, info, _DATA))
    builder.store(size, _field(builder, info, _SIZE))
    builder.ret(grown)


def _write_release(module: Any) -> None:
    builder, (info,) = _function(module, "NRT_MemInfo_call_dtor", _VOID, _POINTER)
    null = ir.Constant(_WORD, 0)
    is_list = builder.icmp_unsigned("!=", builder.load(_field(builder, info, _IS_LIST)), null)
    with builder.if_then(is_list):
        data, size, destructor = (
            builder.load(_field(builder, info, each)) for each in (_DATA, _SIZE, _DESTRUCTOR)
        )
        place = builder.inttoptr(data, _POINTER)
        with builder.if_then(builder.icmp_unsigned("!=", destructor, null)):
            kind = ir.FunctionType(_VOID, [_POINTER, _WORD, _POINTER]).as_pointer()
            call = builder.inttoptr(destructor, kind)
            builder.call(call, [place, size, ir.Constant(_POINTER, None)])
        _call(module, builder, _VOID, "free", place)
    _call(module, builder, _VOID, "free", info)
    builder.ret_void()


def _write_reshape(module: Any) -> None:
    """Write the strides of a new shape, for arrays in C order; others are refused (0)."""
    words = _WORD.as_pointer()
    builder, (ndim, shape, strides, new_ndim, new_shape, new_strides, item_bytes, _) = _function(
        module, "numba_attempt_nocopy_reshape",
        _HALF, _WORD, words, words, _WORD, words, words, _WORD, _HALF,
    )  # fmt: skip
    one, stride = ir.Constant(_WORD, 1), cgutils.alloca_once_value(builder, item_bytes)
    with cgutils.for_range(builder, ndim) as loop:
        at = [builder.sub(builder.sub(ndim, one), loop.index)]
        size, found = (builder.load(builder.gep(each, at)) for each in (shape, strides))
        is_other = builder.icmp_unsigned("!=", found, builder.load(stride))
        with builder.if_then(builder.and_(is_other, builder.icmp_unsigned("!=", size, one))):
            builder.ret(ir.Constant(_HALF, 0))
        builder.store(builder.mul(builder.load(stride), size), stride)
    builder.store(item_bytes, stride)
    with cgutils.for_range(builder, new_ndim) as loop:
        at = [builder.sub(builder.sub(new_ndim, one), loop.index)]
        builder.store(builder.load(stride), builder.gep(new_strides, at))
        size = builder.load(builder.gep(new_shape, at))
        builder.store(builder.mul(builder.load(stride), size), stride)
    builder.ret(ir.Constant(_HALF, 1))


def _allocate(module: Any, builder: Any, size: Any, align: Any) -> None:
    room = builder.add(builder.add(size, align), ir.Constant(_WORD, _INFO_BYTES))
    info = _call(module, builder, _POINTER, "malloc", room)
    _leave_if_null(builder, info)
    one, null = ir.Constant(_WORD, 1), ir.Constant(_WORD, 0)
    start = builder.add(_word(builder, info), ir.Constant(_WORD, _INFO_BYTES))
    last = builder.sub(align, one)
    data = builder.and_(builder.add(start, last), builder.not_(last))
    _fill(builder, info, one, null, null, data, size, null)
    builder.ret(info)


def _function(module: Any, name: str, result: Any, *arguments: Any) -> tuple[Any, Any]:
    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    return ir.IRBuilder(function.append_basic_block()), function.args


def _call(module: Any, builder: Any, result: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(module, kind, name), arguments)


def _leave_if_null(builder: Any, pointer: Any) -> None:
    null = ir.Constant(_POINTER, None)
    with builder.if_then(builder.icmp_unsigned("==", pointer, null), likely=False):
        builder.ret(null)


def _word(builder: Any, pointer: Any) -> Any:
    return builder.ptrtoint(pointer, _WORD)


def _field(builder: Any, info: Any, number: int) -> Any:
    words = builder.bitcast(info, _WORD.as_pointer())
    return builder.gep(words, [ir.Constant(_WORD, number)])


def _fill(builder: Any, info: Any, *fields: Any) -> None:
    for i, value in enumerate(fields):
        builder.store(value, _field(builder, info, i))
