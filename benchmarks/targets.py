"""What the benchmarks aim at, and how far each measured row is from it; tables.py prints both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from measure import Row

GPU_BYTES = 256 << 20  # the kernels' targets are about tensors of at least 256 MiB


@dataclass(frozen=True)
class Target:
    """A bound on `value` of the rows that `where` picks, one verdict for each dtype, precision or case among them."""

    what: str
    benchmark: str
    where: dict[str, Any]
    value: Callable[[Row, list[Row]], float | None]
    bound: float
    least: bool  # whether the bound is the least that will do (else the most)
    accelerator: bool

    def verdicts(self, rows: list[Row]) -> Iterator[tuple[str, float]]:
        for row in rows:
            if row["benchmark"] == self.benchmark and "ms" in row and self._here(row):
                if all(row.get(k) == v for k, v in self.where.items()):
                    value = self.value(row, same_run(row, rows))
                    if value is not None:
                        yield _variant(row), value

    def _here(self, row: Row) -> bool:
        if row["accelerator"] != self.accelerator:
            return False
        return self.benchmark != "kernels" or not self.accelerator or row["tensor_bytes"] >= GPU_BYTES

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound

    def factor(self, value: float) -> float:
        """How far off a miss is: 1.1 is ten percent too slow."""
        return self.bound / value if self.least else value / self.bound


def _variant(row: Row) -> str:
    names = [str(row[k]) for k in ("dtype", "precision", "case", "model", "recipe") if row.get(k)]
    if row.get("op") == "decode":
        names += [f"{row['sequences']} sequences, {row['slots'] or 'all'} at a time"] if "sequences" in row else []
    if row.get("benchmark") == "analyze":
        names += [f"{row['bytes'] / 1e9:.0f} GB"]
    return ", ".join(names)


def same_run(row: Row, rows: list[Row]) -> list[Row]:
    """The rows that were interleaved with this one."""
    keys = ["benchmark", "group", "dtype", "shape", "device", "created", "precision", "case"]
    if row["benchmark"] == "ranks":
        keys.remove("created")  # its processes start one after the other
    return [other for other in rows if all(other.get(k) == row.get(k) for k in keys) and "ms" in other]


def _fraction(row: Row, run: list[Row]) -> float | None:
    return row.get("fraction")


def median_ms(row: Row) -> float:
    return row["ms"]["p50"]


def times_of(op: str, **where: str) -> Callable[[Row, list[Row]], float | None]:
    """How many times the p50 of the row of `op` in the same run."""

    def value(row: Row, run: list[Row]) -> float | None:
        units = [r for r in run if r["op"] == op and all(r.get(k) == v for k, v in where.items())]
        return median_ms(row) / median_ms(units[0]) if units else None

    return value


def _fastest_peer(row: Row, run: list[Row]) -> float | None:
    """The fastest peer's time over ours: above 1 all are beaten."""
    peers = [median_ms(r) for r in run if r["backend"] == "peer"]
    return min(peers) / median_ms(row) if peers else None


def speed_over(**where: str) -> Callable[[Row, list[Row]], float | None]:
    def value(row: Row, run: list[Row]) -> float | None:
        others = [r for r in run if all(r.get(k) == v for k, v in where.items())]
        return row["tokens/s"] / others[0]["tokens/s"] if others else None

    return value


def _targets() -> Iterator[Target]:
    kernel = {"op": "qdq", "backend": "triton", "group": "qdq"}
    for recipe, bound in (
        ("mxfp4", 0.95), ("mxfp4+mbs", 0.95), ("mxfp4+of", 0.95), ("mxfp4+mbs+of", 0.85), ("mxfp4+mbs:search16", 0.20),
    ):  # fmt: skip
        where = kernel | {"recipe": recipe}
        yield Target("qdq into out, share of copy bandwidth", "kernels", where, _fraction, bound, True, True)
    stats = {"op": "stats", "backend": "triton", "recipe": "mxfp4"}
    yield Target("statistics: share of read bandwidth", "kernels", stats, _fraction, 0.90, True, True)
    plain = kernel | {"recipe": "mxfp4", "group": "peers"}
    yield Target("fastest peer's time, × ours", "kernels", plain, _fastest_peer, 1.0, True, True)
    for recipe, bound in (("mxfp4", 1.25), ("mxfp4+mbs+of", 1.40)):
        where = {"op": "train step", "recipe": recipe, "backend": "triton"}
        yield Target(
            "training step, × bf16", "train_step", where, times_of("train step", recipe="bf16"), bound, False, True
        )
    bf16 = {"op": "rollout", "engine": "slots", "recipe": "bf16", "case": "even"}
    for engine in ("hf static", "hf static, eager"):
        over_hf = speed_over(engine=engine, recipe="bf16")
        yield Target(f"rollout, × generate ({engine})", "rollout", bf16, over_hf, 2.0, True, True)
    for recipe in ("mxfp4", "mxfp4+mbs+of"):
        yield Target(
            "W4A4 rollout, share of our bf16", "rollout", bf16 | {"recipe": recipe, "backend": "triton"},
            speed_over(engine="slots", recipe="bf16"), 0.75, True, True,
        )  # fmt: skip
    cpu = {"op": "qdq", "backend": "cpu", "group": "qdq", "recipe": "mxfp4"}
    for dtype, bound in (("float32", 1.7), ("bfloat16", 3.0)):
        yield Target("qdq into out, × copy", "kernels", cpu | {"dtype": dtype}, times_of("copy"), bound, False, False)
    stats = {"op": "stats", "backend": "cpu", "recipe": "mxfp4"}
    yield Target("statistics, × qdq", "kernels", stats, times_of("qdq", backend="cpu"), 1.0, False, False)
    yield Target("fastest peer's time, × ours", "kernels", cpu | {"group": "peers"}, _fastest_peer, 1.0, True, False)


