"""A backward in two parts: now the gradients of a stage's inputs, later those of its parameters.

A stage's graph, its output on top. What leads to the inputs is part 1. Where that also leads to parameters there is a
*joint*, which keeps the gradient that arrives in part 1; part 2 starts from there and goes down to the parameters only:

        output
          |
        Linear  ----- weight, bias      part 1: output -> Linear -> ReLU -> Linear -> entry
          |                             part 2: each Linear -> its weight and bias
        ReLU
          |
        Linear  ----- weight, bias
          |
        entry

In both parts autograd runs a node as it does in one backward, in the same order and with the same gradients, but asks
for some of its results only. Source: torch.distributed.pipelining's _backward.py (2.13), where joints are called
intermediates. Unlike there, autograd itself adds to a parameter's gradient, so that its layout and hooks are those of a
plain backward; users' hooks on activations do not change a gradient twice; parameters that lead to an output past the
inputs are found; and outputs may be views. Nodes that cannot be run in parts leave nothing to part 2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lp_pipe.pipeline.compute.activation_meter import Held, held_for_later
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.private_torch import run_backward

Root = Tensor | GradientEdge  # a tensor, or its place in the graph
Roots = Sequence[tuple[Root, Tensor | None]]  # with their gradients (None for a loss)
_PLAIN = (Tensor, GradientEdge)
# In torch 2.13, on channels_last activations, it crashes where it is not asked for the input's gradient as well.
_NEVER_IN_PARTS = {"NativeGroupNormBackward0"}
_Arrived = tuple[Tensor | None, ...]  # a gradient for each output of a node; None where none has arrived


@dataclass
class _Group:
    """Parameters and where their gradients start. Those that share a joint, or a node on the way, are in one group."""

    leaves: list[Tensor] = field(default_factory=list)
    joints: list[Node] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)  # outputs that lead here, and not to the inputs


class SplitBackward:
    """One micro-batch's backward on one stage: construction is part 1, `accumulate` is part 2.

    roots: outputs. entry: a leaf below all inputs that want a gradient.
    What part 2 needs of the graph, and the activations in it, live as long as this object.
    """

    def __init__(self, roots: Roots, entry: Tensor) -> None:
        starts = [edge_of(root) for root, _ in roots]
        groups = _find_groups([start.node for start in starts], get_gradient_edge(entry).node)
        self._groups = [group for group in groups if not _runs_whole(group)]
        at_once = [leaf for group in groups if _runs_whole(group) for leaf in group.leaves]
        self._roots = {
            index: (starts[index], _gradient_of(*roots[index])) for group in self._groups for index in group.roots
        }
        self._arrived: dict[Node, _Arrived] = {}
        handles = [_keep(joint, self._arrived) for group in self._groups for joint in group.joints]
        try:
            gradients = [_gradient_of(root, gradient) for root, gradient in roots]
            run_backward(starts, gradients, retain_graph=True, inputs=(entry, *at_once))
        finally:
            _remove(handles)
        waiting = [gradient for gradients in self._arrived.values() for gradient in gradients]
        self._held = held_for_later([*waiting, *(gradient for _, gradient in self._roots.values())])

    def accumulate(self, more: Roots = ()) -> None:
        """Add to the parameters' gradients, once. more: parameters, and what other stages have found for theirs."""
        for group in self._groups:
            self._accumulate(group, [(leaf, grad) for leaf, grad in more if _is_among(leaf, group.leaves)])
        all_leaves = [leaf for group in self._groups for leaf in group.leaves]
        backward([(leaf, grad) for leaf, grad in more if not _is_among(leaf, all_leaves)])

    def _accumulate(self, group: _Group, more: Roots) -> None:
        starts = [self._roots[index] for index in group.roots]
        starts += [(edge_of(leaf), grad) for leaf, grad in more if grad is not None]
        for joint in group.joints:
            arrived = enumerate(self._arrived[joint])
            starts += [(GradientEdge(joint, index), gradient) for index, gradient in arrived if gradient is not None]
        if not starts:
            return  # the loss does not depend on these parameters
        # Part 1 has counted all that comes to a joint: from other joints, and what users' hooks make of it.
        handles = [joint.register_prehook(_giving(self._arrived[joint])) for joint in group.joints]
        edges, gradients = zip(*starts, strict=True)
        try:
            # Retained, because the way from one joint of a group to another may pass through other groups' joints.
            run_backward(edges, gradients, retain_graph=True, inputs=tuple(group.leaves))
        finally:
            _remove(handles)


