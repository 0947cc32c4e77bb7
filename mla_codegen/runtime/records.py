"""KV records, rows of bytes of several types: made of numbers, and numbers of them.

They are what engines keep in their caches, and what kernels of the KV types `fp8_ds_mla` and `fp8_ds_v4` read:

fp8_ds_mla   a row: latent columns in e4m3fn, an fp32 scale for each 128 of them, rope columns in bf16 (512 + 64 columns
             are 656 bytes)
fp8_ds_v4    a row: all but the last 64 latent columns in e4m3fn, the last 64, which are the rope, in bf16; a page has
             these of all its rows first, and then for each row a scale for each 64 fp8 columns, a power of two whose
             byte is its exponent plus 127, and a byte that nobody reads (512 columns are 576 + 8 bytes)
"""

import torch

from .formats import KV_FORMATS, KVFormat

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
EXPONENT_BIAS = 127


def pack(kv: str, rows: torch.Tensor, rope: int = 64, page_size: int = 1) -> torch.Tensor:
    """Rows of numbers as records, each group under the least scale that holds it.

    kv          fp8_ds_mla or fp8_ds_v4
    rows        [rows, latent + rope] of a floating-point type; of fp8_ds_v4 [rows, latent], the last 64 the rope
    rope        columns behind the latent (fp8_ds_mla)
    page_size   rows of a page, of which `rows` has whole ones (fp8_ds_v4)

    Returns uint8 [rows, bytes], of fp8_ds_v4 [rows / page_size, page_size, bytes]. Raises ValueError for other shapes.
    """
    form, latent, rope = _form(kv, rows.shape[-1], rope)
    if rows.dim() != 2 or rows.shape[0] % page_size:
        raise ValueError(f"rows has shape {tuple(rows.shape)}; it must be [pages of {page_size} rows, columns]")
    fp8 = latent - form.tail
    numbers = rows[:, :fp8].float().unflatten(1, (-1, form.group))
    scales = (numbers.abs().amax(-1) / FP8_MAX).clamp(min=2.0**-100)
    if form.scale == 1:
        scales = torch.exp2(scales.log2().ceil())
    values = (numbers / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1)
    others = rows[:, fp8:].to(torch.bfloat16).contiguous()
    if form.scale == 1:
        units = (scales.log2() + EXPONENT_BIAS).to(torch.uint8)
        units = torch.nn.functional.pad(units, (0, form.spare))
        return _in_pages(torch.cat([_bytes(values), _bytes(others)], 1), units, page_size)
    return torch.cat([_bytes(values), _bytes(scales.contiguous()), _bytes(others)], 1)


def unpack(kv: str, records: torch.Tensor, rope: int = 64) -> torch.Tensor:
    """The numbers of records, exactly: fp64 [rows, latent + rope], pages one after the other.

    records   bytes [rows, bytes] or [pages, page_size, bytes], or with a 1 before the last, contiguous; see `pack`
    """
    width = records.shape[-1]
    records = records.contiguous().view(torch.uint8)
    form, latent, rope = _form(kv, width, rope, packed=True)
    fp8, count = latent - form.tail, form.groups(latent)
    if form.blocks:
        pages = records.reshape(records.shape[0], -1)
        size = pages.shape[1] // width
        first = width - form.scale_bytes(latent)
        parts = pages[:, : size * first].reshape(-1, first)
        units = pages[:, size * first :].reshape(-1, form.scale_bytes(latent))[:, :count]
        scales = (units.to(torch.int32) << 23).view(torch.float32)
        others = parts[:, fp8:]
    else:
        parts = records.reshape(-1, width)
        scales = parts[:, latent : latent + 4 * count].contiguous().view(torch.float32)
        others = parts[:, latent + 4 * count :]
    numbers = parts[:, :fp8].contiguous().view(FP8).double().unflatten(1, (count, form.group))
    others = others.contiguous().view(torch.bfloat16).double()
    return torch.cat([(numbers * scales.double()[..., None]).flatten(1), others], 1)


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
    parts = [part.reshape(-1, page_size * part.shape[1]) for part in (first, second)]
    return torch.cat(parts, 1).view(-1, page_size, first.shape[1] + second.shape[1])
