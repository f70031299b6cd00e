"""Attention of a split sequence, variant by variant, side by side with one device in one run.

    python benchmarks/attention.py                             # 8 emulated CPU devices
    python benchmarks/attention.py --gpu h100                  # compiled for 8 H100, no GPU needed

A step is `jaxpar.attention` forward and backward. Every variant gets the same global arrays, put in
its order beforehand, as a train step has its tokens. All programs run in turn, one device's too, so
that a busy machine slows all alike; ratios are those of medians. Emulated devices share the cores,
all of which one device uses as well: 1.0 means the same work. Who waits for whom does not show;
"busiest" counts that. With --gpu nothing runs: XLA compiles for the GPUs, and its program is read.
"""

import dataclasses
import math
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxpar as jp
from jaxpar.cluster import hlo
from jaxpar.cluster.report_text import columns
from jaxpar.cluster.target import has_cudnn
from jaxpar.nn.context_attention import make_context
from jaxpar.nn.order import Context, document_places, places
from jaxpar.nn.sight import Rule, Tokens, seen

ONE = "one device"
VARIANTS = {
    "ring zigzag": ("ring", "zigzag"),
    "ring contiguous": ("ring", "contiguous"),
    "ring document": ("ring", "document"),
    "allgather": ("allgather", "zigzag"),
    "ulysses": ("ulysses", "zigzag"),
    "ring+ulysses": ("ring+ulysses", "zigzag"),
}
"""Name -> variant of `jaxpar.attention`, order of the tokens; document: where there are several."""
SPLIT = PartitionSpec(None, "context")
TILE, MIB = 128, 2**20


