"""The search for settings that make a program fit."""

import types

from jaxpar.cluster import fitting
from jaxpar.layout import Layout

USABLE = 10**9
"""Bytes that a program may take here."""


class Machine:
    """Layouts whose peak is worked out by a rule; keeps what was tried."""

    def __init__(self, peak):
        self.peak, self.tried = peak, []

    def __call__(self, layout):
        self.tried.append(layout)
        peak = self.peak(layout)
        if peak is None:
            raise ValueError("not legal")
        return types.SimpleNamespace(fits=peak <= USABLE, memory=types.SimpleNamespace(peak=peak))


def test_the_search_ends_with_three_layouts_that_were_compiled_and_fit():
    sizes = {"none": 3, "block": 2, "offload": 1}
    machine = Machine(lambda a: USABLE * sizes[a.remat] // (1 + a.zero) // a.tensor)
    found = fitting.search(Layout(data=8, zero=0), machine)
    assert len(found.fits) == 3 and all(fit.report.fits for fit in found.fits)
    assert all(fit.layout in machine.tried for fit in found.fits)
    assert found.tried == len(machine.tried)
    for fit in found.fits:
        assert fit.layout.num_devices == 8 and fit.layout != Layout(data=8, zero=0)


def test_what_only_adds_to_a_fit_is_not_offered():
    machine = Machine(lambda a: 10 if a.zero == 3 or a.remat != "none" else USABLE + a.zero)
    fits = fitting.search(Layout(data=2), machine).fits
    settings = [set(fit.settings) for fit in fits]
    assert {"zero=3"} in settings and {"remat=block"} in settings
    assert not any(a < b for a in settings for b in settings)


def test_two_changes_are_tried_where_one_is_not_enough():
    machine = Machine(lambda a: 10 if a.zero == 3 and a.remat == "block" else USABLE + 9 - a.zero)
    found = fitting.search(Layout(data=8), machine, wanted=1)
    assert found.fits[0].settings == ("zero=3", "remat=block")


def test_illegal_layouts_are_passed_over_and_when_nothing_fits_the_least_is_told():
    machine = Machine(lambda a: None if a.tensor > 1 or a.pipe > 1 else USABLE + 100 - a.zero)
    found = fitting.search(Layout(data=2, zero=2), machine, limit=5)
    assert found.fits == () and found.tried == 5
    assert found.least.settings == ("zero=3",)


def test_a_layout_that_nothing_can_change_ends_the_search():
    machine = Machine(lambda a: None)
    found = fitting.search(Layout(remat="offload"), machine)
    assert found == fitting.Search((), 0, None)


def test_changes_keep_the_devices_and_lower_memory_by_one_setting():
    layout = Layout(data=4, tensor=2, sequence_parallel=False, remat="block", microbatches=2)
    found = [fitting.differences(layout, changed) for changed in fitting.changes(layout)]
    assert ("sequence_parallel=true",) in found and ("remat=offload",) in found
    assert ("zero=2",) in found and ("zero=3",) in found
    assert ("data=2", "tensor=4", "microbatches=4") in found
    assert ("pipe=2", "data=2", "microbatches=4") in found
    assert ("remat=stage",) not in found  # needs a pipeline
    assert all(changed.num_devices == 8 for changed in fitting.changes(layout))
