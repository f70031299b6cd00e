"""Compile time of a pipelined train step: more microbatches, more layers, side by side.

    python benchmarks/compile.py

compiles pipe=4, data=2, remat block in turn for 8 and 64 microbatches and for 8 and 64 layers, and
prints the least of three compile times and the HLO lines of each, and their ratios to the first.
"""

import jax
from step import Work, prepare

import jaxpar as jp

CASES = ((8, 8), (64, 8), (8, 64))  # microbatches, layers


def compile_once(microbatches: int, layers: int) -> tuple[float, int]:
    """Seconds to compile, and lines of the optimized program."""
    layout = jp.Layout(pipe=4, data=2, microbatches=microbatches, remat="block", precision="fp32")
    work = Work(f"llama:tiny:num_layers={layers}", 4 * microbatches, 32)
    job = prepare(layout, work)
    return job.compile_seconds, len(job.program.as_text().splitlines())


def main(rounds: int = 3) -> None:
    jp.emulate_devices(8)
    jax.config.update("jax_enable_compilation_cache", False)
    found = [[compile_once(*case) for case in CASES] for _ in range(rounds)]
    best = [min(round[i][0] for round in found) for i in range(len(CASES))]
    for (microbatches, layers), seconds, (_, lines) in zip(CASES, best, found[0], strict=True):
        print(f"microbatches {microbatches:2}, layers {layers:2}: {seconds:5.1f} s "
              f"({seconds / best[0]:.2f} x), {lines:,} lines")  # fmt: skip


if __name__ == "__main__":
    main()
