# Copied by mla-codegen from mla_codegen/runtime/records.py. Do not edit: `mla-codegen build` writes it anew.
"""KV records, rows of bytes of several types: made of numbers, and numbers of them.

They are what engines keep in their caches, and what kernels of these KV types read:

fp8_ds_mla   a row: latent columns in e4m3fn, an fp32 scale for each 128 of them, rope columns in bf16 (512 + 64 columns
             are 656 bytes)
mxfp4_ds_mla a row: latent columns in fp4 (e2m1, column 2i in the low half of a byte), a scale for each 32 of them, a
             power of two whose byte is its exponent plus 127 (e8m0: 255 is NaN), rope columns in bf16 (512 + 64
             columns are 400 bytes)
fp8_ds_v4    a row: all but the last 64 latent columns in e4m3fn, the last 64, which are the rope, in bf16; a page has
             these of all its rows first, and then for each row a scale for each 64 fp8 columns, a power of two whose
             byte is its exponent plus 127, and a byte that nobody reads (512 columns are 576 + 8 bytes)
"""

from itertools import pairwise

import torch

from .formats import KV_FORMATS, KVFormat

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
BYTES = (torch.uint8, torch.int8, FP8)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are these with a minus
EXPONENT_BIAS = 127
NAN_SCALE = 255  # of e8m0


def pack(kv: str, rows: torch.Tensor, rope: int = 64, page_size: int = 1) -> torch.Tensor:
    """Rows of numbers as records, each group under the least scale that holds it.

    kv          fp8_ds_mla, mxfp4_ds_mla or fp8_ds_v4
    rows        [rows, latent + rope] of a floating-point type; of fp8_ds_v4 [rows, latent], the last 64 the rope
    rope        columns behind the latent (fp8_ds_mla, mxfp4_ds_mla)
    page_size   rows of a page, of which `rows` has whole ones (fp8_ds_v4)

    A NaN or an infinity makes its column NaN in fp8, its whole group in fp4.

    Returns uint8 [rows, bytes], of fp8_ds_v4 [rows / page_size, page_size, bytes]. Raises ValueError for other shapes.
    """
    form, latent, rope = _form(kv, rows.shape[-1], rope)
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    if rows.dim() != 2 or rows.shape[0] % page_size:
        raise ValueError(f"rows has shape {tuple(rows.shape)}; it must be [pages of {page_size} rows, columns]")
    scaled = latent - form.tail
    numbers = rows[:, :scaled].float().unflatten(1, (-1, form.group))
    largest = FP4[-1] if form.bits == 4 else FP8_MAX
    scales = (numbers.abs().amax(-1) / largest).clamp(min=2.0**-100)
    if form.scale == 1:
        scales = torch.exp2(scales.log2().ceil())
        exponents = scales.log2() + EXPONENT_BIAS
        if form.bits == 4:  # whose codes have no NaN
            exponents = exponents.masked_fill(~scales.isfinite(), NAN_SCALE)
        units = torch.nn.functional.pad(exponents.to(torch.uint8), (0, form.spare))
    else:
        units = _bytes(scales.contiguous())
    values = (numbers / scales[..., None]).clamp(-largest, largest).flatten(1)
    codes = _fp4_codes(values) if form.bits == 4 else _bytes(values.to(FP8))
    others = _bytes(rows[:, scaled:].to(torch.bfloat16).contiguous())
    if form.blocks:
        return _in_pages(torch.cat([codes, others], 1), units, page_size)
    return torch.cat([codes, units, others], 1)


def unpack(kv: str, records: torch.Tensor, rope: int = 64) -> torch.Tensor:
    """The numbers of records, exactly: fp64 [rows, latent + rope], pages one after the other.

    records   bytes [rows, bytes] or [pages, page_size, bytes], or with a 1 before the last, contiguous; see `pack`
    """
    if records.dtype not in BYTES:
        raise ValueError(f"records is {records.dtype}; it must be bytes: uint8, int8 or float8_e4m3fn")
    width = records.shape[-1]
    records = records.contiguous().view(torch.uint8)
    form, latent, rope = _form(kv, width, rope, packed=True)
    codes, count, behind = form.code_bytes(latent), form.groups(latent), form.scale_bytes(latent)
    if form.blocks:
        pages = records.reshape(records.shape[0], records[:1].numel() or width)
        first = width - behind
        size = pages.shape[1] // width
        parts = pages[:, : size * first].reshape(-1, first)
        units = pages[:, size * first :].reshape(-1, behind)
        others = parts[:, codes:]
    else:
        parts = records.reshape(-1, width)
        units, others = parts[:, codes : codes + behind], parts[:, codes + behind :]
    units = units[:, : count * form.scale].contiguous()
    if form.bits == 4:
        scales = _powers(units)
    else:
        scales = ((units.to(torch.int32) << 23) if form.scale == 1 else units).view(torch.float32).double()
    numbers = _fp4(parts[:, :codes]) if form.bits == 4 else parts[:, :codes].contiguous().view(FP8).double()
    numbers = numbers.unflatten(1, (count, form.group)) * scales[..., None]
    others = others.contiguous().view(torch.bfloat16).double()
    return torch.cat([numbers.flatten(1), others], 1)


def _fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, columns] as bytes of two e2m1 codes: the nearest number, of two as near that of the even code."""
    size = numbers.abs()
    codes = torch.zeros_like(numbers, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(FP4)):
        middle = (low + high) / 2
        codes += size >= middle if code % 2 else size > middle  # from the odd code on upwards: the tie goes up
    codes |= torch.signbit(numbers).to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes of two e2m1 codes, exactly: fp64 [rows, twice the columns]."""
    numbers = [sign * size for sign in (1.0, -1.0) for size in FP4]
    table = torch.tensor(numbers, dtype=torch.float64, device=codes.device)
    return table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """The scales of e8m0 bytes, exactly: fp64, NaN of 255."""
    powers = torch.exp2(exponents.double() - EXPONENT_BIAS)
    return powers.masked_fill(exponents == NAN_SCALE, float("nan"))


def _form(kv: str, width: int, rope: int, packed: bool = False) -> tuple[KVFormat, int, int]:
    """The format, and the latent and rope columns of a row of `width` columns, or bytes if it is packed."""
    form = KV_FORMATS.get(kv)
    if form is None or not form.record:
        names = " or ".join(one.name for one in KV_FORMATS.values() if one.record)
        raise ValueError(f"kv is {kv!r}; it must be {names}")
    rope = 0 if form.tail else rope
    for latent in range(form.group, 16 * form.group + 1, form.group):
        if not form.unfit(latent, rope) and width == (form.row_bytes(latent, rope) if packed else latent + rope):
            return form, latent, rope
    what = "bytes" if packed else "columns"
    raise ValueError(f"a row has {width} {what}; {kv} has no such row with {rope} rope columns behind the latent")


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


def _in_pages(first: torch.Tensor, second: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages of the first parts of their rows and then the second parts: [pages, page_size, bytes]."""
    pages = first.shape[0] // page_size  # may be 0, where -1 says nothing
    parts = [part.reshape(pages, page_size * part.shape[1]) for part in (first, second)]
    return torch.cat(parts, 1).view(pages, page_size, first.shape[1] + second.shape[1])
