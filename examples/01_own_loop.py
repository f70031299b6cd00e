"""Your own training loop: everything parallel is in `plan`, everything else is plain JAX.

Run:  python examples/01_own_loop.py      (run it again: it goes on from its checkpoint)
"""

import jax
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama

jp.emulate_devices(8)  # on a cluster: jp.initialize()
layout = jp.load_layout("cpu8_pipe2_data2_tensor2")  # or a path, or jp.Layout(pipe=2, data=2, ...)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def init(key):
    model = llama.Llama(llama.tiny(), rngs=nnx.Rngs(key))
    return model, tx.init(model)


plan = jp.make_plan(layout, init)  # every array's split and the schedule; allocates nothing
grad_fn = plan.value_and_grad(llama.loss)  # jax.value_and_grad, in parallel


@jax.jit(donate_argnums=0, out_shardings=(plan.shardings, None))
def step(state, batch):
    model, opt_state = state
    loss, grads = grad_fn(model, batch)
    updates, opt_state = tx.update(grads, opt_state, model)
    return (optax.apply_updates(model, updates), opt_state), loss


with jp.Checkpoint("runs/own_loop", plan, every=2) as checkpoint:
    state, start = checkpoint.restore() or (plan.init(jax.random.key(0)), 0)
    batches = jp.data.batches("builtin", plan, global_batch=32, seq_len=256, start=start, steps=4)
    for i, batch in enumerate(batches, start):
        state, loss = step(state, batch)
        checkpoint.save(i + 1, state)
        print(f"step {i + 1}: loss {loss:.3f}")
