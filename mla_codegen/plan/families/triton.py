"""The portable family: plain Triton, for every GPU and the interpreter."""

from dataclasses import dataclass
from typing import Any

from mla_codegen.catalog.targets import Target
from mla_codegen.plan.families.request import BYTES, Request, Resources
from mla_codegen.plan.families.stages import POINTER, Stage, stage1, stage2
from mla_codegen.spec.errors import Problem

TL = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp8_e4m3fn": "tl.float8e4nv", "fp8_e4m3fnuz": "tl.float8e4b8"}
TORCH = {
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8_e4m3fn": "torch.float8_e4m3fn",
    "fp8_e4m3fnuz": "torch.float8_e4m3fnuz",
}
LN2 = 0.6931471805599453
# What decoding by shifts makes of e4m3fn is at most 1.75, and 1.875 of its NaN: times 1.125 * 2^15 that is infinite in
# f16, and every number below has few enough digits to stay exact.
KEY_FACTOR = 36864.0
MANY_HEADS = 64  # heads of a program from which MMA takes q from shared memory


@dataclass(frozen=True)
class Lane:
    """The columns of a KV row that one accumulator holds, and how they come out of a tile's words.

    value, key, rope_key   expressions; those of keys make NaN of bytes that are NaN, by which the row's weight is NaN
    """

    suffix: str
    value: str
    key: str
    rope_key: str
    q_columns: str
    q_rope_columns: str


@dataclass(frozen=True)
class Details:
    """How a tile's bytes become MMA operands. Field names are what the templates say.

    compute        element type of the products; tl_compute: as Triton names it
    fp8, tl_fp8    the format that fp8 bytes are taken for
    torch_word     dtype of the host's view of the KV: what stage 1 loads
    word           integer type of words that hold several columns; empty: columns are loaded as they are
    rope_bytes     pointer type of rope columns where they are read by the byte
    kv_factor      what 1.0 of the decoded KV stands for
    q_top          power of two that each head's largest |q| is scaled to; 0: q is used as it is
    weight_shift   added to the exponent of the weights, so that small ones survive fp8, f16; weight_scale: as a factor
    sums_rounded   the softmax sum is of the rounded weights; else rounding is too fine to matter
    key_factor     factor of f16 keys, by which those that are NaN become infinite; 0: keys are used as they are
    zero_sign_is_nan   of fp8 bytes that are decoded by shifts 0x80 is NaN
    reads_infinity     keys may be infinite: a score of -inf must give NaN, not weight 0
    repair_zero    -0 of e4m3fn is NaN in e4m3fnuz and must be cleared
    """

    compute: str
    tl_compute: str
    is_fp8: bool
    fp8: str
    tl_fp8: str
    torch_word: str
    word: str
    lanes: tuple[Lane, ...]
    rope_lanes: tuple[Lane, ...]
    rope_bytes: str
    decode_step: str
    kv_factor: float
    q_top: int
    weight_shift: float
    weight_scale: int
    sums_rounded: bool
    key_factor: float
    zero_sign_is_nan: bool
    reads_infinity: bool
    repair_zero: bool

    @property
    def weights_in(self) -> str:
        return "fp8" if self.compute.startswith("fp8") else "f16"

    @property
    def masked_score(self) -> str:
        return "LOWEST" if self.reads_infinity else 'float("-inf")'

    @property
    def q_parts(self) -> list[str]:
        latent = [f"q_latent{lane.suffix}" for lane in self.lanes]
        return latent + [f"q_rope{lane.suffix}" for lane in self.rope_lanes]

    @property
    def accs(self) -> str:
        return ", ".join(f"acc{lane.suffix}" for lane in self.lanes)


