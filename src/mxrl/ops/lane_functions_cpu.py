"""Functions of vectors inside numba functions (see lanes_cpu.py): bits, conversions, lanes, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from mxrl.ops.lanes_cpu import ELEMENTS, INT32, INT64, Lanes, as_lanes, declare, primitive, shuffle


def _reinterpret(source: str, target: str) -> Any:
    @primitive
    def cast(typingctx: Any, v: Any) -> Any:
        if isinstance(v, Lanes):
            result: Any = Lanes(target, v.count)
            given: Any = v
        else:
            result, given = ELEMENTS[target][1], ELEMENTS[source][1]

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(result))

        return result(given), codegen

    return cast


bits = _reinterpret("f32", "i32")
floats = _reinterpret("i32", "f32")
bits64 = _reinterpret("f64", "i64")
floats64 = _reinterpret("i64", "f64")


def _convert(source: str, target: str, method: str) -> Any:
    @primitive
    def convert(typingctx: Any, v: Any) -> Any:
        result = Lanes(target, v.count)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, method)(args[0], result.llvm)

        return result(v), codegen

    return convert


to_f64 = _convert("f32", "f64", "fpext")
to_f32 = _convert("f64", "f32", "fptrunc")  # to nearest, ties to even
truncate = _convert("f32", "i32", "fptosi")
count_to_f32 = _convert("i32", "f32", "sitofp")
count_to_f64 = _convert("i64", "f64", "sitofp")
truncate_f64 = _convert("f64", "i64", "fptosi")


@primitive
def select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where mask, else b; one of them may be a number."""
    lanes = a if isinstance(a, Lanes) else b

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, y = (as_lanes(context, builder, v, t, lanes) for v, t in zip(args[1:], sig.args[1:], strict=True))
        return builder.select(args[0], x, y)

    return lanes(mask, a, b), codegen


