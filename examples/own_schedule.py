"""A pipeline schedule of one's own, and training with it.

A schedule is the order of work on each stage; ticks, messages, buffers and memory follow from it.
This one runs one forward more than 1F1B ahead of each backward.
"""

import jax
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama
from jaxpar.pipeline.schedules import B, F
from jaxpar.pipeline.table import lower


def eager(stage, stages, microbatches, chunks):
    ahead = min(microbatches, 2 * (stages - 1 - stage) + 1)
    tasks = [F(m) for m in range(ahead)]
    for m in range(microbatches):
        tasks.append(B(m))
        if ahead + m < microbatches:
            tasks.append(F(ahead + m))
    return tasks


jp.emulate_devices(8)
layout = jp.Layout(pipe=4, data=2, schedule=eager, microbatches=8, precision="fp32")
tx = optax.adamw(3e-3)


def init(key):
    model = llama.Llama(llama.tiny(), rngs=nnx.Rngs(key))
    return model, tx.init(model)


plan = jp.make_plan(layout, init)
table = lower(eager, stages=4, microbatches=8)
print(f"{len(table.ticks)} ticks, microbatches kept per stage: {table.live}")
step = plan.train_step(tx, clip_norm=1.0)
state = plan.init(jax.random.key(0))
for i, batch in enumerate(jp.data.batches("builtin", plan, global_batch=32, seq_len=64, steps=20)):
    state, metrics = step(state, batch)
    if i % 5 == 0 or i == 19:
        print(f"step {i}: loss {metrics['loss']:.3f}")
