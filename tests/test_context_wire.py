"""Bytes that attention sends over context: the formulas of `costs` equal the compiled program."""

from collections import Counter

import pytest

import jaxpar as jp
from compiled import compiled, model_shapes, payload
from jaxpar import costs, costs_pipeline
from jaxpar.cluster import hlo
from jaxpar.costs_blocks import over_context
from jaxpar.costs_pipeline import Passes
from jaxpar.models import llama

BOTH = dict(attention="ring+ulysses", ulysses=2)
CASES = [
    ("llama", dict(context=4)),
    ("llama", dict(context=2, data=2, tensor=2, zero=3, microbatches=2)),
    ("llama", dict(context=4, data=2, attention="allgather", remat="block")),
    ("llama_kv2", dict(context=4, attention="ulysses", zero=2, microbatches=2)),
    ("llama", dict(context=4, tensor=2, zero=0, remat="block", **BOTH)),
    ("llama", dict(context=2, pipe=2, tensor=2, microbatches=4)),
]
MORE = [
    ("llama", dict(context=8, zero=3, context_order="contiguous")),
    ("gpt2", dict(context=4, context_order="document", remat="dots")),
    ("llama_kv2", dict(context=8, attention="ulysses", zero=3)),
    ("llama", dict(context=2, tensor=4, attention="allgather", sequence_parallel=False)),
    ("llama", dict(context=2, pipe=2, attention="ulysses", microbatches=4, zero=2)),
    ("llama", dict(context=2, pipe=3, microbatches=3, remat="block")),  # 4 layers: 2, 1, 1
    ("llama", dict(context=4, pipe=2, microbatches=4, remat="stage", **BOTH)),
    ("llama", dict(context=2, replica=2, data=2, zero=1, remat="offload")),
]


def check(name, settings):
    layout = jp.Layout(precision="fp32", **settings)
    rows = 2 * layout.microbatches * layout.data * layout.replica
    run, model = compiled(name, layout, rows, 16), model_shapes(name)
    want = Counter()
    for row in [*costs.parameter_traffic(model, layout),
                *costs.activation_traffic(model, layout, rows, 16)]:  # fmt: skip
        want[row.op, row.axes] += row.total_bytes
    share = costs_pipeline.branch_share(layout, model) if layout.pipe > 1 else 1.0
    found = payload(hlo.collectives(run.text, layout.axis_sizes, branch_share=share))
    assert found == want


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_the_compiled_program_equal_the_formulas(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_bytes_of_the_compiled_program_equal_the_formulas_full(case):
    check(*case)


# 8B: 32 heads, 8 kv heads of 128; one block of 32,768 tokens, bf16, over 8 devices
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32_768, 32, 8, 128


@pytest.mark.parametrize(
    "settings, elements",
    [
        # 2 s b h g/a (c-1)/c forward and twice that backward, h = a x head_dim
        (dict(attention="ring"), 6 * TOKENS * 1024 * 7 // 8),
        (dict(attention="allgather"), 6 * TOKENS * 1024 * 7 // 8),
        # (2 h + 2 h g/a) s b / c (c-1)/c forward, and as many backward
        (dict(attention="ulysses"), 2 * (2 * 4096 + 2 * 1024) * TOKENS // 8 * 7 // 8),
    ],
    ids=str,
)
def test_what_a_block_sends_equals_the_published_formulas(settings, elements):
    layout = jp.Layout(context=8, context_order="contiguous", **settings)
    rows = over_context(llama.preset("8b"), layout, Passes(1, 1), 1, TOKENS)
    sent = sum(costs.Transfer(*row).wire_bytes for row in rows)
    assert sent == 2 * elements
