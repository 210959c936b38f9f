"""Compile kernels to one image: machine code that a process maps, without Numba (`image.py`).

    a kernel ──Numba──▶ LLVM ─┐
    its caller, from Python's ├─▶ object file ─┐
    objects to numbers ───────┘     … of others ─┴─link──▶ code │ imports, data

A caller takes Python's arguments as they are (vectorcall), checks them, releases the GIL and calls
the kernel. Arrays are read where NumPy keeps their fields, which is part of NumPy's ABI; they need
not be aligned, as numbers need not be on this machine. What kernels allocate is freed before they
return: an image has no reference that outlives a call.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.runtime import rtsys

from router.runtime.kernels.image import FORMAT, HEADER, PAGE_BYTES, address_of, machine
from router.runtime.kernels.image_compiler import Kernel, make_parts
from router.runtime.kernels.image_memory import write_allocator
from router.runtime.kernels.object_file import link

_WORD, _BYTE, _HALF = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_POINTER = _BYTE.as_pointer()

# Where the fields of `PyArrayObject` and `PyArray_Descr` lie, and flags of arrays.
_TYPE, _DATA, _NDIM, _SHAPE, _STRIDES, _DESCR, _FLAGS = 8, 16, 24, 32, 40, 56, 64
_TYPE_NUMBER = 28
_CONTIGUOUS, _WRITEABLE = 0x1, 0x400
_ARRAY_TYPE = "PyArray_Type"


def image_of(
    kernels: Sequence[Kernel], folder: Path, progress: Callable[[int, int], None]
) -> bytes:
    """Return the image of these kernels. Raises CompilationError.

    `folder`: for object files, which are kept if not all can be made.
    """
    callers = {each.key: f"kernel_{i}" for i, each in enumerate(kernels)}
    assert len(callers) == len(kernels), "two kernels of one name and signature"

    def object_of(kernel: Kernel, compiled: Any) -> bytes:
        return _object_file(compiled, callers[kernel.key], kernel.key)

    files = make_parts(kernels, folder, object_of, progress)
    try:
        linked = link(files, list(callers.values()))
        for name in linked.imports:
            address_of(name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    meta = {
        "format": FORMAT,
        "machine": machine(),
        "functions": {key: linked.symbols[name] for key, name in callers.items()},
        "imports": linked.imports,
        "relative": linked.relative,
        "code_bytes": linked.code_bytes,
    }
    described = json.dumps(meta).encode()
    described += b" " * (-(HEADER.size + len(described)) % PAGE_BYTES)
    body = described + linked.content
    return HEADER.pack(hashlib.sha256(body).digest(), len(described)) + body


def _object_file(compiled: Any, caller: str, key: str) -> bytes:
    """Return a kernel, its caller, and the memory that it allocates.

    `compiled`: by Numba (`CompileResult`).
    """
    context = compiled.target_context
    triple, cpu, features = context.codegen().magic_tuple()
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )
    made = ir.Module("callers")
    made.triple = llvm.get_process_triple()
    made.data_layout = str(context.codegen().target_data)
    _Caller(made, context, compiled, caller, key).write()
    write_allocator(made)
    module = llvm.parse_assembly(str(made))
    for library in (compiled.library, rtsys.library):
        module.link_in(llvm.parse_assembly(library.get_llvm_str()))
    module.verify()
    _drop_unused(module, caller, target)
    content: bytes = target.emit_object(module)
    return content


def _drop_unused(module: Any, kept: str, target: Any) -> None:
    for each in [*module.functions, *module.global_variables]:
        if not each.is_declaration and each.name != kept:
            each.linkage = llvm.Linkage.internal
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(3)))


class _Caller:
    """Writes the function that Python calls for one kernel."""

    def __init__(self, module: Any, context: Any, compiled: Any, name: str, key: str) -> None:
        self._module, self._context, self._compiled = module, context, compiled
        self._key = key
        kind = ir.FunctionType(_POINTER, [_POINTER, _POINTER.as_pointer(), _WORD])
        self._function = ir.Function(module, kind, name)
        self._builder = ir.IRBuilder(self._function.append_basic_block("entry"))

    def write(self) -> None:
        """Write: check the count, convert, call, convert back."""
        builder, signature = self._builder, self._compiled.signature
        _, given, count = self._function.args
        expected = ir.Constant(_WORD, len(signature.args))
        wrong = builder.icmp_unsigned("!=", count, expected)
        self._refuse(wrong, f"takes {len(signature.args)} arguments, without names")
        arguments = []
        for i, kind in enumerate(signature.args):
            value = builder.load(builder.gep(given, [ir.Constant(_WORD, i)]))
            arguments.append(self._unboxed(value, kind, i))
        thread = self._call(_POINTER, "PyEval_SaveThread")
        callee = self._context.declare_function(self._module, self._compiled.fndesc)
        status, result = self._context.call_conv.call_function(
            builder, callee, signature.return_type, signature.args, arguments
        )
        self._call(ir.VoidType(), "PyEval_RestoreThread", thread)
        self._refuse(status.is_error, "failed: no memory is left, or a wrong number", "MemoryError")
        builder.ret(self._boxed(result, signature.return_type))

    def _unboxed(self, value: Any, kind: Any, position: int) -> Any:
        builder = self._builder
        if isinstance(kind, types.Bytes):
            return self._bytes(value, kind)
        if isinstance(kind, types.Array):
            return self._array(value, kind, position)
        if isinstance(kind, types.Float):
            number = self._call(ir.DoubleType(), "PyFloat_AsDouble", value)
            self._pass_on(builder.fcmp_ordered("==", number, ir.Constant(number.type, -1.0)))
            return number
        if isinstance(kind, types.Boolean):
            truth = self._call(_HALF, "PyObject_IsTrue", value)
            self._pass_on(builder.icmp_signed("<", truth, ir.Constant(_HALF, 0)))
            return builder.trunc(truth, self._context.get_value_type(kind))
        if kind.signed:
            number = self._call(_WORD, "PyLong_AsLongLong", value)
            self._pass_on(builder.icmp_signed("==", number, ir.Constant(_WORD, -1)))
            return number
        whole = self._call(_POINTER, "PyNumber_Index", value)
        self._leave(self._is_null(whole))
        number = self._call(_WORD, "PyLong_AsUnsignedLongLong", whole)
        self._call(ir.VoidType(), "Py_DecRef", whole)
        self._pass_on(builder.icmp_signed("==", number, ir.Constant(_WORD, -1)))
        return number

    def _bytes(self, value: Any, kind: Any) -> Any:
        data = self._call(_POINTER, "PyBytes_AsString", value)
        self._leave(self._is_null(data))
        size = self._call(_WORD, "PyBytes_Size", value)
        return self._struct(kind, data, [size], [ir.Constant(_WORD, 1)])

    def _array(self, value: Any, kind: Any, position: int) -> Any:
        builder = self._builder
        array_type = self._field(value, _TYPE, _POINTER)
        is_other = builder.icmp_unsigned("!=", array_type, self._outside(_ARRAY_TYPE))
        refusal = f"wants as argument {position + 1} an array: {kind}"
        self._refuse(is_other, refusal)
        descr = self._field(value, _DESCR, _POINTER)
        number = self._field(descr, _TYPE_NUMBER, _HALF)
        dtype = np.dtype(kind.dtype.name.replace("boolean", "bool"))
        twin = {"q": np.dtype("l"), "Q": np.dtype("L"), "l": np.dtype("q"), "L": np.dtype("Q")}
        numbers = [dtype.num, twin.get(dtype.char, dtype).num]
        is_wrong = builder.and_(*[
            builder.icmp_unsigned("!=", number, ir.Constant(_HALF, each)) for each in numbers
        ])  # fmt: skip
        ndim = self._field(value, _NDIM, _HALF)
        is_wrong = builder.or_(
            is_wrong, builder.icmp_unsigned("!=", ndim, ir.Constant(_HALF, kind.ndim))
        )
        wanted = _CONTIGUOUS | (_WRITEABLE if kind.mutable else 0)
        has = builder.and_(self._field(value, _FLAGS, _HALF), ir.Constant(_HALF, wanted))
        lacks = builder.icmp_unsigned("!=", has, ir.Constant(_HALF, wanted))
        self._refuse(builder.or_(is_wrong, lacks), refusal)
        data = self._field(value, _DATA, _POINTER)
        places = [self._field(value, offset, _POINTER) for offset in (_SHAPE, _STRIDES)]
        shape, strides = (
            [self._field(place, 8 * i, _WORD) for i in range(kind.ndim)] for place in places
        )
        return self._struct(kind, data, shape, strides)

    def _struct(self, kind: Any, data: Any, shape: list[Any], strides: list[Any]) -> Any:
        builder = self._builder
        array = self._context.make_helper(builder, kind)
        size = shape[0] if len(shape) == 1 else builder.mul(*shape)
        array.nitems = size
        array.itemsize = ir.Constant(
            _WORD, kind.dtype.bitwidth // 8 if kind.dtype.name != "bool" else 1
        )
        array.data = builder.bitcast(data, array.data.type)
        array.shape = cgutils.pack_array(builder, shape)
        array.strides = cgutils.pack_array(builder, strides)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()

    def _boxed(self, value: Any, kind: Any) -> Any:
        builder = self._builder
        if isinstance(kind, types.NoneType):
            none = self._outside("_Py_NoneStruct")
            self._call(ir.VoidType(), "Py_IncRef", none)
            return none
        if isinstance(kind, types.BaseTuple):
            boxed = self._call(_POINTER, "PyTuple_New", ir.Constant(_WORD, len(kind)))
            self._leave(self._is_null(boxed))
            for i, each in enumerate(kind):
                item = self._boxed(builder.extract_value(value, i), each)
                self._call(_HALF, "PyTuple_SetItem", boxed, ir.Constant(_WORD, i), item)
            return boxed
        if isinstance(kind, types.Float):
            return self._call(_POINTER, "PyFloat_FromDouble", value)
        if isinstance(kind, types.Boolean):
            return self._call(_POINTER, "PyBool_FromLong", builder.zext(value, _WORD))
        make = "PyLong_FromLongLong" if kind.signed else "PyLong_FromUnsignedLongLong"
        return self._call(_POINTER, make, value)

    def _field(self, base: Any, offset: int, kind: Any) -> Any:
        builder = self._builder
        place = builder.gep(base, [ir.Constant(_WORD, offset)])
        return builder.load(builder.bitcast(place, kind.as_pointer()))

    def _outside(self, name: str) -> Any:
        """Return the address of an object of another library."""
        if name not in self._module.globals:
            outside = ir.GlobalVariable(self._module, _BYTE, name)
            outside.linkage = "external"
        return self._module.globals[name]

    def _call(self, result: Any, name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = cgutils.get_or_insert_function(self._module, kind, name)
        return self._builder.call(function, arguments)

    def _is_null(self, pointer: Any) -> Any:
        return self._builder.icmp_unsigned("==", pointer, ir.Constant(_POINTER, None))

    def _leave(self, condition: Any) -> None:
        """Return NULL if it holds: the error is set."""
        with self._builder.if_then(condition, likely=False):
            self._builder.ret(ir.Constant(_POINTER, None))

    def _pass_on(self, maybe: Any) -> None:
        """Return NULL if it holds and an error is set."""
        builder = self._builder
        with builder.if_then(maybe, likely=False):
            error = self._call(_POINTER, "PyErr_Occurred")
            with builder.if_then(builder.not_(self._is_null(error))):
                builder.ret(ir.Constant(_POINTER, None))

    def _refuse(self, condition: Any, text: str, kind: str = "TypeError") -> None:
        """Raise if it holds."""
        builder = self._builder
        with builder.if_then(condition, likely=False):
            error = builder.load(
                builder.bitcast(self._outside(f"PyExc_{kind}"), _POINTER.as_pointer())
            )
            name = self._key.partition("(")[0]
            message = cgutils.make_bytearray(f"{name} {text}".encode() + b"\0")
            place = cgutils.global_constant(self._module, ".message", message)
            self._call(ir.VoidType(), "PyErr_SetString", error, builder.bitcast(place, _POINTER))
            builder.ret(ir.Constant(_POINTER, None))
