"""Vectors of 8 to 32 lanes inside numba functions: a block of 32 elements is one value, `v`, and formulas read as such.

    v = load_f32(address)               32 floats from memory (lane_memory_cpu.py)
    r = (magnitude(v) * s + c) - c      + - * / & | ^ << >> act lane by lane; a scalar is taken in every lane
    select(v > t, r, 0)                 comparisons give a mask
    bits(v), floats(b)                  the same bits as int32 or float32 (lane_functions_cpu.py)

Why not plain loops: whether LLVM vectorises a loop of 32 depends on its version and on what it can prove about
aliasing, and a loop that it does not vectorise is ten times slower. Here every operation *is* one instruction on a
vector of LLVM's; the code generator splits it into what the machine has (2 × AVX-512, 4 × AVX2, 8 × NEON).
No operation is contracted or reordered: each rounds as IEEE 754 says, like torch's own.

Addresses are whole numbers (`tensor.data_ptr()`, bytes), so one compiled kernel serves every dtype and stride.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

ELEMENTS = {
    "f32": (ir.FloatType(), types.float32),
    "f64": (ir.DoubleType(), types.float64),
    "i32": (ir.IntType(32), types.int32),
    "i64": (ir.IntType(64), types.int64),
    "m": (ir.IntType(1), types.boolean),
}
INT8, INT16, INT32, INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


class Lanes(types.Type):
    """The numba type of a vector: `kind` (a key of ELEMENTS) times `count` lanes."""

    def __init__(self, kind: str, count: int):
        self.kind, self.count = kind, count
        super().__init__(name=f"lanes_{kind}x{count}")

    @property
    def element(self) -> Any:
        return ELEMENTS[self.kind][0]

    @property
    def scalar(self) -> Any:
        return ELEMENTS[self.kind][1]

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(self.element, self.count)

    @property
    def is_float(self) -> bool:
        return self.kind in ("f32", "f64")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes):
        super().__init__(dmm, fe_type, fe_type.llvm)


# --- how functions are compiled ---------------------------------------------------------------------------------------

_SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*_cpu.py")))).hexdigest()


def primitive(function: Callable) -> Any:
    """numba's `intrinsic`, which type checkers take for the function as it is written."""
    return intrinsic(function)


def inlined(function: Callable) -> Any:
    """A piece of a kernel: inlined where it is called, never compiled on its own."""
    options: dict[str, Any] = dict(forceinline=True, error_model="numpy", no_cpython_wrapper=True)
    return njit(**options)(function)


def kernel(function: Callable) -> Any:
    """An entry point from Python: runs without the GIL, cached on disk.

    numba's cache looks at the file of the entry point alone, and would go on using old code after an edit of a
    function that it inlines; so the name, which is a part of the cache's key, carries the hash of all `*_cpu.py`.
    """
    function.__qualname__ += f".{_SOURCES[:16]}"
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no directory that can be written for the cache: compiled anew in each process
        return njit(nogil=True, error_model="numpy")(function)


# --- lowering ---------------------------------------------------------------------------------------------------------


def repeat(builder: Any, value: Any, lanes: Lanes) -> Any:
    undefined = ir.Constant(lanes.llvm, ir.Undefined)
    one = builder.insert_element(undefined, value, INT32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(INT32, lanes.count), [0] * lanes.count))


def as_lanes(context: Any, builder: Any, value: Any, ty: Any, lanes: Lanes) -> Any:
    """A vector as it is, a scalar cast to the element's type and repeated."""
    if isinstance(ty, Lanes):
        return value
    return repeat(builder, context.cast(builder, value, ty, lanes.scalar), lanes)


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(order)), order))


def _lanes_of(a: Any, b: Any) -> Lanes | None:
    """The vector type of `a op b`: two of one type, or a vector and a number."""
    if isinstance(a, Lanes) and isinstance(b, Lanes):
        return a if a == b else None
    if isinstance(a, Lanes) and isinstance(b, types.Number):
        return a
    if isinstance(b, Lanes) and isinstance(a, types.Number):
        return b
    return None


def _operator(op: Callable, floating: str | None, integer: str | None, compare: str | None = None) -> None:
    """`op` on vectors as the IRBuilder's method for floats and for ints, or as a comparison."""

    @type_callable(op)
    def typing(context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            lanes = _lanes_of(a, b)
            return lanes if compare is None or lanes is None else Lanes("m", lanes.count)

        return typer

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = _lanes_of(*sig.args)
        assert lanes is not None
        a, b = (as_lanes(context, builder, v, t, lanes) for v, t in zip(args, sig.args, strict=True))
        if compare is not None:
            floats_compared = builder.fcmp_unordered if compare == "!=" else builder.fcmp_ordered  # NaN != NaN
            return (floats_compared if lanes.is_float else builder.icmp_signed)(compare, a, b)
        method = floating if lanes.is_float else integer
        if method is None:
            raise TypeError(f"{op.__name__} is not defined for {lanes}")
        return getattr(builder, method)(a, b)

    for left, right in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(op, left, right)(lower)


for _op, _float, _int in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", None),
    (operator.and_, None, "and_"),
    (operator.or_, None, "or_"),
    (operator.xor, None, "xor"),
    (operator.lshift, None, "shl"),
    (operator.rshift, None, "lshr"),  # zeros come in from the left
):
    _operator(_op, _float, _int)
for _op, _sign in ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">=")):
    _operator(_op, None, None, _sign)
for _op, _sign in ((operator.eq, "=="), (operator.ne, "!=")):
    _operator(_op, None, None, _sign)


def declare(builder: Any, name: str, result: ir.Type, args: list) -> ir.Function:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, args), name)


def llvm_name(element: ir.Type) -> str:
    return {"float": "f32", "double": "f64"}.get(str(element), str(element))
