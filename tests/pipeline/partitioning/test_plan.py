from pathlib import Path

import pytest

import lp_pipe.pipeline as pp


def planned() -> pp.Plan:
    layers = tuple(pp.LayerProfile(name, 1.0, 2.0, 5.0, 1.0) for name in ("stem", 'the "odd" one', "head"))
    return pp.partition(pp.Profile(layers), pp.Topology([pp.Level("device", 3, bandwidth=10.0)]))


def test_a_plan_is_saved_for_people_and_loaded(tmp_path: Path) -> None:
    plan = planned()
    assert plan.runners_up and plan.schedule == "1f1b" and plan.stages[0].recompute == "none"
    plan.save(tmp_path / "plan.toml")
    assert pp.Plan.load(tmp_path / "plan.toml") == plan
    text = (tmp_path / "plan.toml").read_text()
    assert text.startswith(f"slowest_seconds = {plan.slowest_seconds}") and '"stem",' in text


def test_a_person_may_write_stages_and_replicas_only(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        '[[stages]]\nlayers = ["a", "b"]\nreplicas = 2\n[[stages]]\nlayers = ["c"]\nreplicas = 1\n'
    )
    plan = pp.Plan.load(tmp_path / "plan.toml")
    assert plan.cuts(["a", "b", "c"]) == [2]
    assert plan.devices == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "stages is missing"),
        ("stages = []", "stages"),
        ("[[stages]]\nlayers = ['a']", r"stages\[0\]: replicas is missing"),
        ("[[stages]]\nlayers = ['a']\nreplicas = 0", r"stages\[0\]: replicas: .*0"),
        ("[[stages]]\nlayers = []\nreplicas = 1", r"stages\[0\]: layers: .*\[\]"),
        ("[[stages]]\nlayers = ['a', 'a']\nreplicas = 1", "layer 'a'"),
        ("reason = 3\n[[stages]]\nlayers = ['a']\nreplicas = 1", "reason: .*3"),
        ("slowest_seconds = -1\n[[stages]]\nlayers = ['a']\nreplicas = 1", "slowest_seconds: .*-1"),
        ("schedule = 3\n[[stages]]\nlayers = ['a']\nreplicas = 1", "schedule: .*3"),
        ("microbatches = 0\n[[stages]]\nlayers = ['a']\nreplicas = 1", "microbatches: .*0"),
        ("step_seconds = -1\n[[stages]]\nlayers = ['a']\nreplicas = 1", "step_seconds: .*-1"),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\nrecompute = 'auto'", r"stages\[0\]: recompute: .*'auto'"),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\ndevices = [-1]", r"stages\[0\]: devices: .*-1"),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\ndevices = [0, 1]", r"devices: .*1 replicas.* 2"),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\nhosts = 'h1'", r"stages\[0\]: hosts: "),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\nhosts = [-1]", r"stages\[0\]: hosts: "),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\nhosts = ['']", r"stages\[0\]: hosts: "),
        ("[[stages]]\nlayers = ['a']\nreplicas = 1\nhosts = [true]", r"stages\[0\]: hosts: "),
        ("[[stages]]\nlayers = ['a']\nreplicas = 2\nhosts = ['h1']", r"stages\[0\]: hosts: .*2 replicas.* 1"),
        ("hosts = 3\n[[stages]]\nlayers = ['a']\nreplicas = 1", "'hosts'"),
    ],
)
def test_a_bad_plan_is_one_error_with_file_and_field(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(pp.PartitionError, match=f"bad.toml: .*{said}"):
        pp.Plan.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "b"], "the plan is for another model: it has 3 layers, the model 2; the model has no layer 'c'"),
        (["a", "b", "c", "d"], "the plan has no layer 'd'"),
        (["a", "c", "b"], "stage 0 of the plan has 'b'"),
    ],
)
def test_a_plan_for_another_model_is_refused(names: list[str], said: str) -> None:
    plan = pp.Plan((pp.PlannedStage(("a", "b"), 1, 1.0), pp.PlannedStage(("c",), 1, 1.0)), 1.0)
    with pytest.raises(pp.PartitionError, match=said):
        plan.cuts(names)
