"""A layout refuses what cannot work, in the user's words, with numbers and what would work."""

import pytest

from jaxpar.batch import check_batch, check_rows
from jaxpar.layout import AXES, CHOICES, Layout
from jaxpar.layout_files import layout_names, load_layout, override
from jaxpar.plan import check_supported


# xai-org/grok-1#248, google-research/text-to-text-transfer-transformer#488
@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Layout(data=3, tensor=2).fill(8),
         "data=3 x tensor=2 = 6 devices, found 8; the axis sizes must multiply to 8, so each must "
         "be one of 1, 2, 4, 8"),
        (lambda: Layout(data=-1, tensor=-1),
         "data=-1 and tensor=-1: only one axis can take the devices that are left; give a size "
         "for data or tensor"),
        (lambda: Layout(data=-1, tensor=3).fill(8),
         "tensor=3 = 3 devices, found 8; the axis sizes must multiply to 8"),
        (lambda: Layout(data=0), "data=0 is not a size; use a whole number from 1 up, or -1"),
        (lambda: Layout(tensor=2.0), "tensor=2.0 is not a size; use a whole number from 1 up"),
        (lambda: Layout(tensor=True), "tensor=True is not a size"),
        (lambda: Layout(microbatches=-1), "microbatches=-1 is not a size; use a whole number"),
        (lambda: Layout(tensr=2), "no setting 'tensr'; did you mean 'tensor'? known: pipe, r"),
        (lambda: Layout(4, 2), "a Layout takes keywords only; write Layout(data=4, tensor=2)"),
        (lambda: Layout(zero=4), "zero=4 is not a choice; known: 0, 1, 2, 3"),
        (lambda: Layout(remat="blok"), "remat='blok' is not a choice; did you mean 'block'?"),
        (lambda: Layout(sequence_parallel=1), "sequence_parallel=1 is neither true nor false"),
        (lambda: Layout(expert_axes=("date",)), "an axis 'date'; did you mean 'data'?"),
    ],
)  # fmt: skip
def test_a_wrong_size_axis_or_choice_is_one_sentence_with_the_valid_ones(make, sentence):
    with pytest.raises(ValueError) as error:
        make()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_size_takes_the_devices_that_are_left():
    assert Layout(data=-1, tensor=2).fill(8) == Layout(data=4, tensor=2)
    assert Layout(pipe=-1).fill(1) == Layout()
    assert Layout(data=4, tensor=2).fill(8).num_devices == 8


# LargeWorldModel/LWM#39, pytorch/pytorch#126600
@pytest.mark.parametrize(
    "settings, rows, sentence",
    [
        (dict(data=8), 1,
         "global_batch 1 is not a multiple of data 8; use context or tensor for one long sequence"),
        (dict(replica=2, data=4), 12,
         "global_batch 12 is not a multiple of replica 2 x data 4 = 8; use 8 or 16"),
        (dict(microbatches=3), 8,
         "gives 8 rows to each of 1 device groups, which microbatches=3 does not divide; use "
         "microbatches=2 or a global_batch of 6 or 9"),
        (dict(pipe=2, microbatches=4), 6,
         "gives 6 rows to each of 1 device groups, which microbatches=4 does not divide; use "
         "microbatches=3 or a global_batch of 4 or 8"),
        (dict(pipe=2, data=2, microbatches=4), 12,
         "gives 6 rows to each of 2 device groups, which microbatches=4 does not divide; use "
         "microbatches=3 or a global_batch of 8 or 16"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_names_batch_axes_microbatches_and_the_nearest(
    settings, rows, sentence
):
    with pytest.raises(ValueError) as error:
        check_rows(Layout(**settings), rows)
    assert sentence in str(error.value)


class Array:
    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize(
    "batch, sentence",
    [
        (dict(tokens=Array(8, 16)), "the batch has no 'targets'; it needs tokens, targets and"),
        (dict(tokens=Array(8, 16), targets=Array(8, 15), weights=Array(8, 16)),
         "must all be [B, T], found {'tokens': (8, 16), 'targets': (8, 15)"),
        (dict.fromkeys(("tokens", "targets", "weights"), Array(8, 15)),
         "seq_len 15 is not a multiple of tensor=4, over which sequence parallelism splits it; "
         "use 12 or 16, or sequence_parallel=false"),
    ],
)  # fmt: skip
def test_arrays_of_a_batch_that_do_not_fit_are_named(batch, sentence):
    with pytest.raises(ValueError) as error:
        check_batch(Layout(tensor=4), batch)
    assert sentence in str(error.value)


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="remat='stage' needs pipe > 1; use remat='block'"):
        check_supported(Layout(remat="stage"))
    with pytest.raises(ValueError, match="chunks=2 needs pipe > 1; use chunks=1"):
        check_supported(Layout(chunks=2))


# ---- TOML


@pytest.mark.parametrize("name", layout_names())
def test_a_ready_layout_loads_and_survives_toml(name):
    layout = load_layout(name)
    assert Layout.from_toml(layout.to_toml()) == layout
    assert all(getattr(layout, field) in values for field, values in CHOICES.items())


def test_every_setting_survives_toml():
    layout = Layout(pipe=2, data=2, zero=3, layers_per_stage=(3, 2), microbatches=4, remat="stage",
                    sequence_parallel=False, expert_axes=("data", "expert"))  # fmt: skip
    assert Layout.from_toml(layout.to_toml()) == layout
    assert Layout().to_toml() == ""


def test_a_wrong_file_is_named_in_the_error(tmp_path):
    (tmp_path / "a.toml").write_text("tensr = 2\n")
    with pytest.raises(ValueError, match=r"a.toml: a layout has no setting 'tensr'; did you mean"):
        load_layout(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text("data = \n")
    with pytest.raises(ValueError, match="b.toml is not TOML"):
        load_layout(tmp_path / "b.toml")
    with pytest.raises(ValueError, match="no layout file .*c.toml; give a path that exists"):
        load_layout(tmp_path / "c.toml")
    with pytest.raises(ValueError, match="no layout 'cpu8_data4_tensr2' in mesh_configs; did you"):
        load_layout("cpu8_data4_tensr2")


def test_a_schedule_function_has_no_toml():
    with pytest.raises(ValueError, match="has no TOML form"):
        Layout(schedule=lambda stage, stages, microbatches, chunks: []).to_toml()


def test_settings_on_top_of_a_layout_are_checked_like_its_own():
    assert override(Layout(data=8), ["data=4", "tensor = 2", "remat=block"]) == Layout(
        data=4, tensor=2, remat="block"
    )
    with pytest.raises(ValueError, match="no setting 'tensr'"):
        override(Layout(), ["tensr=2"])
    with pytest.raises(ValueError, match="'tensor' is not a setting; write key=value"):
        override(Layout(), ["tensor"])


def test_axes_are_ordered_from_slow_links_to_fast_ones():
    assert AXES == ("pipe", "replica", "data", "expert", "context", "tensor")
    assert list(Layout().axis_sizes) == list(AXES)
