"""Triton's semantics where they differ from Python's or numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_codegen.check import emulate

HEAD = """
import triton
import triton.language as tl


@triton.jit
def double(x):
    return x + x


@triton.jit
def keep_larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def kernel(x, y, n, N: tl.constexpr = 8):
    i = tl.arange(0, N)
"""


def run(body: str, x: torch.Tensor, y: torch.Tensor, n: float = 0, **options: object) -> torch.Tensor:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    emulate.load(HEAD + lines, "language").kernel[(1,)](x, y, n, **options)
    return y


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_integer_division_truncates() -> None:
    x = ints(7, -7, 8, -8, 1, -1, 0, 5)
    got = run("tl.store(y + i, tl.load(x + i) // 3 * 100 + tl.load(x + i) % 3)", x, torch.zeros_like(x))
    assert got.tolist() == [int(v / 3) * 100 + int(np.fmod(v, 3)) for v in x.tolist()]


def test_true_division_of_integers_is_float() -> None:
    assert run("tl.store(y + i, tl.load(x + i) / 2)", ints(*range(8)), torch.zeros(8)).tolist() == [
        v / 2 for v in range(8)
    ]


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(emulate.EmulatorError, match="division by zero"):
        run("tl.store(y + i, tl.load(x + i) // n)", ints(*range(8)), torch.zeros(8))


def test_32_bit_arithmetic_wraps_and_64_bit_does_not() -> None:
    x = ints(*[2**30] * 8)
    assert run("tl.store(y + i, tl.load(x + i) * 4)", x, torch.ones(8, dtype=torch.int64)).tolist() == [0] * 8
    wide = run("tl.store(y + i, tl.load(x + i).to(tl.int64) * 4)", x, torch.ones(8, dtype=torch.int64))
    assert wide.tolist() == [2**32] * 8


def test_numbers_do_not_widen_tensors() -> None:
    x = torch.full((8,), 2048.0, dtype=torch.float16)
    got = run("tl.store(y + i, (tl.load(x + i) + 1).to(tl.float32))", x, torch.zeros(8))
    assert got.tolist() == [2048.0] * 8  # float16 arithmetic: 2049 does not exist


def test_bf16_rounds_after_each_operation() -> None:
    x = torch.full((8,), 256.0, dtype=torch.bfloat16)
    assert run("tl.store(y + i, ((tl.load(x + i) + 1) + 1).to(tl.float32))", x, torch.zeros(8)).tolist() == [256.0] * 8


def test_maximum_ignores_nan_and_reductions_widen() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, -4.0] * 2)
    body = "v = tl.load(x + i)\ntl.store(y + i, tl.maximum(v, 2.0))\ntl.store(y, tl.max(v, 0))"
    assert run(body, x, torch.zeros(8)).tolist() == [3.0, 2.0, 3.0, 2.0, 2.0, 2.0, 3.0, 2.0]
    small = ints(*[100] * 8, dtype=torch.int8)
    assert int(run("tl.store(y, tl.sum(tl.load(x + i), 0))", small, torch.zeros(1, dtype=torch.int32))) == 800


def test_functions_are_methods_too() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, -4.0] * 2)
    body = "v = tl.load(x + i)\ntl.store(y + i, v.abs().exp2())\ntl.store(y, v.sum(0))"
    assert run(body, x, torch.zeros(8)).tolist() == [4.0, 4.0, 8.0, 16.0, 2.0, 4.0, 8.0, 16.0]


def test_loop_variable_is_a_run_time_integer() -> None:
    body = "t = i * 0\nfor k in range(2, 8, 3):\n    t += k.to(tl.int32)\ntl.store(y + i, t)"
    assert run(body, ints(0), torch.zeros(8, dtype=torch.int32)).tolist() == [7] * 8


def test_static_range_refuses_run_time_bounds() -> None:
    with pytest.raises(emulate.EmulatorError, match="static_range over a run-time value"):
        run("for k in tl.static_range(n):\n    pass", ints(0), torch.zeros(8))


def test_while_if_and_early_return() -> None:
    body = """
low = n * 0
while low < n:
    low += 2
if low > 4:
    tl.store(y + i, low)
    return
tl.store(y + i, -1)
"""
    assert run(body, ints(0), torch.zeros(8, dtype=torch.int32), 5).tolist() == [6] * 8
    assert run(body, ints(0), torch.zeros(8, dtype=torch.int32), 3).tolist() == [-1] * 8


def test_shape_functions() -> None:
    x = torch.arange(8.0)
    body = """
a = tl.load(x + i)
b = tl.interleave(a, double(a))
even, odd = tl.split(tl.reshape(b, [N, 2]))
c = tl.trans(tl.reshape(odd, [2, 4]))
tl.store(y + i, tl.ravel(c) + 0 * even)
"""
    assert run(body, x, torch.zeros(8)).tolist() == (2 * x).view(2, 4).T.reshape(-1).tolist()


def test_custom_reduction_scan_and_atomics() -> None:
    x = torch.tensor([3.0, 1.0, 8.0, -2.0, 5.0, 7.0, 0.0, 4.0])
    body = """
v = tl.load(x + i)
tl.atomic_add(y + (i % 2), v)
tl.store(y + 2, tl.reduce(v, 0, keep_larger))
tl.store(y + 3 + (i // 7), tl.cumsum(v, 0), mask=i == 7)
"""
    got = run(body, x, torch.zeros(8))
    assert got[:3].tolist() == [16.0, 10.0, 8.0]
    assert float(got[4]) == 26.0


def test_dot_is_exact_in_its_operands() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    body = """
j = tl.arange(0, 16)
a = tl.load(x + j[:, None] * 16 + j[None, :])
tl.store(y + j[:, None] * 16 + j[None, :], tl.dot(a, tl.trans(a)))
"""
    want = (x.double().view(16, 16) @ x.double().view(16, 16).T).float()
    torch.testing.assert_close(run(body, x, torch.zeros(256)).view(16, 16), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tl.store(y + i, tl.exp2(tl.load(x + i).to(tl.float16)))", "math functions take fp32"),
        ("tl.store(y + i, tl.load(x + tl.arange(0, 4)))", "operands of|of shape|shapes"),
        ("tl.store(y + i, tl.load(x + i), mask=i)", "a mask is int1"),
        ("if i > 3:\n    pass", "used as a condition"),
        ("j = tl.arange(0, 6)", "not a power of two"),
        ("tl.device_assert(i < 4, 'too far')", "device_assert failed: too far"),
        ("tl.store(y + i, tl.load(x + i, other=0.0))", "`other` but no mask"),
        ("tl.store(y + i, i.fancy())", "AttributeError: a tensor has no 'fancy'"),
        ("j = [1, 2][5]", "IndexError: list index out of range"),
        ("j = tl.arange(0, n)", "a bound of arange is a run-time value"),
        ("j = tl.zeros([n], tl.float32)", "a dimension is a run-time value"),
        ("tl.fancy(i)", "triton.language.fancy is not modelled"),
        (
            "v = tl.inline_asm_elementwise('bar.sync 0;', '=r,r', [i], tl.int32, True, 1)",
            "no reference for the assembly",
        ),
    ],
)
def test_misuse_is_named(body: str, message: str) -> None:
    with pytest.raises(emulate.EmulatorError, match=message) as caught:
        run(body, torch.zeros(8), torch.zeros(8))
    assert "kernel kernel, program 0, <emulated language>:" in str(caught.value)
