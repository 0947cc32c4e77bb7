"""Records: what is packed is unpacked within fp8's rounding, byte for byte where engines put it."""

import pytest
import torch

from mla_codegen.runtime.records import pack, unpack


def test_fp8_ds_mla() -> None:
    rows = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    rows[0, :128] = 0.0
    rows[1, 128:256] *= 1e6
    records = pack("fp8_ds_mla", rows)
    assert (records.shape, records.dtype) == ((5, 656), torch.uint8)
    scales = records[:, 512:528].contiguous().view(torch.float32)
    torch.testing.assert_close(scales[1:], rows[1:, :512].view(4, 4, 128).abs().amax(-1) / 448)
    assert torch.equal(records[:, 528:].contiguous().view(torch.bfloat16), rows[:, 512:].bfloat16())
    numbers = unpack("fp8_ds_mla", records.view(1, 5, 1, 656))
    assert numbers.dtype is torch.float64
    groups = (rows[:, :512].view(5, 4, 128), numbers[:, :512].view(5, 4, 128))
    assert ((groups[0] - groups[1]).abs() <= groups[0].abs() / 16 + scales[..., None] / 1024).all()
    assert torch.equal(unpack("fp8_ds_mla", pack("fp8_ds_mla", numbers)), numbers)


def test_mxfp4_ds_mla() -> None:
    """Every code under every scale, as OCP's tables and torch's e8m0 have them; packing rounds to the nearest."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    records = torch.zeros(256, 32 // 2 * 16 + 16 + 128, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    records[:, :256] = (codes[::2] | codes[1::2] << 4).repeat(32)  # the codes in their order
    records[:, 256:272] = torch.arange(256, dtype=torch.uint8)[:, None]
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).double()
    want = scales[:, None] * torch.cat([sizes, -sizes]).repeat(32)
    got = unpack("mxfp4_ds_mla", records)[:, :512]
    assert torch.equal(got[:255], want[:255]) and torch.isnan(got[255]).all()
    assert torch.equal(torch.signbit(got[:255]), torch.signbit(want[:255]))
    again = pack("mxfp4_ds_mla", unpack("mxfp4_ds_mla", records[40:250]).float())
    assert torch.equal(unpack("mxfp4_ds_mla", again)[:, :512], got[40:250])
    rows = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    groups = rows[:, :512].reshape(-1, 32).double()
    packed = pack("mxfp4_ds_mla", rows)
    numbers = unpack("mxfp4_ds_mla", packed)
    scale = packed[:, 256:272].contiguous().view(torch.float8_e8m0fnu).double().view(-1, 1)
    largest = groups.abs().amax(1, keepdim=True) / scale
    assert (largest <= 6).all() and (largest > 3).all()
    nearest = (groups[..., None].abs() / scale[..., None] - sizes).abs().amin(-1) * scale
    assert torch.equal((numbers[:, :512].reshape(-1, 32) - groups).abs(), nearest)
    assert torch.equal(numbers[:, 512:], rows[:, 512:].bfloat16().double())
    ties = torch.zeros(1, 576)
    ties[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0])  # to the even code
    assert unpack("mxfp4_ds_mla", pack("mxfp4_ds_mla", ties))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, -6]


def test_fp8_ds_v4() -> None:
    """A page has the rows first and then their scales, powers of two."""
    rows = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
    records = pack("fp8_ds_v4", rows, page_size=16)
    assert (records.shape, records.dtype) == ((2, 16, 584), torch.uint8)
    page = records[1].view(-1)
    assert torch.equal(page[3 * 576 + 448 : 4 * 576].view(torch.bfloat16), rows[19, 448:].bfloat16())
    exponents = page[16 * 576 + 3 * 8 : 16 * 576 + 4 * 8]
    scales = torch.exp2(exponents[:7].float() - 127)
    assert exponents[7] == 0
    values = page[3 * 576 : 3 * 576 + 448].view(torch.float8_e4m3fn).float().view(7, 64) * scales[:, None]
    assert torch.equal(unpack("fp8_ds_v4", records)[19, :448], values.flatten().double())
    assert (
        (values - rows[19, :448].view(7, 64)).abs() <= rows[19, :448].view(7, 64).abs() / 16 + scales[:, None] / 1024
    ).all()


@pytest.mark.parametrize(("kv", "columns"), [("fp8_ds_mla", 576), ("mxfp4_ds_mla", 576), ("fp8_ds_v4", 512)])
def test_no_number_and_no_row(kv: str, columns: int) -> None:
    """NaN and infinity are not packed as numbers; no rows are no records."""
    rows = torch.zeros(3, columns)
    rows[0, 5], rows[1, 5] = float("nan"), float("inf")
    assert unpack(kv, pack(kv, rows))[:, 5].isnan().tolist() == [True, True, False]
    none = pack(kv, rows[:0])
    assert none.shape[0] == 0 and unpack(kv, none).shape == (0, columns)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="kv is 'bf16'; it must be fp8_ds_mla or mxfp4_ds_mla or fp8_ds_v4"):
        pack("bf16", torch.zeros(1, 576))
    with pytest.raises(ValueError, match="a row has 575 columns; fp8_ds_mla has no such row with 64 rope columns"):
        pack("fp8_ds_mla", torch.zeros(1, 575))
    with pytest.raises(ValueError, match="a row has 655 bytes"):
        unpack("fp8_ds_mla", torch.zeros(1, 655, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"rows has shape \(3, 512\); it must be \[pages of 2 rows, columns\]"):
        pack("fp8_ds_v4", torch.zeros(3, 512), page_size=2)
    with pytest.raises(ValueError, match="page_size is 0; it must be at least 1"):
        pack("fp8_ds_v4", torch.zeros(3, 512), page_size=0)
    with pytest.raises(ValueError, match=r"records is torch\.float32; it must be bytes"):
        unpack("fp8_ds_mla", torch.zeros(1, 656))
