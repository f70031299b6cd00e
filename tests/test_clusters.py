"""The layouts of mesh_configs/ for real clusters, compiled for their GPUs: what their headers say,
what they send to the byte, what hides it, and memory against the formula."""

import functools
import re
import sys
import time
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

import jaxpar as jp
from jaxpar import costs
from jaxpar.cli.compile import find_target
from jaxpar.costs_pipeline import stored_model
from jaxpar.train_config import load_model

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from memory import command, compile_layout  # noqa: E402

CLUSTERS = [name for name in jp.layout_names() if command(name)]
SMALL = ["h100x8_data4_tensor2", "h100x8_zero3", "a100x256"]
LARGE = ["h100x8_zero3", "h100x512", "h100x2048"]
full = pytest.mark.full


def some(names, by_default):
    return [name if name in by_default else pytest.param(name, marks=full) for name in names]


@functools.cache
def compiled(name):
    """(report, bytes by the formula, seconds in all)."""
    began = time.perf_counter()
    return *compile_layout(command(name)), time.perf_counter() - began


def asked(name) -> Counter:
    """(op, axis) -> payload bytes of a step, by the formulas of the layout."""
    config = command(name)
    layout, _ = find_target(config)
    module, model_config = load_model(config.model)
    import jax
    from flax import nnx

    model = jax.eval_shape(lambda: module.Model(model_config, rngs=nnx.Rngs(0)))
    rows = costs.parameter_traffic(model, layout)
    rows += costs.activation_traffic(model, layout, config.global_batch, config.seq_len)
    found = Counter()
    for row in rows:
        found[row.op, "+".join(row.axes)] += row.total_bytes
    return found


def test_there_is_a_layout_for_each_kind_of_cluster():
    wanted = {"h100x1", "h100x16", "h100x128", "h100x512", "h100x2048", "h200x8", "b200x8", "a100x256"}  # fmt: skip # noqa: E501
    assert wanted | {"h100x8_data", "h100x8_data4_tensor2", "h100x8_zero3"} <= set(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_header_says_goal_command_and_what_was_compiled(name):
    text = files("jaxpar.mesh_configs").joinpath(f"{name}.toml").read_text()
    goal, run, _ = re.search(r"# Goal: (.*)\n# Run:  (jaxpar train .*)\\\n# +(.*)\n", text).groups()
    config = command(name)
    assert config.layout == name and config.model in goal and config.model in run
    assert re.search(r"# +JAX 0.10: peak [\d.]+ of [\d.]+ GiB, [\d,]+ TFLOP a step", text)
    layout, target = find_target(config)
    assert target.num_devices == layout.num_devices and target.gpu.startswith(name[:4])


@pytest.mark.parametrize("name", some(CLUSTERS, SMALL))
def test_memory_is_within_5_percent_of_what_xla_counts_and_as_the_header_says(name):
    report, formula, _ = compiled(name)
    assert report.fits
    assert formula.total == pytest.approx(report.memory.peak, rel=0.05)
    text = files("jaxpar.mesh_configs").joinpath(f"{name}.toml").read_text()
    peak = float(re.search(r"# +JAX 0.10: peak ([\d.]+)", text)[1])
    assert peak == pytest.approx(report.memory.peak / 2**30, rel=0.03)  # of either JAX version


@pytest.mark.parametrize("name", some(CLUSTERS, SMALL))
def test_what_is_sent_equals_the_formulas_to_the_byte(name):
    expected = asked(name)
    scalars = 0  # of gradient norms, and of norms' gradients over axes that the formulas have too
    for key, sums in compiled(name)[0].by_axis.items():
        more = sums.total_bytes - expected.pop(key, 0)
        assert 0 <= more < 256, (key, more)
        scalars += more
    assert not +expected and (scalars > 0 or name == "h100x1")


@pytest.mark.parametrize("name", some(LARGE, SMALL))
def test_a_step_compiles_in_less_than_a_minute(name):
    assert compiled(name)[2] < 60


@pytest.mark.parametrize("name", some(["a100x256", "h100x128", "h100x512", "h100x2048"], SMALL))
def test_every_exchange_of_the_steady_phase_hides_behind_a_stage(name):
    exchanges = [o for o in compiled(name)[0].overlap if o.op == "collective-permute"]
    exposed = Counter(o.phase for o in exchanges if o.exposed)
    steady = [o for o in exchanges if o.phase == "steady"]
    config = command(name)
    layout, _ = find_target(config)
    module, model_config = load_model(config.model)
    # the forward of one microbatch through a stage: 2 operations per parameter and token
    block = 12 * model_config.embed_dim**2 / layout.tensor / 2  # at least half of its matrices
    tokens = config.global_batch // layout.size(("replica", "data")) // layout.microbatches
    least = 2 * block * tokens * config.seq_len * model_config.num_layers // layout.pipe
    assert steady and not exposed["steady"]
    assert all(o.flops_between > least for o in steady)
    phases = {o.phase for o in exchanges}
    assert (
        phases == {"warm-up", "steady", "cool-down"} and exposed["warm-up"]
    )  # nothing hides those


def test_zero_3_hides_the_gathers_of_the_next_block_behind_this_one():
    inside = [o for o in compiled("h100x8_zero3")[0].overlap if o.count > 1]

    def hidden(op):
        sizes = [(o.count * o.bytes, o.exposed) for o in inside if o.op == op]
        return sum(size for size, exposed in sizes if not exposed) / sum(s for s, _ in sizes)

    assert hidden("all-gather") > 0.999
    assert hidden("reduce-scatter") > 0.2  # JAX 0.10: 0.81, JAX 0.12: 0.27


@pytest.mark.parametrize("name", some(CLUSTERS, SMALL))
def test_operations_are_within_1_percent_of_the_models_and_what_is_run_again(name):
    report, config = compiled(name)[0], command(name)
    layout, _ = find_target(config)
    import jax
    from flax import nnx

    module, c = load_model(config.model)
    model = jax.eval_shape(lambda: module.Model(c, rngs=nnx.Rngs(0)))
    flops = costs.model_flops(stored_model(model, layout), config.seq_len, causal=False)
    head = 2 * c.embed_dim * c.vocab_size * config.seq_len  # its logits are computed again
    forward = flops.matmul // 3 - head
    forward += 4 * c.num_layers * c.num_heads * c.head_dim * config.seq_len**2
    scores = 2 * c.num_layers * c.num_heads * c.head_dim * config.seq_len**2  # again in cuDNN's
    last = 2 * c.num_layers * c.ffn_dim * c.embed_dim * config.seq_len  # not needed again
    again = forward - (0 if layout.remat == "stage" else last)
    if layout.circulates:  # of its own block all scores, of the others half
        saved = flops.attention + 3 * scores
        again -= saved * (layout.context - 1) // (2 * layout.context)
    per_device = (flops.total + head + again + scores) * config.global_batch / layout.num_devices
    assert report.flops == pytest.approx(per_device, rel=0.01)


def test_a_run_on_gpus_takes_the_options_that_compile_shows():
    from types import SimpleNamespace

    from jaxpar.cluster.options import GPU_OPTIONS
    from jaxpar.train import xla_options

    def run(name, **settings):
        layout, target = find_target(command("h100x8_zero3"))
        mesh = target.mesh(layout) if name == "gpu" else jp.make_mesh(layout)
        config = SimpleNamespace(**{"xla_options": "overlap", **settings})
        return xla_options(SimpleNamespace(plan=SimpleNamespace(mesh=mesh), config=config))

    assert run("gpu") == GPU_OPTIONS["overlap"] and run("gpu", xla_options="none") == {}
    assert run("cpu") == {}
