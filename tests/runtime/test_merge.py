"""`merge_states`: any number of states, stacks, strides and dtypes against float64; operators, graphs, refusals."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_codegen.runtime import interpreter
from mla_codegen.runtime.merge import merge_states
from mla_codegen.runtime.op import _define_merge, _merge_over

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, NOTHING = float("nan"), float("-inf")
States = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def corrected() -> None:
    if DEVICE == "cpu":
        interpreter.correct()


def make(
    count: int, rows: int, heads: int, columns: int, dtype: torch.dtype = torch.bfloat16, device: str = DEVICE
) -> States:
    """States whose LSE lie some units apart; one row of each saw nothing, another row of all did; there out is NaN."""
    states = []
    for place in range(count):
        out, lse = torch.randn(rows, heads, columns, device=device), 5 * torch.randn(rows, heads, device=device) + 200
        for row in {0, place % rows} if count > 1 else {0}:
            out[row], lse[row] = NAN, NOTHING
        states.append((out.to(dtype), lse))
    return states


def exact(states: States, base: float = torch.e) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE in float64."""
    log = torch.tensor(base, dtype=torch.float64).log().item()
    outs = torch.stack([out.double() for out, _ in states])
    lses = torch.stack([lse.double() for _, lse in states]) * log
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total.masked_fill(total.isinf(), 0))
    return (outs.nan_to_num(0.0) * weights[..., None]).sum(0), total / log


def close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], bound: float) -> None:
    out, lse = got[0].double(), got[1].double()
    assert (out - want[0]).norm() <= bound * want[0].norm()
    torch.testing.assert_close(lse, want[1], rtol=1e-6, atol=1e-6)
    assert (out[want[1] == NOTHING] == 0).all()


BOUNDS = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-6}


@pytest.mark.parametrize(
    "count,rows,heads,columns,dtype,base2",
    [
        (1, 2, 1, 64, torch.bfloat16, False),
        (2, 3, 2, 128, torch.float16, True),
        (3, 5, 3, 96, torch.float32, False),
        (11, 2, 2, 512, torch.bfloat16, True),
        (2, 1030, 2, 32, torch.bfloat16, False),  # enough that a program takes several
    ],
)  # fmt: skip
def test_as_float64(count: int, rows: int, heads: int, columns: int, dtype: torch.dtype, base2: bool) -> None:
    states = make(count, rows, heads, columns, dtype)
    want = exact(states, 2.0 if base2 else torch.e)
    got = merge_states(states, base2=base2)
    assert got[0].dtype is dtype and got[0].is_contiguous() and got[1].is_contiguous()
    close(got, want, BOUNDS[dtype])
    if rows < 10:  # a stack has the same bits; so has a stack beside a state
        stack = [torch.stack(one) for one in zip(*states, strict=True)]
        mixed = [(stack[0][:-1], stack[1][:-1]), states[-1]]
        for other in ([tuple(stack)], mixed):
            again = merge_states(other, base2=base2)  # type: ignore[arg-type]
            assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


def test_any_strides_and_dtypes_and_in_place() -> None:
    """Padded heads, rows apart, LSE as [heads, rows]; each state and the result in a layout of its own."""
    rows, heads, columns = 5, 3, 64
    states = make(3, rows, heads, columns, torch.float32)
    want = exact(states)
    wide = torch.full((rows, heads, columns + 16), NAN, device=DEVICE)
    wide[..., :columns] = states[0][0]
    apart = torch.full((2 * rows, heads, columns), NAN, device=DEVICE)
    apart[::2] = states[1][0]
    laid = [
        (wide[..., :columns], states[0][1].T.contiguous().T),
        (apart[::2], states[1][1]),
        (states[2][0].half(), states[2][1]),
    ]
    out = torch.full((rows, heads, columns + 8), NAN, device=DEVICE, dtype=torch.float16)
    lse = torch.full((heads, rows + 1), NAN, device=DEVICE)
    got = merge_states(laid, out=out[..., :columns], lse=lse[:, :rows].T)
    close(got, want, 1e-3)
    assert out[..., columns:].isnan().all() and lse[:, rows:].isnan().all()
    close(merge_states(laid, out=laid[0][0], lse=laid[0][1]), want, 1e-3)  # in place of a state
    assert wide[..., columns:].isnan().all()


def test_nan_stays_where_it_is() -> None:
    states = make(2, 4, 2, 64)
    states[1][0][3, 1, 7] = NAN
    states[0][1][2, 0] = NAN
    out, lse = merge_states(states)
    wrong = torch.zeros(4, 2, 64, dtype=torch.bool, device=DEVICE)
    wrong[3, 1, 7] = wrong[2, 0] = True
    assert torch.equal(out.isnan(), wrong) and lse.isnan().nonzero().tolist() == [[2, 0]]


def test_nothing_to_merge() -> None:
    out, lse = merge_states([(torch.empty(0, 3, 2, 64, device=DEVICE), torch.empty(0, 3, 2, device=DEVICE))])
    assert (out == 0).all() and (lse == NOTHING).all()
    out, lse = merge_states([(torch.empty(0, 2, 64, device=DEVICE), torch.empty(0, 2, device=DEVICE))])
    assert out.shape == (0, 2, 64) and lse.shape == (0, 2)


