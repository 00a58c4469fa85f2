"""Losses equal their definitions, written out in double precision."""

import pytest
import torch
from torch import Tensor

from lp_pipe.rl import losses
from tests.seeds import random_numbers

T, B = 7, 5


@pytest.fixture
def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(random_numbers(3).randrange(1 << 30))


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_gae_is_the_weighted_sum_of_errors_until_the_episode_ends(numbers: torch.Generator) -> None:
    rewards, values, next_values = drawn(numbers, T, B), drawn(numbers, T, B), drawn(numbers, T, B)
    ends = torch.rand(T, B, generator=numbers) < 0.3
    discounts = torch.where(ends & (torch.rand(T, B, generator=numbers) < 0.5), 0.0, 0.97).double()
    found = losses.gae(rewards, discounts, values, next_values, ends, 0.9)
    for b in range(B):
        for t in range(T):
            expected, factor = 0.0, 1.0
            for later in range(t, T):
                expected += factor * float(
                    rewards[later, b] + discounts[later, b] * next_values[later, b] - values[later, b]
                )
                if ends[later, b]:
                    break
                factor *= float(discounts[later, b]) * 0.9
            assert found[t, b].item() == pytest.approx(expected, abs=1e-12)


def test_vtrace_is_the_sum_of_equation_1(numbers: torch.Generator) -> None:
    log_rhos, rewards, values = drawn(numbers, T, B), drawn(numbers, T, B), drawn(numbers, T, B)
    discounts, bootstrap = torch.rand(T, B, generator=numbers, dtype=torch.float64), drawn(numbers, B)
    found = losses.vtrace(log_rhos, discounts, rewards, values, bootstrap, clip_rho=1.1, clip_c=0.9)
    after = torch.cat([values, bootstrap[None]])
    rhos, traces = log_rhos.exp().clamp(max=1.1), log_rhos.exp().clamp(max=0.9)
    for b in range(B):
        for s in range(T):
            expected, factor = float(values[s, b]), 1.0
            for t in range(s, T):
                error = rhos[t, b] * (rewards[t, b] + discounts[t, b] * after[t + 1, b] - values[t, b])
                expected += factor * float(error)
                factor *= float(discounts[t, b] * traces[t, b])
            assert found.vs[s, b].item() == pytest.approx(expected, abs=1e-12)
    following = torch.cat([found.vs[1:], bootstrap[None]])
    torch.testing.assert_close(found.advantages, rhos * (rewards + discounts * following - values))


def test_double_q_values_the_online_choice_by_the_target_network(numbers: torch.Generator) -> None:
    q = drawn(numbers, B, 4).requires_grad_()
    online, target = drawn(numbers, B, 4).requires_grad_(), drawn(numbers, B, 4)
    action, reward, discount = torch.arange(B) % 4, drawn(numbers, B), drawn(numbers, B).abs()
    errors = losses.double_q(q, action, reward, discount, online, target)
    for b in range(B):
        best = max(range(4), key=lambda a: online[b, a].item())
        expected = (reward[b] + discount[b] * target[b, best] - q[b, action[b]]).item()
        assert errors[b].item() == pytest.approx(expected, abs=1e-12)
    errors.sum().backward()
    assert online.grad is None and q.grad is not None and q.grad.sum() == -B


def test_the_return_of_n_steps_ends_with_the_bootstrap() -> None:
    rewards, discounts = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.1])
    assert losses.n_step_return(rewards, discounts, torch.tensor(10.0)).tolist() == [3.25, 4.5, 5.0]