@dataclasses.dataclass(frozen=True)
class Work:
    """What is computed: `rows` rows of `seq_len` tokens, `documents` packed in each, causal."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 1
    window: int | None = None
    documents: int = 1

    def shapes(self, dtype) -> list[jax.ShapeDtypeStruct]:
        """q, k, v, and the gradient of the output."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        row = (self.rows, self.seq_len)
        return [jax.ShapeDtypeStruct((*row, n, self.head_dim), dtype) for n in heads]

    def segments(self) -> np.ndarray:
        """The document of each token, int32 [rows, seq_len]; of random lengths."""
        rng = np.random.default_rng(0)
        found = np.zeros((self.rows, self.seq_len), np.int32)
        for row in found:
            starts = rng.choice(np.arange(1, self.seq_len), self.documents - 1, replace=False)
            row[starts] = 1
        return found.cumsum(axis=1, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute it: on one device (variant "") or split over `context` in an order."""

    context: Context
    variant: str = ""

    def place(self, gpu: str):
        """The devices of one node, their mesh if there are several, and where arrays lie."""
        target = jp.cluster.Target(gpu=gpu, nodes=1, gpus_per_node=self.context.size)
        if not self.variant:
            return target, None, SingleDeviceSharding(target.devices()[0])
        mesh = target.mesh(jp.Layout(context=self.context.size))
        return target, mesh, NamedSharding(mesh, SPLIT)

    def order(self, work: Work) -> np.ndarray:
        """Place in its row of each token, the first device's first, int32 [rows, T]."""
        if self.context.order == "document":
            return np.asarray(document_places(jnp.asarray(work.segments()), self.context))
        return np.tile(places(work.seq_len, self.context).reshape(-1), (work.rows, 1))

    def step(self, work: Work, kernel: str, mesh=None):
        """(q, k, v, gradient, and where there are documents their numbers and the tokens' places)
        -> output and gradients of q, k, v; jitted."""
        many = self.context.ulysses if self.variant == "ring+ulysses" else None
        settings = dict(variant=self.variant or "ring", ulysses=many, window=work.window)
        by_place = self.context.order == "document"

        def step(q, k, v, gradient, segments=None, places=None):
            order = dict(positions=places) if by_place else dict(order=self.context.order)
            given = dict(segment_ids=segments, kernel=kernel, **order, **settings)
            out, pullback = jax.vjp(lambda *qkv: jp.attention(*qkv, **given), q, k, v)
            return out, *pullback(gradient)

        if mesh is None:
            return jax.jit(step)
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT))

    def busiest(self, work: Work) -> float:
        """Tiles of scores of the device that has most in each round of the ring, over the mean."""
        n, order = self.context.ring, self.order(work)
        segments = np.take_along_axis(work.segments(), order, axis=1)
        tokens = Tokens(jnp.asarray(order), jnp.asarray(segments))
        mask = seen(Rule(True, work.window), tokens, tokens)
        tile = math.gcd(TILE, work.seq_len // n)
        grid = mask.reshape(work.rows, n, -1, tile, n, work.seq_len // n // tile, tile)
        tiles = np.asarray(grid.any(axis=(3, 6)).sum(axis=(0, 2, 4)))  # of a device, with another
        rounds = [[tiles[i, i - back] for i in range(n)] for back in range(n)]
        if self.context.gathers:  # nobody waits between blocks
            rounds = [np.sum(rounds, axis=0)]
        return n * sum(map(max, rounds)) / tiles.sum()


def ways(context: int, ulysses: int, work: Work) -> dict[str, Way]:
    """One device, then every variant that so many devices and documents have."""

    def way(chosen):
        many = ulysses if chosen[0] == "ring+ulysses" else None
        return Way(make_context(context, chosen[0], many, chosen[1]), chosen[0])

    fits = {n: v for n, v in VARIANTS.items() if v[1] != "document" or work.documents > 1}
    return {ONE: Way(Context(order="contiguous")), **made_by(way, fits)}


def made_by(make, chosen: dict) -> dict:
    """make(what) of each that it can be made of; without one device there is nothing to compare."""
    found = {}
    for name, what in chosen.items():
        try:
            found[name] = make(what)
        except ValueError as error:
            if name == ONE:
                raise
            print(f"{name} is left out: {error}")
    return found


# ---- run on emulated devices


@dataclasses.dataclass
class Job:
    """A compiled step with its arguments, and what it took: seconds, and CPU seconds."""

    program: jax.stages.Compiled
    args: list
    times: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    result: tuple = ()

    def run(self) -> None:
        """Runs one step, timed; CPU seconds are those of all threads."""
        start, cpu = time.perf_counter(), time.process_time()
        self.result = jax.block_until_ready(self.program(*self.args))
        self.times.append((time.perf_counter() - start, time.process_time() - cpu))


def prepare(way: Way, work: Work, arrays: list) -> Job:
    """The step compiled, and the arrays in the way's order on its devices."""
    order = way.order(work)
    taken = [np.take_along_axis(a, order.reshape(order.shape + (1,) * (a.ndim - 2)), axis=1)
             for a in arrays]  # fmt: skip
    _, mesh, where = way.place("cpu")
    args = jax.device_put(taken, where)
    return Job(way.step(work, "blockwise", mesh).lower(*args).compile(), args)


def difference(order: np.ndarray, job: Job, one: Job) -> float:
    """Largest difference to one device's results, over the largest number of the array."""
    back = np.argsort(order, axis=1)[..., None, None]
    apart = lambda a, b: np.abs(np.take_along_axis(np.asarray(a), back, axis=1) - b).max()  # noqa: E731
    return max(apart(a, b) / np.abs(b).max() for a, b in zip(job.result, one.result, strict=True))


def run_all(chosen: dict[str, Way], work: Work, steps: int) -> str:
    """All programs in turn, `steps` times after one that is not timed, as a table."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s.shape, np.float32) for s in work.shapes(np.float32)]
    if work.documents > 1:
        arrays += [work.segments(), np.indices(work.segments().shape, np.int32)[1]]
    jobs = made_by(lambda way: prepare(way, work, arrays), chosen)
    for _ in range(steps + 1):
        for job in jobs.values():
            job.run()
    rows, one = [], jobs[ONE]
    for name, job in jobs.items():
        way = chosen[name]
        seconds, alone, cpu, alone_cpu = (
            statistics.median(t[i] for t in j.times[1:]) for i in (0, 1) for j in (job, one)
        )
        temporaries = job.program.memory_analysis().temp_size_in_bytes
        found = hlo.collectives(job.program.as_text(), {"context": way.context.size})
        sent = sum(traffic.wire_bytes for traffic in hlo.by_axis(found).values())
        rows.append((
            name, f"{seconds / alone:.2f}", f"{cpu / alone_cpu:.2f}", f"{1e3 * seconds:.0f}",
            f"{way.busiest(work):.2f}", f"{temporaries / MIB:.2f}", f"{sent / MIB:.2f}",
            f"{difference(way.order(work), job, one):.0e}",
        ))  # fmt: skip
    title = ("variant", "x one device", "x its CPU s", "step ms", "busiest", "temp MiB",
             "sent MiB", "difference")  # fmt: skip
    return "\n".join(columns(title, rows, right=range(1, 8)))


# ---- compile for GPUs


def compile_way(way: Way, work: Work, gpu: str, kernel: str) -> jp.cluster.Report:
    """The step in bf16 for GPUs of one node."""
    target, mesh, where = way.place(gpu)
    args = [shape.update(sharding=where) for shape in work.shapes(jnp.bfloat16)]
    if work.documents > 1:
        args += 2 * [args[0].update(shape=args[0].shape[:2], dtype=jnp.int32)]
    return jp.cluster.compile(way.step(work, kernel, mesh), target, *args)


def compile_all(chosen: dict[str, Way], work: Work, gpu: str, kernel: str) -> str:
    """Memory against one device's, what is sent, and what hides it, as a table."""
    reports = made_by(lambda way: compile_way(way, work, gpu, kernel), chosen)
    rows, one = [], reports[ONE].memory
    for name, report in reports.items():
        size, memory, flops = chosen[name].context.size, report.memory, report.flops_by
        exposed = sum(o.count for o in report.overlap if o.exposed)
        sent = sum(row.wire_bytes for row in report.collectives)
        done = flops.total - flops.causal_attention / 2
        rows.append((
            name, f"{memory.temporaries / MIB:.0f}", f"{memory.peak / MIB:.0f}",
            f"{size * memory.temporaries / one.temporaries:.2f}",
            f"{size * memory.peak / one.peak:.2f}", f"{sent / MIB:.0f}",
            f"{sum(o.count for o in report.overlap)}", f"{exposed}", f"{done / 1e12:.2f}",
        ))  # fmt: skip
    title = ("variant", "temp MiB", "peak MiB", "temp x", "peak x", "sent MiB", "sent in",
             "exposed", "TFLOP")  # fmt: skip
    return "\n".join(columns(title, rows, right=range(1, 9)))


ON_CPU = """busiest: tiles of scores of the device that has most, in each round of the ring, over
the mean. temp, sent: per device. difference: the largest to one device's results, relative."""
ON_GPU = """peak: arguments, outputs and temporaries, per device. x: as a multiple of an even share
of one device's. sent: bytes a device sends, and in how many collectives; exposed: those with no
operations between start and done. TFLOP: a device's; under a causal mask half, as cuDNN skips."""


def main(
    context: int = 8,
    seq_len: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rows: int = 1,
    window: int | None = None,
    documents: int = 1,
    ulysses: int = 2,
    steps: int = 5,
    gpu: str = "",
) -> None:
    """Measures every variant of attention against one device, side by side.

    Args:
        context: devices that share a row.
        seq_len: tokens of a row; by default 4,096 with 8 heads and 4 kv heads of 64, and with
            --gpu 32,768 with the heads of llama:8b.
        window: a query sees that many keys, its own among them; by default all before it.
        documents: documents packed in each row.
        ulysses: devices of ring+ulysses that exchange heads.
        steps: timed steps of each variant, after one that is not.
        gpu: compile for such GPUs instead, which need not be there.
    """
    jp.emulate_devices(context)
    jax.devices()  # JAX starts with so many; one device's target would ask for one
    usual = (32_768, 32, 8, 128) if gpu else (4096, 8, 4, 64)
    sizes = [n or d for n, d in zip((seq_len, heads, kv_heads, head_dim), usual, strict=True)]
    work = Work(*sizes, rows=rows, window=window, documents=documents)
    chosen = ways(context, ulysses, work)
    print(f"{work}\nforward and backward, JAX {jax.__version__}", end=", ")
    if gpu:
        kernel = "cudnn" if has_cudnn() else "blockwise"
        print(f"bf16, {kernel}, compiled for {context} x {gpu} in one node\n", flush=True)
        print(compile_all(chosen, work, gpu, kernel), ON_GPU, sep="\n\n")
    else:
        emulated = f"{context} devices emulated on {os.cpu_count()} cores"
        print(f"fp32, blockwise, {emulated}, {steps} steps each, in turn\n", flush=True)
        print(run_all(chosen, work, steps), ON_CPU, sep="\n\n")


if __name__ == "__main__":
    tyro.cli(main)
