"""The interpreter's corrections, value by value, against torch; and the reference of each assembly step."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mla_codegen.runtime import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="these are tests of Triton's interpreter")
interpreter.correct()

BF16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
PAIR_EVEN, PAIR_ODD = (next(text for text in interpreter.REFERENCES if f"e4m3x2 $0, {half};" in text) for half in "ab")


@triton.jit
def convert(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n).to(target.dtype.element_ty), mask=at < n)


@triton.jit
def multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def assembly(source, target, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(source + at)
    result = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [value], target.dtype.element_ty, is_pure=True, pack=PACK)
    tl.store(target + at, result)


@triton.jit
def copy_where(source, target, n, few: tl.constexpr, N: tl.constexpr):
    """What lies before `few`, if n is positive: a mask of a vector's condition and a scalar's."""
    at = tl.arange(0, N)
    wanted = (at < few) & (n > 0)
    tl.store(target + at, tl.load(source + at, mask=wanted, other=-1.0), mask=(n > 0) & (at < N - 1))
    tl.store(target + N - 1 + tl.zeros([1], tl.int32), 7.0, mask=n > 1)


def converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(values.shape, dtype=dtype)
    convert[(triton.cdiv(len(values), 4096),)](values, out, len(values), BLOCK=4096)
    return out


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return torch.where(values.isnan(), values, values.float().clamp(-limit, limit)).to(dtype)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    same = (got.view(bits) == want.view(bits)) | (got.float().isnan() & want.float().isnan())
    assert same.all(), f"{int((~same).sum())} values differ, the first at {(~same).nonzero()[0].item()}"


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_bf16_value_to_fp8(name: str, source: torch.dtype) -> None:
    """65536 values, nearest even; past the largest number the largest, as the hardware's conversions do."""
    values = BF16.to(source)
    assert_same_bits(converted(values, FP8[name]), saturated(values, FP8[name]))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_byte_from_fp8(name: str, target: torch.dtype) -> None:
    values = BYTES.view(FP8[name])
    assert_same_bits(converted(values, target), values.to(target))


def test_every_bf16_value_to_fp32_and_back() -> None:
    assert_same_bits(converted(BF16, torch.float32), BF16.float())
    assert_same_bits(converted(BF16.float(), torch.bfloat16), BF16)


def test_fp32_to_bf16_rounds_to_nearest_even() -> None:
    values = torch.randn(65536, generator=torch.Generator().manual_seed(0)) * 1e3
    values[:4096] = torch.arange(4096) * 2.0**-8 + 1  # ties among them
    want = values.bfloat16()
    assert (want.float() != (values.view(torch.int32) & -65536).view(torch.float32)).any()  # truncation would differ
    assert_same_bits(converted(values, torch.bfloat16), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8.values()], ids=str)
def test_dot_multiplies_numbers_and_not_bit_patterns(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 64, generator=generator).to(dtype), torch.randn(64, 32, generator=generator).to(dtype)
    out = torch.zeros(16, 32)
    multiply[(1,)](a, b, out, M=16, N=32, K=64)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [-1, 1, 2])
def test_a_scalar_condition_may_be_part_of_a_mask(n: int) -> None:
    source, target = torch.arange(1.0, 17.0), torch.zeros(16)
    copy_where[(1,)](source, target, n, few=5, N=16)
    want = torch.zeros(16)
    if n > 0:
        want[:15] = -1
        want[:5] = source[:5]
    if n > 1:
        want[15] = 7
    assert torch.equal(target, want)


@tl.core.extern
def amd_reciprocal(x, _semantic=None):
    symbols = {(tl.float32,): ("llvm.amdgcn.rcp.f32", tl.float32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@tl.core.extern
def sine(x, _semantic=None):
    symbols = {(tl.float32,): ("llvm.amdgcn.sin.f32", tl.float32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@triton.jit
def intrinsic(source, target, SINE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(source + at)
    tl.store(target + at, sine(value) if SINE else amd_reciprocal(value))


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_reciprocal(vendor: str) -> None:
    values = torch.cat([BF16.float()[BF16.float().abs() > 1e-37], torch.tensor([0.0])])[:32768]
    values = torch.nn.functional.pad(values, (0, 32768 - len(values)), value=1.0)
    out = torch.zeros_like(values)
    if vendor == "amd":
        intrinsic[(1,)](values, out, SINE=False, N=32768)
    else:
        assembly[(1,)](values, out, ASM="rcp.approx.ftz.f32 $0, $1;", CONSTRAINTS="=f,f", PACK=1, N=32768)
    assert_same_bits(out, torch.from_numpy(1 / values.numpy().astype(np.float32)))


@pytest.mark.parametrize(("asm", "low"), [(PAIR_EVEN, True), (PAIR_ODD, False)], ids=["even", "odd"])
def test_every_byte_of_a_pair_to_f16(asm: str, low: bool) -> None:
    """Each byte beside every other: the neighbour must not leak in."""
    pairs = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    out = torch.zeros(65536, dtype=torch.float16)
    assembly[(1,)](pairs, out, ASM=asm, CONSTRAINTS="=r,r", PACK=2, N=65536)
    columns = pairs.view(torch.uint8).reshape(-1, 2)[:, 0 if low else 1].contiguous()
    assert_same_bits(out, columns.view(torch.float8_e4m3fn).half())


@triton.jit
def scaled(target, number, factor, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, number)
    tl.store(target + N + at, number + number)
    tl.store(target + 2 * N + at, at.to(tl.int64) * number)
    tl.store(target + 3 * N + at, at * factor)


@triton.jit(do_not_specialize=["number"])
def as_given(target, number):
    tl.store(target, number)


@pytest.mark.parametrize(
    "number", [1, -1, 2**31 - 1, 2**31, 2**31 + 16, 3 * 2**30, 2**32 - 1, 2**32, 2**40 + 3, -(2**33)]
)
def test_numbers_of_64_bits(number: int) -> None:
    """Strides and counts come as they are: from 2^31 on an int64, also up to 2^32."""
    out = torch.full((4, 4), -7, dtype=torch.int64)
    scaled[(1,)](out, number, 2**31 // 4, N=4)
    wanted = [[number] * 4, [number * 2 if number < 2**30 or number >= 2**31 else -2] * 4]
    assert out[:1].tolist() == wanted[:1]
    if number != 2**31 - 1:  # int32 and int32 is int32
        assert out[1:2].tolist() == wanted[1:]
    assert out[2].tolist() == [i * number for i in range(4)]
    alone = torch.zeros(2, dtype=torch.int64)
    as_given[(1,)](alone, number)
    assert alone.tolist() == [number, 0]


def test_assembly_without_a_reference_is_named() -> None:
    with pytest.raises(Exception, match=r"no reference of this assembly.*bfe\.u32"):
        assembly[(1,)](BYTES.float(), BYTES.float(), ASM="bfe.u32 $0, $1;", CONSTRAINTS="=r,r", PACK=1, N=256)


def test_a_symbol_without_a_reference_is_named() -> None:
    with pytest.raises(Exception, match=r"no reference of this symbol.*llvm\.amdgcn\.sin"):
        intrinsic[(1,)](BYTES.float(), BYTES.float(), SINE=True, N=256)


def test_correcting_twice_changes_nothing() -> None:
    before = interpreter.interpreter.InterpretedFunction.run
    interpreter.correct()
    assert interpreter.interpreter.InterpretedFunction.run is before
