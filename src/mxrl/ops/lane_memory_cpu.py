"""Vectors to and from memory: loads, stores and single numbers at addresses, for numba functions (see lanes_cpu.py).

load_f32(address), store_f32(address, v)     32 elements; load_u16, load_u8: widened to int32
load_f32_part(address, n)                    the first n, zeros behind them; nothing beyond is touched
stream_f32(address, v)                       past the caches; the address is a multiple of STREAM
read_int(address, i), write_int(...)         the i-th number from address on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from mxrl.ops.lanes_cpu import INT8, INT16, INT32, INT64, Lanes, declare, llvm_name, primitive, repeat


def pointer_to(builder: Any, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _loader(stored: ir.Type, lanes: Lanes, then: Callable | None = None) -> Any:
    """load(address) and load_part(address, count), which reads nothing beyond `count` elements and fills with zeros."""
    vector = ir.VectorType(stored, lanes.count)

    @primitive
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(pointer_to(builder, args[0], vector), align=1)
            return value if then is None else then(builder, value)

        return lanes(types.int64), codegen

    @primitive
    def load_part(typingctx: Any, address: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            mask = _first(builder, args[1], lanes.count)
            name = f"llvm.masked.load.v{lanes.count}{llvm_name(stored)}.p0"
            pointer = pointer_to(builder, args[0], vector)
            function = declare(builder, name, vector, [pointer.type, INT32, mask.type, vector])
            value = builder.call(function, [pointer, INT32(1), mask, ir.Constant(vector, None)])
            return value if then is None else then(builder, value)

        return lanes(types.int64, types.int64), codegen

    return load, load_part


def _storer(stored: ir.Type, lanes: Lanes, then: Callable | None = None) -> Any:
    """store(address, v), store_part(address, v, count), and stream(address, v): past the caches, address aligned."""
    vector = ir.VectorType(stored, lanes.count)

    def value_of(builder: Any, value: Any) -> Any:
        return value if then is None else then(builder, value)

    @primitive
    def store(typingctx: Any, address: Any, v: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            builder.store(value_of(builder, args[1]), pointer_to(builder, args[0], vector), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, lanes), codegen

    @primitive
    def stream(typingctx: Any, address: Any, v: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            instruction = builder.store(value_of(builder, args[1]), pointer_to(builder, args[0], vector), align=STREAM)
            instruction.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))
            return context.get_dummy_value()

        return types.void(types.int64, lanes), codegen

    @primitive
    def store_part(typingctx: Any, address: Any, v: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            mask = _first(builder, args[2], lanes.count)
            pointer = pointer_to(builder, args[0], vector)
            name = f"llvm.masked.store.v{lanes.count}{llvm_name(stored)}.p0"
            function = declare(builder, name, ir.VoidType(), [vector, pointer.type, INT32, mask.type])
            builder.call(function, [value_of(builder, args[1]), pointer, INT32(1), mask])
            return context.get_dummy_value()

        return types.void(types.int64, lanes, types.int64), codegen

    return store, store_part, stream


STREAM = 64  # bytes, the alignment of a streamed store


def _first(builder: Any, count: Any, lanes: int) -> Any:
    """The mask of the first `count` lanes."""
    ty = Lanes("i32", lanes)
    index = ir.Constant(ty.llvm, list(range(lanes)))
    return builder.icmp_signed("<", index, repeat(builder, builder.trunc(count, INT32), ty))


def _widen(builder: Any, v: Any) -> Any:
    return builder.zext(v, ir.VectorType(INT32, v.type.count))


def _narrow(element: ir.Type) -> Callable:
    return lambda builder, v: builder.trunc(v, ir.VectorType(element, v.type.count))


F32, F64, I32, I64 = Lanes("f32", 32), Lanes("f64", 8), Lanes("i32", 32), Lanes("i64", 8)

load_f32, load_f32_part = _loader(ir.FloatType(), F32)
load_u16, load_u16_part = _loader(INT16, I32, _widen)
load_u8, load_u8_part = _loader(INT8, I32, _widen)
load_16_u8, load_16_u8_part = _loader(INT8, Lanes("i32", 16), _widen)
load_16_f32, _ = _loader(ir.FloatType(), Lanes("f32", 16))
load_16_i32, _ = _loader(INT32, Lanes("i32", 16))
load_16_u16, _ = _loader(INT16, Lanes("i32", 16), _widen)
load_8_f64, _ = _loader(ir.DoubleType(), F64)
store_f32, store_f32_part, stream_f32 = _storer(ir.FloatType(), F32)
store_u16, store_u16_part, stream_u16 = _storer(INT16, I32, _narrow(INT16))
store_u8, store_u8_part, _ = _storer(INT8, I32, _narrow(INT8))
store_16_u8, store_16_u8_part, _ = _storer(INT8, Lanes("i32", 16), _narrow(INT8))
store_16_f32, _, _ = _storer(ir.FloatType(), Lanes("f32", 16))
store_16_i32, _, stream_16_i32 = _storer(INT32, Lanes("i32", 16))
store_16_u16, _, _ = _storer(INT16, Lanes("i32", 16), _narrow(INT16))
store_8_f32, _, _ = _storer(ir.FloatType(), Lanes("f32", 8))
store_8_i32, _, _ = _storer(INT32, Lanes("i32", 8))
store_8_i64, _, _ = _storer(INT64, I64)
store_8_f64, _, _ = _storer(ir.DoubleType(), F64)


@primitive
def fence(typingctx: Any) -> Any:
    """Streamed stores are seen by whoever is told, after this, that they are done."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _number(stored: ir.Type, given: Any) -> Any:
    """read(address, i) and write(address, i, value): the i-th number at address, as `given`."""

    def pointer(builder: Any, address: Any, index: Any) -> Any:
        return builder.gep(pointer_to(builder, address, stored), [index])

    @primitive
    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(pointer(builder, args[0], args[1]), align=1)
            if given is not types.int64 or stored == INT64:
                return value
            return (builder.zext if stored == INT8 else builder.sext)(value, INT64)

        return given(types.int64, types.int64), codegen

    @primitive
    def write(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            number = args[2]
            if given is types.int64 and stored != INT64:
                number = builder.trunc(number, stored)
            builder.store(number, pointer(builder, args[0], args[1]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, given), codegen

    return read, write


read_byte, write_byte = _number(INT8, types.int64)  # unsigned
read_int16, write_int16 = _number(INT16, types.int64)
read_int, write_int = _number(INT32, types.int64)
read_int64, write_int64 = _number(INT64, types.int64)
read_float, write_float = _number(ir.FloatType(), types.float32)
read_double, write_double = _number(ir.DoubleType(), types.float64)