def _over_one_gpu(phase: str, tokens: str) -> Callable[[Row, list[Row]], float | None]:
    """Two GPUs' tokens a second over one's, in that phase of a step."""

    def value(row: Row, run: list[Row]) -> float | None:
        own = [r for r in run if all(r[k] == row[k] for k in ("op", "model", "recipe", "sequences", "slots"))]
        if not any(r["processes"] == 1 for r in own) or row is not [r for r in own if r["processes"] == 2][-1]:
            return None
        return tokens_per_second(own, 2, phase, tokens) / tokens_per_second(own, 1, phase, tokens)

    return value


def _several_gpus() -> Iterator[Target]:
    step: dict[str, Any] = {"op": "step", "processes": 2}
    for what, phase, tokens in (("rollout", "rollout", "rollout_tokens"), ("training", "update", "trained_tokens")):
        value = _over_one_gpu(phase, tokens)
        yield Target(f"{what}, 2 GPUs × 1", "ranks", step, value, 1.8, True, True)
    decode: dict[str, Any] = {"op": "decode", "processes": 2}
    value = _over_one_gpu("rollout", "rollout_tokens")
    yield Target("decoding alone, 2 GPUs × 1", "ranks", decode, value, 1.8, True, True)
    whole: dict[str, Any] = {"op": "steady", "gpus": 2}
    yield Target("analyze, workers up, 2 GPUs × 1", "scan", whole, lambda row, _: row.get("speedup"), 1.9, True, True)
    whole = {"op": "analyze", "gpus": 2}
    yield Target("analyze, whole command, 2 GPUs × 1", "analyze", whole, lambda row, _: row["speedup"], 1.9, True, True)


TARGETS = (*_targets(), *_several_gpus())


def targets(rows: list[Row], *, measured: bool = False) -> list[str]:
    """Markdown lines: what was aimed at, what was measured. measured: leave out what wasn't."""
    lines = ["| device | target | | bound | measured | |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        found = list(target.verdicts(rows))
        sign = "≥" if target.least else "≤"
        where = "H200" if target.accelerator else "CPU"
        for variant, value in found or ([] if measured else [(_variant(target.where), None)]):
            verdict = "not measured"
            if value is not None and target.met(value):
                verdict = "met"
            elif value is not None:
                verdict = f"**missed by × {target.factor(value):.2f}**{_limit(target, rows)}"
            shown = "" if value is None else f"{value:.3f}"
            lines.append(f"| {where} | {target.what} | {variant} | {sign} {target.bound:g} | {shown} | {verdict} |")
    return lines


def _limit(target: Target, rows: list[Row]) -> str:
    """What was counted of a kernel that misses its target."""
    names = {k: target.where[k] for k in ("op", "recipe", "backend") if k in target.where}
    counted = [r for r in rows if r["benchmark"] == "counters" and all(r[k] == v for k, v in names.items())]
    return f": {told(counted[-1])}" if counted and target.benchmark == "kernels" else ""


def told(row: Row) -> str:
    """A row of counters.py in words."""
    moved = f"{row['read']:.2f} B read and {row['written']:.2f} B written an element"
    busy = f"{row['per_cycle']:.2f} of 4 instructions a cycle, {row['dram']:.0%} of DRAM's peak"
    return f"{row['instructions']:.1f} instructions, {moved}; {busy}, {row['registers']:.0f} registers"


def mean_seconds(rows: list[Row], phase: str, processes: int) -> float:
    values = [r["seconds"].get(phase, 0.0) for r in rows if r["processes"] == processes]
    return sum(values) / len(values)


def tokens_per_second(rows: list[Row], processes: int, phase: str, tokens: str) -> float:
    own = [r for r in rows if r["processes"] == processes]
    return sum(r[tokens] for r in own) / sum(r["seconds"][phase] for r in own)