@pytest.fixture(scope="module")
def operators() -> SimpleNamespace:
    """The operators, and the function over them."""
    library = torch.library.Library("merge_of_a_test", "FRAGMENT")
    _define_merge(library, "merge_of_a_test")
    made = torch.ops.merge_of_a_test
    return SimpleNamespace(library=library, ops=made, merge_states=_merge_over(made))


def test_operators(operators: SimpleNamespace) -> None:
    states = make(2, 3, 2, 64, torch.float32)
    states = [(out.nan_to_num(0.0), lse) for out, lse in states]  # opcheck compares, and NaN is not NaN
    outs, lses = [out for out, _ in states], [lse for _, lse in states]
    torch.library.opcheck(operators.ops.merge_states.default, (outs, lses, True))
    into = (torch.zeros(3, 2, 64, device=DEVICE), torch.zeros(3, 2, device=DEVICE))
    torch.library.opcheck(operators.ops.merge_states_into.default, (outs, lses, *into))

    def step(states: States, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        merged, lse = operators.merge_states([(2 * out, lse) for out, lse in states])
        operators.merge_states(states, out=out)
        return merged + 1, lse, 2 * out

    want = step(states, into[0])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(states, into[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_in_a_graph() -> None:
    """Replays merge what the states hold by then; sizes in between go to the binaries that are there."""
    for count, rows in ((2, 3), (3, 300), (2, 40)):
        states = make(count, rows, 16, 512)
        out, lse = merge_states(states)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            merge_states(states, out=out, lse=lse)
        for _ in range(2):
            for (kept, kept_lse), (new, new_lse) in zip(states, make(count, rows, 16, 512), strict=True):
                kept.copy_(new)
                kept_lse.copy_(new_lse)
            out.fill_(NAN)
            lse.fill_(NAN)
            graph.replay()
            close((out, lse), exact(states), 2.5e-3)


def changed(place: int, part: int, change: Callable[[torch.Tensor], Any]) -> Callable[[States], Any]:
    """States of which one tensor is something else."""

    def wrong(states: States) -> Any:
        states[place] = tuple(change(one) if at == part else one for at, one in enumerate(states[place]))  # type: ignore[assignment]
        return states

    return wrong


@pytest.mark.parametrize(
    "wrong,error,message",
    [
        (lambda states: [], ValueError, "no states"),
        (lambda states: states[0][0], TypeError, r"states is a Tensor; it must be a list"),
        (lambda states: [states[0][0]], TypeError, r"states\[0\] is a Tensor; it must be \(out, lse\)"),
        (lambda states: [states[0], (*states[1], 1)], TypeError, r"states\[1\] is 3 parts"),
        (changed(1, 0, lambda out: out.tolist()), TypeError, r"the out of states\[1\] is a list"),
        (changed(1, 1, lambda lse: None), TypeError, r"the LSE of states\[1\] is None"),
        (changed(0, 0, lambda out: out[0]), ValueError, r"\[rows, heads, columns\], or of a stack"),
        (changed(1, 0, lambda out: out[:, :1]), ValueError, r"must be bf16, fp16 or fp32 \[3, 2, 64\]"),
        (changed(1, 0, lambda out: out.double()), ValueError, r"states\[1\] is torch.float64"),
        (changed(1, 0, lambda out: out.transpose(1, 2).contiguous().transpose(1, 2)), ValueError, "last stride 1"),
        (changed(1, 1, lambda lse: lse.half()), ValueError, r"the LSE of states\[1\] .* must be float32 \[3, 2\]"),
        (changed(0, 1, lambda lse: lse.T), ValueError, r"the LSE of states\[0\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_operator", [False, True])
def test_refusals(
    operators: SimpleNamespace, by_operator: bool, wrong: Callable[[States], Any], error: type, message: str
) -> None:
    call = operators.merge_states if by_operator else merge_states
    with pytest.raises(error, match=message):
        call(wrong(make(2, 3, 2, 64)))


def test_refusals_of_what_is_written() -> None:
    states = make(2, 3, 2, 64)
    for given, message in (
        ({"out": torch.empty(3, 2, 32, device=DEVICE)}, r"out is .* must be .* \[3, 2, 64\]"),
        ({"out": torch.empty(3, 64, 2, device=DEVICE).transpose(1, 2)}, "last stride 1"),
        ({"lse": torch.empty(2, 3, device=DEVICE)}, r"lse is .* must be float32 \[3, 2\]"),
        ({"out": torch.empty(3, 2, 64, device=DEVICE, requires_grad=True)}, "out requires grad"),
        ({"out": torch.empty(1, 2, 64, device=DEVICE).expand(3, 2, 64)}, "out has .* overlaps itself"),
        ({"lse": torch.empty(1, 2, device=DEVICE).expand(3, 2)}, "lse has .* overlaps itself"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_states(states, **given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out is a list"):
        merge_states(states, out=[])  # type: ignore[arg-type]