def backward(roots: Roots) -> None:
    """torch.autograd.backward, also from nothing."""
    if not roots:
        return
    if not all([type(root) in _PLAIN for root, _ in roots]):
        tensors, gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, gradients)
        return
    run_backward([root for root, _ in roots], [_gradient_of(*root) for root in roots])


def backward_later(roots: Roots, held: Sequence[Held], more: Roots) -> None:
    """held: what the roots' gradients count as until then."""
    backward([*roots, *more])


def edge_of(root: Root) -> GradientEdge:
    """torch's get_gradient_edge, without its checks where there is nothing to find or make."""
    if not isinstance(root, Tensor):
        return root
    node = root.grad_fn
    # Of leaves, and of functions written in Python, torch has to.
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(root)
    return GradientEdge(node, root.output_nr)


def edges_of(value: Any) -> list[GradientEdge]:
    """Of the tensors in it that want a gradient."""
    return [edge_of(tensor) for tensor in tensors_of(value) if tensor.requires_grad]


def leaves_behind(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """Those that a backward from these nodes gives gradients to."""
    for node in _graph_below(nodes):
        if _is_leaf(node):
            yield node.variable  # type: ignore[attr-defined]


def _runs_whole(group: _Group) -> bool:
    """Whether its parameters get their gradients in part 1."""
    return any(joint.name() in _NEVER_IN_PARTS for joint in group.joints)


def _is_among(leaf: Root, leaves: Sequence[Tensor]) -> bool:
    return any(leaf is other for other in leaves)


def _gradient_of(root: Root, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    assert isinstance(root, Tensor), "only a loss comes without a gradient"
    return torch.ones_like(root)


def _keep(joint: Node, arrived: dict[Node, _Arrived]) -> RemovableHandle:
    def keep(gradients: _Arrived) -> None:
        arrived[joint] = gradients

    return joint.register_prehook(keep)


def _giving(gradients: _Arrived) -> Callable[[_Arrived], _Arrived]:
    return lambda _: gradients


def _remove(handles: Sequence[RemovableHandle]) -> None:
    """Else a node and what its hook holds would keep each other alive, unseen by Python's collector."""
    for handle in handles:
        handle.remove()


def _find_groups(roots: Sequence[Node], entry: Node) -> list[_Group]:
    graph = _graph_below(roots)
    above_entry: set[Node] = set()
    weight_side: set[Node] = set()
    labels = _Labels()
    leaves: list[Node] = []
    joints: list[Node] = []
    for node, children in graph.items():
        below = [child for child in children if child in weight_side]
        if node is entry or not above_entry.isdisjoint(children):
            above_entry.add(node)
            if below:
                joints.append(node)
        elif below:
            weight_side.add(node)
        elif _is_leaf(node):
            weight_side.add(node)
            leaves.append(node)
        if below:
            labels.join(node, below)
    groups: dict[Node, _Group] = {}
    for node in leaves:
        groups.setdefault(labels.of(node), _Group()).leaves.append(node.variable)  # type: ignore[attr-defined]
    for node in joints:
        groups[labels.of(node)].joints.append(node)
    for index, root in enumerate(roots):
        if root in weight_side:
            groups[labels.of(root)].roots.append(index)
    return list(groups.values())


def _graph_below(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """All nodes below the roots with their children, each after its children. Not recursive: graphs are deep."""
    graph: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for root in roots:
        path = [] if root in seen else [_place(root)]
        seen.add(root)
        while path:
            node, children, rest = path[-1]
            for child in rest:
                if child not in seen:
                    seen.add(child)
                    path.append(_place(child))
                    break
            else:
                path.pop()
                graph[node] = children
    return graph


def _place(node: Node) -> tuple[Node, list[Node], Iterator[Node]]:
    """On the path: a node, its children, and those of them that are still to be looked at."""
    children = [child for child, _ in node.next_functions if child is not None]
    return node, children, iter(children)


def _is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


class _Labels:
    """Nodes that were joined, directly or by way of others, have the same label (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        while (parent := self._parents.get(node, node)) is not node:
            self._parents[node] = self._parents.get(parent, parent)
            node = parent
        return node

    def join(self, node: Node, others: Sequence[Node]) -> None:
        for other in others:
            self._parents[self.of(other)] = self.of(node)