NAME = "triton"
GLUON = False
ALWAYS: frozenset[str] = frozenset()  # every optimisation is a choice here
NEVER: dict[str, str] = {}
KNOBS: frozenset[str] = frozenset()
TUNABLE = {  # what `tune` may try; the plan says which combinations are legal
    "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    "block_n": (16, 32, 64, 128),
    "block_h": (16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "waves_per_eu": (0, 1, 2, 3, 4),
}


def refuse(request: Request) -> str | None:
    """Why the family cannot serve, or None."""
    if "fp8_mma" in request.options and request.kv == "fp8_e4m3fnuz" and request.kv not in request.target.fp8_mma:
        return (
            f"fp8_mma of {request.kv} KV on {request.target.name}: its matrix units take e4m3fn, where the largest "
            f"number of {request.kv} (byte 0x7F) is NaN"
        )
    if request.is_fp8 and "packed_fp8" not in request.options and request.kv not in request.target.fp8_convert:
        return (
            f"{request.kv} KV without packed_fp8 on {request.target.name}: the hardware does not convert "
            f"{request.kv}, so the compiler would decode it in software"
        )
    return None


def resources(request: Request) -> Resources | list[Problem]:
    """Tile and launch numbers, or what stands in their way."""
    knobs, target = request.knobs, request.target
    fp8_mma, packed = "fp8_mma" in request.options, "packed_fp8" in request.options
    num_stages = knobs.take("num_stages", 2)

    def memory(block_n: int, block_h: int) -> int:
        return shared_bytes(request, block_n, block_h, num_stages)

    heads = 16 if request.heads <= 16 else 64 if request.heads > 32 and memory(16, 64) <= target.shared_bytes else 32
    block_h = knobs.take("block_h", heads)
    num_warps = knobs.take("num_warps", 8 if block_h >= 64 else 4)
    waves = knobs.take("waves_per_eu", 0 if target.waves_per_eu else None)
    fits = [n for n in (64, 32, 16) if memory(n, block_h) <= target.shared_bytes]
    block_n = knobs.take("block_n", fits[0] if fits else 16)
    need = memory(block_n, block_h)
    problems = []
    if need > target.shared_bytes:
        beside = f" beside {block_h} heads" if block_h >= MANY_HEADS else ""
        what = (
            f"a tile of {block_n} {request.kv} rows in {num_stages} stages{beside} needs {need:,} bytes of shared "
            f"memory; {target.name} has {target.shared_bytes:,}"
        )
        smaller = [n for n in fits if n < block_n]
        fewer = [h for h in (64, 32, 16) if h < block_h and memory(block_n, h) <= target.shared_bytes]
        if smaller:
            problems.append(Problem(knobs.loc("block_n"), what, fix=f"block_n: {smaller[0]} fits"))
        elif fewer:
            problems.append(Problem(knobs.loc("block_h"), what, fix=f"block_h: {fewer[0]} fits"))
        else:
            problems.append(Problem(knobs.loc("block_n"), what, fix="use fewer num_stages"))
    if fp8_mma and not packed and block_n < 32:
        what = f"block_n {block_n} is below the 32 rows of an fp8 MMA"
        problems.append(Problem(knobs.loc("block_n"), what, allowed="32, 64, 128, 256", fix="block_n: 32"))
    if problems:
        return problems
    resident = 2 if need * 2 <= target.shared_bytes else 1
    return Resources(block_n, block_h, num_warps, num_stages, waves or None, need, resident)


def shared_bytes(request: Request, block_n: int, block_h: int, num_stages: int) -> int:
    """Bytes of shared memory of stage 1, from above (held against the compiler's own numbers by a test).

    The pipelined KV tiles; AMD keeps one less than num_stages, the next one waits in registers. From 64 heads on also
    q and the widened columns of packed fp8, which MMA then reads from shared memory, or the output before its store.
    """
    amd = request.target.vendor == "amd"
    packed = request.is_fp8 and "packed_fp8" in request.options
    tiles = block_n * request.row * BYTES[request.kv] * (max(1, num_stages - 1) if amd else num_stages)
    if block_h < MANY_HEADS:
        return tiles
    output = block_h * request.latent * (2 if amd and not packed else 4)
    if amd:
        return max(tiles, output)
    widened = block_n * request.latent if packed else 0
    return max(tiles + block_h * request.row * 2 + widened, output)


def details(request: Request) -> Details:
    """The rest of what the templates place."""
    fp8_mma, packed = "fp8_mma" in request.options, "packed_fp8" in request.options
    decode = _decode(request.target, request.kv, fp8_mma, packed)
    # The largest weight is 2^bits: e4m3fnuz ends at 240, e4m3fn at 448, f16 at 65504; bf16 has the exponents of fp32.
    bits = {"fp8_e4m3fnuz": 7, "fp8_e4m3fn": 8, "fp16": 15, "bf16": 0}[decode["compute"]]
    unscaled = decode["compute"] in ("bf16", request.q)
    return Details(
        is_fp8=request.is_fp8,
        q_top=0 if unscaled else 64 if fp8_mma else 1,
        weight_shift=bits if "exp2" in request.options else bits * LN2,
        weight_scale=1 << bits,
        sums_rounded=fp8_mma,
        reads_infinity=bool(not request.is_fp8 or decode["key_factor"]),
        **decode,
    )


def stages(kernel: Any) -> list[Stage]:
    """The kernels in the file of a `KernelPlan`."""
    kv = POINTER[kernel.details.word or kernel.details.fp8]
    return [stage1(kernel, {"kv": kv}, turn_rows=kernel.block_n, pools=frozenset({"kv"})), *stage2(kernel)]


def _decode(target: Target, kv: str, fp8_mma: bool, packed: bool) -> dict[str, Any]:
    """How a tile's bytes become MMA operands: word size, lanes, element types, and what 1.0 of them stands for."""
    plain = Lane("", "latent", "latent", "rope", "latent[None, :]", "rope[None, :]")
    result: dict[str, Any] = {
        "compute": kv, "tl_compute": TL[kv], "fp8": kv, "tl_fp8": TL[kv], "torch_word": TORCH[kv], "word": "",
        "lanes": (plain,), "rope_lanes": (plain,), "rope_bytes": "", "decode_step": "",
        "kv_factor": 1.0, "key_factor": 0.0, "zero_sign_is_nan": False, "repair_zero": False,
    }  # fmt: skip
    if not kv.startswith("fp8"):
        return result
    # The format that the kernel takes the bytes for: e4m3fn may pass for e4m3fnuz, at half its value, 0x80 mended.
    taken_as = kv
    if fp8_mma and kv not in target.fp8_mma:
        taken_as = next(iter(target.fp8_mma))
    factor = 1.0 if kv == taken_as else 2.0
    result.update(fp8=taken_as, tl_fp8=TL[taken_as], torch_word=TORCH[taken_as], kv_factor=factor)
    if fp8_mma and not packed:
        repair = kv != taken_as
        result.update(compute=taken_as, tl_compute=TL[taken_as], repair_zero=repair)
    elif fp8_mma:
        repair = kv != taken_as
        words, key_words = ("repair(latent)", "repair_keys(latent)") if repair else ("latent", "latent")
        rope = Lane("", "", "", "repair_key_bytes(rope)" if repair else "rope", "", "rope[None, :]")
        result.update(
            compute=taken_as, tl_compute=TL[taken_as], torch_word="torch.int32", word="int32",
            lanes=tuple(
                Lane(f"_{j}", f"column({words}, {j})", f"column({key_words}, {j})", "",
                     f"4 * words[None, :]{f' + {j}' if j else ''}", "")
                for j in range(4)
            ),
            rope_lanes=(rope,), rope_bytes="tl.uint8" if repair else TL[taken_as],
            decode_step="steps/quads.py.jinja", repair_zero=repair,
        )  # fmt: skip
    elif packed:
        bits = not (target.pair_decode and kv == "fp8_e4m3fn")  # the hardware's conversion is of e4m3fn alone
        key = "{}" if not bits else "{} * KEY_FACTOR" if kv == "fp8_e4m3fn" else "number({})"
        lanes = tuple(
            Lane(f"_{name}", f"{name}(latent)", key.format(f"{name}(latent)"), key.format(f"{name}(rope)"),
                 f"2 * words[None, :]{offset}", f"2 * rope_words[None, :]{offset}")
            for name, offset in (("even", ""), ("odd", " + 1"))
        )  # fmt: skip
        result.update(
            compute="fp16", tl_compute="tl.float16", torch_word="torch.int16", word="int16",
            lanes=lanes, rope_lanes=lanes, decode_step=f"steps/pairs_{'bits' if bits else 'asm'}.py.jinja",
        )  # fmt: skip
        if bits:  # e4m3's exponent bias is 7 (fnuz: 8), f16's 15
            result["kv_factor"] = 256.0 if kv == "fp8_e4m3fn" else 128.0
            result["key_factor"] = KEY_FACTOR if kv == "fp8_e4m3fn" else 0.0
            result["zero_sign_is_nan"] = kv == "fp8_e4m3fnuz"
    else:
        latent, rope_key = "latent.to(tl.float16)", "rope.to(tl.float16)"
        widened = Lane("", latent, latent, rope_key, "latent[None, :]", "rope[None, :]")
        result.update(compute="fp16", tl_compute="tl.float16", lanes=(widened,), rope_lanes=(widened,))
    return result
