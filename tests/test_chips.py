"""GPU facts: found by short name and by JAX's device kind, consistent with each other."""

import pytest

from jaxpar.chips import CHIPS, chip, chip_of


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H200 141GB HBM3e", "h200-141gb"),
        ("NVIDIA B200", "b200-180gb"),
    ],
)
def test_a_gpu_is_found_by_the_name_jax_gives_it(kind, name):
    assert chip_of(kind) is CHIPS[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "TPU v5e", ""])
def test_a_device_that_is_not_in_the_table_is_none(kind):
    assert chip_of(kind) is None


def test_the_size_may_be_left_off_where_there_is_one():
    assert chip("H100") is chip("h100-80gb")
    with pytest.raises(ValueError, match="several sizes; use a100-40gb or a100-80gb"):
        chip("a100")


@pytest.mark.parametrize("name", ["h10", "h100-8gb", "tpu"])
def test_an_unknown_gpu_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="there is no GPU .* known: a100-40gb, a100-80gb"):
        chip(name)


def test_an_unknown_gpu_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'h200-141gb'"):
        chip("h200-140gb")


def test_every_chips_numbers_hang_together():
    for c in CHIPS.values():
        size_in_name = int(c.name.rsplit("-")[1].removesuffix("gb"))
        # the driver keeps some of the nominal size; one GB is 10**9 or 2**30 to different vendors
        assert 0.98 * size_in_name * 1e9 < c.memory_bytes <= size_in_name * 2**30, c.name
        assert 1.5e12 <= c.memory_bandwidth < 10e12, c.name
        assert c.shared_memory_per_core - c.shared_memory_per_block_optin == 1024, c.name
        assert fp32_flops(c) < c.peak_bf16_flops / 10, c.name


def fp32_flops(c) -> float:
    """Two operations per unit and cycle, outside the tensor cores."""
    return 2 * c.core_count * c.fpus_per_core * c.clock_ghz * 1e9


def test_published_fp32_rates_follow_from_cores_and_clock():
    # datasheets: 19.5 and 67 TFLOPS
    assert fp32_flops(chip("a100-80gb")) == pytest.approx(19.5e12, rel=0.01)
    assert fp32_flops(chip("h100")) == pytest.approx(67e12, rel=0.01)
