"""Frames for HLO text written by hand in the tests."""

from jaxpar.cluster import hlo

MESH = {"data": 2, "tensor": 4}
SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def module(entry: str, before: str = "", devices: int = 8) -> str:
    """A module with a scalar sum, the computations of `before` and an entry of these lines."""
    return (
        f"HloModule test, is_scheduled=true, num_partitions={devices}\n\n{SUM}\n{before}\n"
        f"ENTRY %main (x: f32[32,8]) -> f32[32,8] {{\n  %x = f32[32,8]{{1,0}} parameter(0)\n"
        f"{entry}\n}}\n"
    )


def one(entry: str, before: str = "", mesh=MESH, **settings) -> hlo.Collective:
    (found,) = hlo.collectives(module(entry, before), mesh, **settings)
    return found
