"""Time of a step on all GPUs of a group: in a CUDA graph, and eager."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 7

Step = Callable[[], Any]


def capture(step: Step, steps: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`steps` of it in a CUDA graph, and what the last one returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            result = step()
    return graph, result


class Timer:
    """All ranks call its methods together and get the same numbers: those of the slowest rank.

    repeat_us   microseconds that one of the REPEATS timings should take; their median is the result
    """

    def __init__(self, device: torch.device, repeat_us: float):
        self.device = device
        self.repeat_us = repeat_us

    def largest(self, value: float) -> float:
        """Over the ranks."""
        on_device = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
        return float(on_device)

    def graph_us(self, step: Step, steps: int) -> float:
        """Microseconds of a step, `steps` of them in one CUDA graph."""
        graph, _ = capture(step, steps)

        def replays(count: int) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            begin.record()
            for _ in range(count):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) * 1e3 / count / steps

        count = max(1, int(self.repeat_us / steps / self.largest(replays(2))))
        times = sorted(self.largest(replays(count)) for _ in range(REPEATS))
        return round(times[REPEATS // 2], 1)

    def eager_us(self, step: Step, steps: int) -> float:
        """The same without a graph: wall clock, the host's time included. At least `steps` of them."""

        def calls(count: int) -> float:
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) * 1e6 / count

        count = max(steps, int(self.repeat_us / self.largest(calls(steps))))
        times = sorted(self.largest(calls(count)) for _ in range(REPEATS))
        return round(times[REPEATS // 2], 1)
