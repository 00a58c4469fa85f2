"""The writes of an Embedding with max_norm to its table can be undone, to the bit."""

from typing import Any

import pytest
import torch
from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.training.write_tracker import ShortenedRows, WriteTracker, layers_with_max_norm


def embedding(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(20, 4, **{"max_norm": 1.0, **options})


@pytest.mark.parametrize(
    "table",
    [
        embedding(),
        embedding(norm_type=1.0),
        embedding(norm_type=float("inf"), max_norm=0.5),
        embedding(dtype=torch.bfloat16),
        nn.EmbeddingBag(20, 4, max_norm=1.0),
    ],
    ids=["norm 2", "norm 1", "largest", "bfloat16", "bag"],
)
def test_rows_come_back_whatever_was_looked_up_how_often(table: Any) -> None:
    rows = ShortenedRows([table])
    before = table.weight.detach().clone()
    table(torch.arange(12).view(3, 4))
    table(torch.tensor([[3, 3], [15, 0]], dtype=torch.int32))
    table(torch.arange(20).view(4, 5))
    assert not torch.equal(table.weight, before)
    rows.undo()
    assert torch.equal(table.weight, before)


def test_what_has_stayed_is_not_undone_later() -> None:
    table = embedding()
    rows = ShortenedRows([table])
    table(torch.arange(20))
    rows.forget()
    short = table.weight.detach().clone()
    table(input=torch.arange(20))
    rows.undo()
    assert torch.equal(table.weight, short)


def test_who_has_saved_the_table_does_not_notice() -> None:
    table = embedding()
    rows = ShortenedRows([table])
    table(torch.arange(3))
    total = (table.weight**2).sum()
    rows.undo()
    total.backward()


def test_others_are_not_watched_and_wrong_inputs_are_torchs() -> None:
    plain, table = nn.Embedding(3, 2), embedding()
    ShortenedRows([plain, table, nn.Linear(2, 2)])
    assert not plain._forward_pre_hooks and table._forward_pre_hooks
    with pytest.raises(AttributeError, match="'list' object has no attribute 'contiguous'"):
        table([1, 2])


def test_layers_with_such_a_table_are_found_also_where_another_one_owns_it() -> None:
    table, head = embedding(), nn.Linear(4, 20, bias=False)
    head.weight = table.weight
    layers = [nn.Sequential(table), nn.Tanh(), nn.Linear(4, 4), head, nn.Embedding(3, 2)]
    assert layers_with_max_norm(layers, 5) == {5, 8}
    assert layers_with_max_norm(layers[1:3], 0) == set()


def test_a_tracker_that_undoes_nothing_copies_no_rows() -> None:
    table = embedding()
    tracker = WriteTracker([table], [("table", table.weight)], refused={"table": "why"}, can_undo=False)
    assert not table._forward_pre_hooks
    with pytest.raises(PipelineError, match=r"'table'.*why"), tracker.tracked():
        table(torch.arange(20))
