"""What only a GPU can show: offsets past 2^31, binaries that are shared, and how much of the memory's speed is used."""

from pathlib import Path

import pytest
import torch
import triton
import yaml
from harness import BF16, PORTABLE_FP8, REPORTS, Builder, Mode, check

from mla_codegen.check.reference import make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_wide_kv_pool(build: Builder, mode: Mode) -> None:
    """Requests behind row 2^31 / 576 of a pool of NaN."""
    report = REPORTS["wide-kv-pool"]
    kernels = build(mode.spec())
    case = make_case([300, 65], kv_dtype=mode.kv, guard=0)
    begin = report["kv_rows"] - 365
    assert begin > report["first_past"]
    pool = torch.full((report["kv_rows"], 576), float("nan"), device=kernels.device, dtype=torch.float16)
    pool = pool.to(case.kv.dtype)
    pool[begin:] = case.kv.to(pool.device)
    on = case.to(kernels.device)
    for kernel, splits in ((kernels.general(True), {}), (kernels.general(False), {"splits": 4})):
        out = torch.empty(2, 16, 512, dtype=torch.bfloat16, device=kernels.device)
        lse = torch.empty(2, 16, device=kernels.device)
        kernels.module(kernel).run(
            on.q, pool, on.qo_indptr, on.kv_indptr + begin, None, on.kv_scale, on.sm_scale, out, lse, **splits
        )
        check((out.cpu(), lse.cpu()), case)


def test_batch_sizes_share_one_binary(build: Builder) -> None:
    kernels = build(BF16.spec(heads=4))
    module = kernels.module(kernels.general(direct=False))
    kernel = getattr(module.stage1, "fn", module.stage1)
    for batch in REPORTS["one-binary"]["batches"]:
        case = make_case([40] * batch, heads=4)
        check(kernels.run(kernels.general(direct=False), case, splits=2 + batch), case)
        if batch == REPORTS["one-binary"]["batches"][0]:
            before = len(kernel.device_caches[kernels.device.index][0])
    assert len(kernel.device_caches[kernels.device.index][0]) == before


def test_one_long_request_takes_the_whole_device(build: Builder) -> None:
    """Against the speed of a plain sum of the same memory, both over data that no cache holds."""
    report = REPORTS["long-context-single"]
    kernels = build(yaml.safe_load((Path(__file__).parents[2] / "specs" / "h200.yaml").read_text()))
    case = make_case([report["rows"]])
    check(kernels.decode(case), case)
    on = case.to(kernels.device)
    bytes_read = report["rows"] * 576 * 2
    call = (on.q, on.kv, on.qo_indptr, on.kv_indptr)
    decode = triton.testing.do_bench(lambda: kernels.dispatcher.mla_decode(*call, sm_scale=on.sm_scale))
    large = torch.zeros(1 << 30, device=kernels.device)
    ceiling = large.numel() * 4 / triton.testing.do_bench(large.sum)
    assert bytes_read / decode >= report["least_share"] * ceiling


@pytest.mark.parametrize(("name", "heads"), [("h200_mtp", 16), ("h200_dp", 128)])
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
def test_blocks_of_columns(build: Builder, name: str, heads: int, kv: str) -> None:
    """What the emulator shows, on the hardware: kernels of the shapes, and general ones with splits and without."""
    kernels = build(yaml.safe_load((Path(__file__).parents[2] / "specs" / f"{name}.yaml").read_text()))
    case = make_case([300, 65, 0, 1000, 1], q_lens=[4, 2, 1, 5, 0], heads=heads, kv_dtype=kv)
    lse_bound = 5e-3 if kv.startswith("fp8") else 1e-3
    check(kernels.decode(case), case, lse_bound=lse_bound)
    for kernel in kernels.plan.kernels:
        if kernel.kv == kv:
            check(kernels.run(kernel.name, case, 3 if kernel.any_splits else None), case, lse_bound=lse_bound)