def _extreme(sign: str) -> Any:
    @primitive
    def extreme(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            y = as_lanes(context, builder, args[1], sig.args[1], a)
            beyond = (builder.fcmp_ordered if a.is_float else builder.icmp_signed)(sign, y, args[0])
            return builder.select(beyond, y, args[0])

        return a(a, b), codegen

    return extreme


minimum, maximum = _extreme("<"), _extreme(">")  # of a vector and a vector or number; a NaN in the first stays


@primitive
def splat(typingctx: Any, value: Any, like: Any) -> Any:
    """The number in every lane of a vector like `like`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return as_lanes(context, builder, args[0], sig.args[0], like)

    return like(value, like), codegen


def _pick(order_of: Callable[[int], list[int]]) -> Any:
    @primitive
    def pick(typingctx: Any, v: Any) -> Any:
        order = order_of(v.count)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return shuffle(builder, args[0], args[0], order)

        return Lanes(v.kind, len(order))(v), codegen

    return pick


low_half = _pick(lambda n: list(range(n // 2)))
high_half = _pick(lambda n: list(range(n // 2, n)))
evens = _pick(lambda n: list(range(0, n, 2)))
odds = _pick(lambda n: list(range(1, n, 2)))


def _join(order_of: Callable[[int], list[int]]) -> Any:
    @primitive
    def join(typingctx: Any, a: Any, b: Any) -> Any:
        order = order_of(a.count)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return shuffle(builder, args[0], args[1], order)

        return Lanes(a.kind, len(order))(a, b), codegen

    return join


quarter_0, quarter_1, quarter_2, quarter_3 = (
    _pick(lambda n, q=q: list(range(q * n // 4, (q + 1) * n // 4))) for q in range(4)
)


concat = _join(lambda n: list(range(2 * n)))


def _halves(width: int, second: int) -> Any:
    """The first (or second) halves of the groups of `width` lanes of a, then of b."""
    half = width // 2
    return _join(lambda n: [g + second * half + i for g in range(0, 2 * n, width) for i in range(half)])


first_16, first_8, first_4, first_2 = (_halves(w, 0) for w in (16, 8, 4, 2))
second_16, second_8, second_4, second_2 = (_halves(w, 1) for w in (16, 8, 4, 2))
riffle_low = _join(lambda n: [i // 2 + n * (i % 2) for i in range(n)])  # the first half of `interleave`
riffle_high = _join(lambda n: [(i + n) // 2 + n * (i % 2) for i in range(n)])
interleave = _join(lambda n: [i // 2 + n * (i % 2) for i in range(2 * n)])  # a0 b0 a1 b1 ...


@primitive
def lane(typingctx: Any, v: Any, index: Any) -> Any:
    """One lane as a scalar."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], args[1])

    return v.scalar(v, types.int64), codegen


def _reduction(name: str) -> Any:
    @primitive
    def reduce(typingctx: Any, v: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            function = declare(builder, f"llvm.vector.reduce.{name}.v{v.count}i32", INT32, [v.llvm])
            return builder.call(function, [args[0]])

        return types.int32(v), codegen

    return reduce


largest_lane, smallest_lane = _reduction("smax"), _reduction("smin")  # of an int32 vector


def _mask_word(then: Callable) -> Any:
    @primitive
    def of_mask(typingctx: Any, mask: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            word = builder.bitcast(args[0], ir.IntType(mask.count))
            return builder.zext(then(builder, word), INT64)

        return types.int64(mask), codegen

    return of_mask


mask_bits = _mask_word(lambda builder, word: word)  # int64, lane i is bit i
count_true = _mask_word(lambda builder, word: builder.ctpop(word))
first_true = _mask_word(lambda builder, word: builder.cttz(word, ir.Constant(ir.IntType(1), 0)))


@primitive
def square_root(typingctx: Any, v: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.sqrt.v{v.count}{v.kind}"
        return builder.call(declare(builder, name, v.llvm, [v.llvm]), [args[0]])

    return v(v), codegen


@primitive
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once where the machine has an instruction for it, else twice: for sums, never for values."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.fmuladd.v{a.count}{a.kind}"
        return builder.call(declare(builder, name, a.llvm, [a.llvm] * 3), args)

    return a(a, a, a), codegen


@primitive
def lane_numbers(typingctx: Any, like: Any) -> Any:
    """0, 1, 2 ... in an integer vector like `like`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(like.llvm, list(range(like.count)))

    return like(like), codegen


def constant(kind: str, values: list) -> Any:
    """A function without arguments that gives a vector of these numbers."""
    lanes = Lanes(kind, len(values))

    @primitive
    def vector(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(lanes.llvm, [ir.Constant(lanes.element, v) for v in values])

        return lanes(), codegen

    return vector


# --- pieces that every kernel uses, intrinsics because numba takes 70 ms to compile a function ------------------------


def _float_bits(v: Any) -> Any:
    return Lanes("i32", v.count)


@primitive
def magnitude(typingctx: Any, v: Any) -> Any:
    """|v| of float32 lanes; a NaN stays one."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.fabs.v{v.count}f32"
        return builder.call(declare(builder, name, v.llvm, [v.llvm]), args)

    return v(v), codegen


@primitive
def with_sign(typingctx: Any, a: Any, v: Any) -> Any:
    """|a| with the signs of v, float32 lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.copysign.v{v.count}f32"
        return builder.call(declare(builder, name, v.llvm, [v.llvm, v.llvm]), args)

    return v(v, v), codegen


@primitive
def amax(typingctx: Any, v: Any) -> Any:
    """max|v| of float32 lanes as bits, int64: NaN above Inf above every number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ints = _float_bits(v)
        b = builder.and_(builder.bitcast(args[0], ints.llvm), ir.Constant(ints.llvm, [0x7FFFFFFF] * v.count))
        function = declare(builder, f"llvm.vector.reduce.smax.v{v.count}i32", INT32, [ints.llvm])
        return builder.sext(builder.call(function, [b]), INT64)

    return types.int64(v), codegen


@primitive
def halve(typingctx: Any, v: Any) -> Any:
    """First half + second half."""
    half = v.count // 2

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low = shuffle(builder, args[0], args[0], list(range(half)))
        high = shuffle(builder, args[0], args[0], list(range(half, v.count)))
        return builder.fadd(low, high)

    return Lanes(v.kind, half)(v), codegen
