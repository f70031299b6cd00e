"""The pipeline: schedules as tables, and one executor that runs any of them in one jit.

`value_and_grad` takes functions and plain pytrees of one's own; models built from `jaxpar.nn` go
through `jaxpar.make_plan`.
"""


def __getattr__(name):
    """Loaded at first use: it stands on modules that stand on this package."""
    if name == "value_and_grad":
        from jaxpar.own import value_and_grad

        return value_and_grad
    raise AttributeError(f"module 'jaxpar.pipeline' has no attribute {name!r}")
