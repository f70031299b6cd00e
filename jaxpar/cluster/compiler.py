"""Compile for a target that is not here, and report what the program needs and does.

The one idea: XLA's own compiler is asked, with the target described to it; every number of the
report is read from what it made: memory analysis, optimized HLO, and the dump of its buffers.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from jaxpar import costs
from jaxpar.cluster import hlo, hlo_overlap, hlo_warnings, live, phases, stand_in, subject
from jaxpar.cluster.live_arrays import memory
from jaxpar.cluster.options import DEVICELESS_OPTIONS, gpu_options
from jaxpar.cluster.report import Report, collective_rows
from jaxpar.cluster.subject import Subject
from jaxpar.cluster.target import Target
from jaxpar.costs_pipeline import branch_share
from jaxpar.plan import Plan
from jaxpar.report import layout_line, warnings


def compile(
    what: Plan | Callable,
    target: Target,
    *args,
    tx=None,
    loss: Callable | None = None,
    clip_norm: float | None = None,
    options: str | Mapping = "overlap",
    trip_counts: Mapping[str, int] | None = None,
    across_hosts: Sequence[str] = (),
) -> Report:
    """Compiles a plan or a jitted function for `target` and reads the program back.

    Args:
      what: a `Plan`, planned again on the target, with `args` one batch: (rows, seq_len) or a dict
        of arrays (`make_plan(..., mesh=target.mesh(layout))` needs no devices here); or a jitted
        function with its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`s with
        NamedShardings, moved to the target's devices.
      target: the cluster.
      tx, loss, clip_norm: of a plan, as in `plan.train_step`; without `tx` the program is
        `plan.value_and_grad`.
      options: a preset of `cluster.options`, or XLA options, on GPUs.
      trip_counts: iterations of loops that the program does not tell, by `while` instruction.
      across_hosts: axes of a plan's mesh that may span nodes, as in `make_mesh`.

    Raises ValueError in one sentence for what does not fit the target, before anything compiles.

    >>> import jax.numpy as jnp
    >>> report = compile(jax.jit(jnp.dot), Target(gpu="cpu", gpus_per_node=1),
    ...                  *2 * [jax.ShapeDtypeStruct((8, 8), jnp.float32)])
    >>> report.memory.arguments, report.flops
    (512, 1024)
    """
    if isinstance(what, Plan):
        given = _batch(args)
        settings = dict(tx=tx, loss=loss, clip_norm=clip_norm, across_hosts=across_hosts)
        made = subject.of_plan(what, target, given, **settings)
    else:
        if tx is not None or loss is not None or clip_norm is not None or across_hosts:
            raise ValueError("tx, loss, clip_norm and across_hosts go with a Plan, not a function")
        made = subject.of_function(what, target, args)
    return compile_subject(made, target, options, trip_counts)


def compile_subject(
    made: Subject,
    target: Target,
    options: str | Mapping = "overlap",
    trip_counts: Mapping[str, int] | None = None,
) -> Report:
    """Compiles what `subject` prepared."""
    began = time.perf_counter()
    lowered = _lower(made)
    traced = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder, _no_cache_writes():
        began = time.perf_counter()
        compiled = _compile(lowered, {**_options(target, options), **live.dump_options(folder)})
        seconds = time.perf_counter() - began
        values = live.live_values(folder)
    text = compiled.as_text()
    program = hlo.parse(text)
    reading = dict(branch_share=_share(made), trip_counts=trip_counts)
    found = hlo.collectives(program, made.mesh_axes, **reading)
    flops = hlo.flops(program, **reading)
    phase_of = phases.pipeline_phases(made.layout) if _pipelined(made) else None
    overlap = hlo_overlap.overlaps(program, made.mesh_axes, phase_of=phase_of, **reading)
    told = _notes(made, flops) + hlo_warnings.find(
        program, _worth_telling(made, found), expected=_expected(made)
    )
    return Report(
        title=_title(made),
        target=target,
        mesh_axes=made.mesh_axes,
        memory=memory(compiled.memory_analysis(), target, program, values),
        flops_by=flops,
        collectives=collective_rows(found, target, made.numbers),
        overlap=tuple(overlap),
        warnings=tuple(told),
        trace_seconds=traced,
        compile_seconds=seconds,
        text=text,
    )


def _batch(args: tuple):
    if len(args) != 1:
        raise ValueError(
            f"a Plan is compiled with one batch, found {len(args)} arguments; give (rows, seq_len) "
            "or a dict of arrays"
        )
    return args[0]


def _options(target: Target, options: str | Mapping) -> dict:
    if target.is_cpu:
        return {}
    chosen = gpu_options(options) if isinstance(options, str) else dict(options)
    return {**chosen, **DEVICELESS_OPTIONS}


def _lower(made: Subject):
    """Traces and lowers; what JAX cannot do without the devices is told in a sentence."""
    try:
        return made.function.lower(*made.args)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        text = str(error) or "not implemented"
        if "incompatible devices" in text:
            raise ValueError(
                "the function uses a mesh of its own (in a shard_map, a sharding constraint or its "
                "in_shardings) that is not on the target's devices; build that mesh from "
                "target.devices() and give arguments on it"
            ) from error
        if "cudnn" in text.lower() or isinstance(error, NotImplementedError):
            raise ValueError(
                f"JAX cannot compile this without the GPU: {text.splitlines()[0]}; use another "
                "implementation of it, such as jaxpar.nn.blockwise_attention"
            ) from error
        raise


@contextlib.contextmanager
def _no_cache_writes() -> Iterator[None]:
    """Nobody compiles the same again: each has a dump of its own."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _compile(lowered, options: dict):
    try:
        return lowered.compile(options)
    except RuntimeError as error:
        text = str(error)
        if "compile option" not in text:
            raise
        raise ValueError(
            f"XLA does not take these options: {text.splitlines()[0]}; use a preset of "
            "jaxpar.cluster.options, or options that this version of XLA has"
        ) from error


def _pipelined(made: Subject) -> bool:
    return made.layout is not None and made.layout.pipe > 1


def _share(made: Subject):
    return branch_share(made.layout, made.model) if _pipelined(made) else 1.0


def _worth_telling(made: Subject, found: list[hlo.Collective]) -> list[hlo.Collective]:
    """Collectives to look at for warnings: not the few numbers of a plan's loss and norms."""
    if made.layout is None:
        return found
    return [
        item
        for item in found
        if item.warning or item.total_bytes is None or item.total_bytes >= hlo_warnings.TINY
    ]


def _expected(made: Subject) -> list | None:
    """What the layout asks for; None where no formula knows."""
    if made.layout is None or not hasattr(made.model, "config"):
        return None
    try:
        return costs.parameter_traffic(made.model, made.layout) + costs.activation_traffic(
            made.model, made.layout, *made.shape
        )
    except ValueError:
        return None


def _notes(made: Subject, flops: hlo.Flops) -> list[str]:
    """Warnings on the settings and on what could not be read."""
    found = warnings(made.layout) if made.layout is not None else []
    if made.stands_in:
        found.append(stand_in.warning(made.stands_in, made.layout, made.model, made.shape))
    for target, times in flops.unread:
        found.append(f"{target} runs {times} times a step, and its operations are not counted")
    for loop in flops.unknown_loops:
        found.append(
            f"loop {loop} runs an unknown number of times, so sums are not known; give "
            f"trip_counts={{{loop!r}: number}}"
        )
    return found


def _title(made: Subject) -> str:
    if made.layout is None:
        return getattr(made.function, "__name__", "a jitted function")
    rows, length = made.shape
    return f"{layout_line(made.layout)} | {rows} rows of {length:,} tokens"
