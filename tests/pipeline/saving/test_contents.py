"""A share taken apart and put together is the same; each worker finds what belongs to it."""

import torch

from lp_pipe.pipeline.saving.contents import Saved, entries, is_of, joined

ONE = torch.ones(1)


def share(name: str, newest: int) -> Saved:
    """Return the share of a worker with one parameter, in an asynchronous pipeline."""
    return Saved(
        weights={name: ONE},
        optimizer={name: {"state": {"step": 3, "exp_avg": ONE}, "options": {"lr": 0.1, "betas": (0.9, 0.99)}}},
        lr_scheduler={"last_epoch": 3},
        formats={f"{name.partition('.')[0]}": 2},
        scheduler_kind="StepLR",
        loss={"center": torch.tensor(2.0)},
        versions=[{"newest": newest, "older": {newest - 1: {name: ONE}, newest - 2: {name: ONE}}}],
    )


def test_a_share_comes_back_from_its_entries() -> None:
    whole = share("0.weight", 5)
    unscheduled = whole._replace(lr_scheduler=None, scheduler_kind=None)
    synchronous = whole._replace(versions=[])
    changed = whole._replace(settings={"0": {"training": False}})
    for original in (whole, unscheduled, synchronous, changed):
        assert joined(entries(original, 0)) == original


def test_a_parameter_without_state_keeps_its_options() -> None:
    original = share("0.weight", 5)._replace(optimizer={"0.weight": {"state": {}, "options": {"lr": 0.1}}})
    assert joined(entries(original, 0)).optimizer == original.optimizer


def test_what_a_scheduler_says_of_a_group_goes_along_with_its_parameters() -> None:
    of_one = {"state": {}, "options": {"lr": 0.1}, "schedule": {("base_lrs",): 0.1}}
    original = share("0.weight", 5)._replace(optimizer={"0.weight": of_one})
    assert joined(entries(original, 0)).optimizer == original.optimizer
    assert is_of(("schedule", "0"), {"1.weight"}, {"1.weight"})


def test_the_group_of_a_parameter_goes_along_with_it() -> None:
    of_one = {"state": {}, "options": {"lr": 0.1}, "group": ("Adam", "0.weight")}
    original = share("0.weight", 5)._replace(optimizer={"0.weight": of_one})
    assert joined(entries(original, 0)).optimizer == original.optimizer
    assert is_of(("group", "0"), {"1.weight"}, {"1.weight"})


def test_workers_find_what_is_theirs_in_the_entries_of_all() -> None:
    of_all = {**entries(share("0.weight", 5), 0), **entries(share("1.weight", 4), 1)}
    own = joined({key: value for key, value in of_all.items() if is_of(key, {"1.weight"}, {"1.weight"})})
    assert own.weights.keys() == {"1.weight"}
    assert own.optimizer["1.weight"] == share("1.weight", 4).optimizer["1.weight"]
    assert own.optimizer["0.weight"]["state"] == {}  # only the options of others, which are all in one place
    assert own.lr_scheduler == {"last_epoch": 3}
    # Whoever has not the newest number of all has nothing to add, so the others' numbers count, too.
    assert own.versions == [{"newest": 5, "older": {}}, *share("1.weight", 4).versions]


def test_a_borrower_of_a_tied_parameter_takes_its_weight_only() -> None:
    keys = [key for key in entries(share("0.weight", 5), 0) if is_of(key, {"0.weight"}, ())]
    assert keys == [
        ("model", "0.weight"),
        ("formats", "0"),
        ("options", "0"),
        ("loss", "center"),
        ("lr_scheduler",),
        ("lr_scheduler_kind",),
        ("versions", "0", "newest"),
    ]
