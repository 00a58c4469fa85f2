import json
from pathlib import Path
from typing import Any

import pytest

import lp_pipe.pipeline as pp

VGG16 = Path(__file__).parents[2] / "data" / "vgg16_graph.txt"
LAYER = {"name": "a", "forward_s": 1, "backward_s": 2, "activation_bytes": 3, "parameter_bytes": 4}


def layer(name: str, **more: Any) -> dict[str, Any]:
    return {**LAYER, "name": name, **more}


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    layers = (pp.LayerProfile("a", 0.1, 0.2, 3, 4), pp.LayerProfile("b", 1e-7, 0.5, 0, 0, 0.125, 0.01, 0.02, 99))
    for profile in (pp.Profile(layers), pp.Profile(layers, edges=(("a", "b"),))):
        profile.save(tmp_path / "profile.json")
        assert pp.Profile.load(tmp_path / "profile.json") == profile
    assert layers[1].backward_input_s == 0.375
    assert layers[0].backward_input_s is None


def test_a_file_from_before_spreads_and_peaks_were_measured_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"layers": [LAYER]}))
    assert pp.Profile.load(tmp_path / "old.json").layers == (pp.LayerProfile("a", 1, 2, 3, 4),)


def test_layers_are_ordered_by_who_reads_whom() -> None:
    layers = tuple(pp.LayerProfile(name, 1, 1, 1, 1) for name in "abc")
    assert pp.Profile(layers, edges=(("c", "a"), ("a", "b"))).order() == [2, 0, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "layers is missing"),
        ({"layers": []}, "layers"),
        ({"layers": 3}, "layers: .*3"),
        ({"layers": [3]}, r"layers\[0\]: .*3"),
        ({"layers": [layer("a"), {"name": "b"}]}, r"layers\[1\]: forward_s is missing"),
        ({"layers": [layer("a", forward_s=-1)]}, r"layers\[0\].forward_s \(layer 'a'\): .*-1"),
        ({"layers": [layer("a", backward_s=None)]}, r"layers\[0\].backward_s \(layer 'a'\): .*None"),
        (
            {"layers": [layer("a", parameter_bytes="1 MB")]},
            r"parameter_bytes \(layer 'a'\): .*'1 MB'",
        ),
        ({"layers": [layer("a", forward_s=10**400)]}, r"layers\[0\].forward_s \(layer 'a'\): .*10+"),
        ({"layers": [layer("a", forward_s=1e300)]}, r"layers\[0\].forward_s \(layer 'a'\): 1e\+300 is too large"),
        ({"layers": [layer("a", peak_bytes=-1)]}, r"layers\[0\].peak_bytes \(layer 'a'\): .*-1"),
        ({"layers": [layer("a", flops=-1)]}, r"layers\[0\].flops \(layer 'a'\): .*-1"),
        ({"layers": [layer("a", stash_bytes=-1)]}, r"layers\[0\].stash_bytes \(layer 'a'\): .*-1"),
        ({"layers": [layer("a", forward_spread_s="x")]}, r"forward_spread_s \(layer 'a'\): .*'x'"),
        ({"layers": [layer("a", speed=1)]}, r"layers\[0\]: .*'speed'"),
        ({"layers": [layer("a", backward_weight_s=3)]}, "more than backward_s"),
        ({"layers": [layer("a"), layer("a")]}, r"layers\[1\].name: 'a' is taken"),
        ({"layers": [layer("a")], "edges": [["a", "z"]]}, r"edges\[0\]: .*'z'"),
        ({"layers": [layer("a")], "edges": ["a"]}, "edges: a list"),
        ({"layers": [layer("a"), layer("b")], "edges": [["a", "b"], ["b", "a"]]}, "edges: a, b wait for each other"),
    ],
)
def test_a_bad_file_is_one_error_with_file_and_field(content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(pp.PartitionError, match=f"bad.json: .*{said}"):
        pp.Profile.load(path)


def test_a_file_that_is_no_json_or_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"layers":')
    with pytest.raises(pp.PartitionError, match=r"bad.json: not JSON: .*line 1"):
        pp.Profile.load(tmp_path / "bad.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(pp.PartitionError, match=r"deep.json: not JSON: .*recursion"):
        pp.Profile.load(tmp_path / "deep.json")
    with pytest.raises(pp.PartitionError, match=r"cannot read .*absent.json: No such file"):
        pp.Profile.load(tmp_path / "absent.json")


def test_pipedreams_published_profile_is_read_in_seconds_and_bytes() -> None:
    profile = pp.Profile.from_pipedream(VGG16)
    assert [each.name for each in profile.layers] == [f"node{number}" for number in range(2, 42)]  # node1 is the input
    assert profile.layers[9].forward_s == pytest.approx(0.002211)  # node11, a MaxPool2d
    assert profile.layers[9].backward_s == pytest.approx(0.002788)
    assert profile.layers[9].activation_bytes == 205520896
    assert profile.layers[10].parameter_bytes == 1180672
    assert ("node32", "node34") in (profile.edges or ())


def test_a_graph_is_written_as_pipedream_does(tmp_path: Path) -> None:
    profile = pp.Profile.from_pipedream(VGG16)
    profile.to_pipedream(tmp_path / "graph.txt")
    again = pp.Profile.from_pipedream(tmp_path / "graph.txt")
    assert [vars(each) for each in again.layers] == [pytest.approx(vars(each)) for each in profile.layers]
    assert again.links == profile.links


def test_layers_of_any_name_are_written_or_refused(tmp_path: Path) -> None:
    names = "InputProjection", "__getitem__"
    profile = pp.Profile(tuple(pp.LayerProfile(name, 1.0, 2.0, 3.0, 4.0) for name in names))
    profile.to_pipedream(tmp_path / "graph.txt")
    assert {each.name for each in pp.Profile.from_pipedream(tmp_path / "graph.txt").layers} == {*names}
    for name in ("a -- b", "a\nb", "\ta"):
        with pytest.raises(pp.PartitionError, match=r"graph.txt: the layer's name .* cannot be written"):
            pp.Profile((pp.LayerProfile(name, 1.0, 2.0, 3.0, 4.0),)).to_pipedream(tmp_path / "graph.txt")


def node(name: str, description: str = "Linear", size: str = "1.0") -> str:
    sizes = f"activation_size={size}, parameter_size=0.0"
    return f"{name} -- {description} -- forward_compute_time=1.0, backward_compute_time=2.0, {sizes}\n"


def test_lists_of_sizes_are_summed_and_what_nobody_uses_is_dropped(tmp_path: Path) -> None:
    text = node("node1", "Input0") + node("node2", size="[1.0; 2.5]") + node("node3", "__getitem__(0)")
    text += node("node4", "__getitem__(1)") + node("node5").replace("\n", " -- stage_id=0\n")
    (tmp_path / "graph.txt").write_text(
        text + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode2 -- node4\n\tnode4 -- node5\n"
    )
    profile = pp.Profile.from_pipedream(tmp_path / "graph.txt")
    assert [each.name for each in profile.layers] == ["node2", "node4", "node5"]
    assert profile.layers[0].activation_bytes == 3.5
    assert profile.edges == (("node2", "node4"), ("node4", "node5"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1\n", "line 1: a node is written"),
        (node("a") + node("a"), "line 2: node 'a'"),
        (node("a") + node("b", size="many"), "line 2: activation_size: .*'many'"),
        (node("a").replace("forward_compute_time=1.0, ", ""), "line 1: forward_compute_time is missing"),
        (node("a").replace("=2.0", "=-2.0"), "line 1: backward_compute_time: .*-2.0"),
        (node("a") + "\ta\n", "line 2: 'a'"),
        (node("a") + "\ta -- z\n", "line 2: edge a -- z.*'z'"),
        ("", "layers"),
    ],
)
def test_a_bad_graph_is_one_error_with_file_and_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(text)
    with pytest.raises(pp.PartitionError, match=f"graph.txt.*{said}"):
        pp.Profile.from_pipedream(tmp_path / "graph.txt")
