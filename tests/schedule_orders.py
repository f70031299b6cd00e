"""The grid of sizes that schedules are tested on, and orders of work that others published."""

import itertools

from jaxpar.pipeline.schedules import B, F, W, gpipe, one_f_one_b, v_shape
from jaxpar.pipeline.table import lower

SIZES = list(itertools.product(range(1, 9), range(1, 25), range(1, 5)))


def grid(name):
    for stages, microbatches, chunks in SIZES:
        if name != "1f1b" or chunks == 1:
            yield lower(name, stages, microbatches, chunks)


def megatron_1f1b(stage, stages, microbatches, chunks):
    warm_up = min(microbatches, stages - 1 - stage)
    order = [F(m) for m in range(warm_up)]
    for m in range(microbatches):
        order += [F(warm_up + m)] if warm_up + m < microbatches else []
        order += [B(m)]
    return order


def megatron_interleaved(stage, stages, microbatches, chunks):
    total, group = microbatches * chunks, stages * chunks

    def unit(k):
        return (k // group) * stages + k % stages, (k // stages) % chunks

    warm_up = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    order = [F(*unit(k)) for k in range(warm_up)]
    for k in range(total):
        order += [F(*unit(warm_up + k))] if warm_up + k < total else []
        m, c = unit(k)
        order += [B(m, chunks - 1 - c)]
    return order


def zb_h1(stage, stages, microbatches, chunks):
    warm_up, w = min(microbatches, stages - 1 - stage), 0
    order = [F(m) for m in range(warm_up)]
    for m in range(microbatches):
        order += [F(warm_up + m)] if warm_up + m < microbatches else []
        order += [B(m)]
        if warm_up + m >= microbatches or m + 1 - w > stage:
            order, w = order + [W(w)], w + 1
    return order + [W(m) for m in range(w, microbatches)]


def v_gpipe(stage, stages, microbatches, chunks):
    return gpipe(stage, stages, microbatches, chunks)


v_gpipe.placement = v_shape


def with_w(stage, stages, microbatches, chunks):
    """1F1B with the backward for the weights right after the backward for the input."""
    order = []
    for task in one_f_one_b(stage, stages, microbatches, chunks):
        order += [task, W(task.microbatch)] if task.kind == "B" else [task]
    return order


CUSTOM = [
    (with_w, 1),
    (megatron_1f1b, 1),
    (megatron_interleaved, 3),
    (zb_h1, 1),
    (v_gpipe, 2),
    (v_gpipe, 3),
]
