"""What a launch asks for of a multiprocessor's shared memory, with a driver that writes down what it is asked."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from mstar.kernels import carveout
from mstar.kernels.carveout import PREFERRED_CARVEOUT, least_carveout, prefer_carveout

H200 = 228 << 10


class Driver:
    def __init__(self, error=0):
        self.calls, self.error = [], error

    def cuFuncSetAttribute(self, function, attribute, value):
        self.calls.append((function.value, attribute, value))
        return self.error


@pytest.fixture
def driver(monkeypatch):
    asked = Driver()
    monkeypatch.setattr(carveout, "_asked", WeakKeyDictionary())
    monkeypatch.setattr(carveout, "_driver", lambda: asked)
    monkeypatch.setattr(carveout, "_most", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    return asked


class Kernel:
    """As Triton's compiled kernels are: equal to themselves alone."""

    name = "_kernel"

    def __init__(self, function, shared=0):
        self.function, self.metadata = function, SimpleNamespace(shared=shared)


@pytest.mark.parametrize(
    "shared, percent", [(0, 1), (107_520, 47), (227 << 10, 100), (300 << 10, 100), (113 << 10, 50)]
)
def test_the_least_carveout_holds_one_program_and_a_percent_less_does_not(shared, percent):
    assert least_carveout(shared, H200) == percent
    if percent < 100:
        assert percent * H200 >= 100 * (shared + 1024) > (percent - 1) * H200


def test_a_function_is_asked_for_once_until_another_share_is_wanted(driver):
    first, second = Kernel(7), Kernel(8)
    for _ in range(3):
        prefer_carveout(first, 72)
    prefer_carveout(second, 72)
    prefer_carveout(first, 44)
    assert driver.calls == [
        (7, PREFERRED_CARVEOUT, 72),
        (8, PREFERRED_CARVEOUT, 72),
        (7, PREFERRED_CARVEOUT, 44),
    ]


def test_without_a_share_it_is_what_one_program_takes(driver):
    kernel = Kernel(7, shared=107_520)
    for _ in range(2):
        prefer_carveout(kernel)
    assert driver.calls == [(7, PREFERRED_CARVEOUT, 47)]


def test_a_function_in_the_place_of_one_that_was_unloaded_is_asked_for_itself(driver):
    for _ in range(2):
        kernel = Kernel(7)
        prefer_carveout(kernel, 72)
        del kernel
        gc.collect()
    assert driver.calls == [(7, PREFERRED_CARVEOUT, 72)] * 2 and len(carveout._asked) == 0


def test_nothing_is_asked_of_what_has_no_function_yet_or_of_amd(driver, monkeypatch):
    prefer_carveout(None, 72)  # the interpreter
    prefer_carveout(Kernel(None), 72)
    prefer_carveout(object(), 72)  # what compiles and does not launch
    monkeypatch.setattr(torch.version, "hip", "6.0")
    prefer_carveout(Kernel(7), 72)
    assert driver.calls == []


def test_a_refusal_is_said_once_and_fails_nothing(driver, caplog):
    driver.error, kernel = 801, Kernel(7)
    for _ in range(2):
        prefer_carveout(kernel, 72)
    assert [record.getMessage() for record in caplog.records] == [
        "_kernel: a carve-out of 72 % was refused: CUDA error 801"
    ]
