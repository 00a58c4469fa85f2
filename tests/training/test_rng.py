"""Random numbers depend on what is computed, not on the process that computes it."""

import threading

import pytest
import torch

import lp_pipe.pipeline as pp


def test_the_same_numbers_come_for_the_same_layer() -> None:
    with pp.layer_rng(seed=1, index=2):
        weights = torch.randn(3)
    with pp.layer_rng(1, 2):
        assert torch.equal(torch.randn(3), weights)


def test_every_argument_matters() -> None:
    drawn = []
    for numbers in [(0, 0), (1, 0), (0, 1)]:
        with pp.layer_rng(*numbers):
            drawn.append(torch.rand(()).item())
    for numbers in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        with pp.step_rng(*numbers):
            drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == len(drawn)


def test_torchs_own_generator_goes_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    first = torch.rand(2)
    with pytest.raises(KeyError), pp.step_rng(0, 0, 0, 0):
        torch.rand(5)
        raise KeyError
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


def test_bodies_may_be_nested() -> None:
    with pp.layer_rng(0, 0):
        undisturbed = torch.rand(2)
    with pp.layer_rng(0, 0):
        first = torch.rand(1)
        with pp.step_rng(0, 0, 0, 0):
            torch.rand(1)
        assert torch.equal(torch.cat([first, torch.rand(1)]), undisturbed)


def test_threads_do_not_draw_from_each_others_stream() -> None:
    def draw(layer: int) -> list[float]:
        drawn = []
        for step in range(50):
            with pp.step_rng(0, layer, step, 0):
                drawn.extend(torch.rand(3).tolist())
        return drawn

    alone = [draw(layer) for layer in range(4)]
    together: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: draw(n)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [together[layer] for layer in range(4)] == alone
