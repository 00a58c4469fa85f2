"""A backward in two parts: first the gradients of a stage's inputs, later those of its parameters.

A stage's graph, its output on top. What leads to the inputs is part 1. A node that also leads to parameters is a
*joint*, which keeps the gradient that arrives in part 1. Part 2 starts there and goes down to the parameters only:

        output
          |
        Linear  ----- weight, bias      part 1: output -> Linear -> ReLU -> Linear -> entry
          |                             part 2: each Linear -> its weight and bias
        ReLU
          |
        Linear  ----- weight, bias
          |
        entry

In both parts a node of torch's own runs as in one backward, with the same gradients, but is asked for some of its
results only. A function written in Python or in an extension (torch.autograd.Function) cannot be asked for some. It
runs once, in part 1, and part 2 starts from what it has returned for parameters. So hooks of activations, and backwards
that change or free something, act once. Part 2 calls a joint directly, because autograd would run its hooks again.

Source: torch.distributed.pipelining's _backward.py (2.13), where joints are called intermediates. Unlike there,
    autograd itself adds to a parameter's gradient, so that its layout and hooks are those of a plain backward;
    parameters that lead to an output past the inputs are found; and outputs may be views.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lp_pipe.errors import PipelineError, add_note
from lp_pipe.pipeline.compute.activation_meter import CountedTensor, held_for_later
from lp_pipe.pipeline.layers.message import tensors_of
from lp_pipe.private_torch import run_backward, sequence_number_of, version_of

Root = Tensor | GradientEdge  # a tensor, or its place in the graph
Roots = Sequence[tuple[Root, Tensor | None]]  # each with its gradient; None for a loss
_PLAIN = (Tensor, GradientEdge)
# torch 2.13 crashes on channels_last activations if this node is not asked for the input's gradient as well.
_NEVER_IN_PARTS = {"NativeGroupNormBackward0"}
_OF_EXTENSIONS = "torch::autograd::CppNode"  # the name of a torch::autograd::Function in the graph
_TOO_LATE = (
    "in the second part of a split backward, which comes after the backwards of all earlier layers: if one of them "
    "changes or frees a tensor that this layer has saved, use a schedule that does not split backwards, such as '1f1b'"
)
_Gradients = tuple[Tensor | None, ...]  # for each output or input of a node; None without a gradient


class _JointGradients(NamedTuple):
    """The gradients that part 1 keeps of a joint.

    gradients: of a node of torch's own those that arrived, for each output; of a user's function those that it has
        returned, for each input.
    versions: how often each had been written to by then.
    """

    gradients: _Gradients
    versions: list[int]


@dataclass
class _Group:
    """Parameters and the nodes at which their gradients start.

    Parameters that share a joint, or a node on the way, are in one group.

    joints: in the order in which a backward runs them, each with the edges that lead to the parameters, by their index
        among the joint's inputs.
    roots: outputs that lead to the parameters, and not to the inputs.
    runs_whole: whether the parameters get their gradients in part 1.
    """

    leaves: list[Tensor] = field(default_factory=list)
    joints: dict[Node, dict[int, GradientEdge]] = field(default_factory=dict)
    roots: list[int] = field(default_factory=list)
    runs_whole: bool = False

    def edges_of_own(self) -> list[GradientEdge]:
        """Return the edges to the parameters from joints that are torch's own."""
        own = (edges for joint, edges in self.joints.items() if not _is_users(joint))
        return [edge for edges in own for edge in edges.values()]


class SplitBackward:
    """The backward of one micro-batch on one stage: the constructor runs part 1, `accumulate` part 2.

    The part of the graph that part 2 needs, and the activations in it, live as long as this object.

    roots: outputs.
    entry: a leaf below all inputs that require a gradient.
    """

    def __init__(self, roots: Roots, entry: Tensor) -> None:
        self._entry = entry
        starts = [edge_of(root) for root, _ in roots]
        groups = _find_groups([start.node for start in starts], get_gradient_edge(entry).node)
        self._groups = [group for group in groups if not group.runs_whole]
        at_once = [leaf for group in groups if group.runs_whole for leaf in group.leaves]
        self._roots = {
            index: (starts[index], _gradient_of(*roots[index])) for group in self._groups for index in group.roots
        }
        self._kept: dict[Node, _JointGradients] = {}
        handles = [_keep(joint, self._kept) for group in self._groups for joint in group.joints]
        try:
            gradients = [_gradient_of(root, gradient) for root, gradient in roots]
            run_backward(starts, gradients, retain_graph=True, inputs=(entry, *at_once))
        finally:
            for handle in handles:
                # Otherwise a node and its hook would keep each other alive, in a cycle that Python's collector does not
                # see.
                handle.remove()
        waiting = [gradient for kept in self._kept.values() for gradient in kept.gradients]
        self._held = held_for_later([*waiting, *(gradient for _, gradient in self._roots.values())])

    def accumulate(self, more: Roots = ()) -> None:
        """Add to the parameters' gradients; to be called once.

        more: parameters, with gradients that other stages have found for them.

        Raises:
            PipelineError: the backward of an earlier layer has written to a gradient that this part needs.
        """
        to_parameters = [edge for group in self._groups for edge in group.edges_of_own()]
        if to_parameters:
            # The call is made in a run of autograd's engine, so that a joint computes what leads to these edges only.
            calling = _calling(self._entry, partial(self._accumulate_groups, more))
            run_backward([calling], [self._entry.detach()], inputs=(self._entry, *to_parameters))
        else:
            self._accumulate_groups(more)
        all_leaves = [leaf for group in self._groups for leaf in group.leaves]
        backward([(leaf, grad) for leaf, grad in more if not _is_among(leaf, all_leaves)])

    def _accumulate_groups(self, more: Roots) -> None:
        for group in self._groups:
            self._accumulate(group, [(leaf, grad) for leaf, grad in more if _is_among(leaf, group.leaves)])

    def _accumulate(self, group: _Group, more: Roots) -> None:
        starts = [self._roots[index] for index in group.roots]
        starts += [(edge_of(leaf), grad) for leaf, grad in more if grad is not None]
        for joint, edges in group.joints.items():
            if joint in self._kept:
                results = _results_of(joint, self._kept[joint])
                starts += [(edge, gradient) for i, edge in edges.items() if (gradient := results[i]) is not None]
        if starts:  # without starts the loss does not depend on these parameters
            edges_, gradients = zip(*starts, strict=True)
            run_backward(edges_, gradients, retain_graph=True, inputs=tuple(group.leaves))


def backward(roots: Roots) -> None:
    """Run torch.autograd.backward; do nothing without roots."""
    if not roots:
        return
    if not all([type(root) in _PLAIN for root, _ in roots]):
        tensors, gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, gradients)
        return
    run_backward([root for root, _ in roots], [_gradient_of(*root) for root in roots])


def backward_later(roots: Roots, held: Sequence[CountedTensor], more: Roots) -> None:
    """Run the backward that was deferred as a whole.

    held: the objects that count the roots' gradients until now.
    """
    backward([*roots, *more])


def edge_of(root: Root) -> GradientEdge:
    """Return torch's get_gradient_edge of the root, without its checks if the root has a node."""
    if not isinstance(root, Tensor):
        return root
    node = root.grad_fn
    # For leaves and functions written in Python torch has to find or make the node.
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(root)
    return GradientEdge(node, root.output_nr)


def edges_of(value: Any) -> list[GradientEdge]:
    """Return the places in the graph of a value's tensors that require a gradient."""
    return [edge_of(tensor) for tensor in tensors_of(value) if tensor.requires_grad]


def leaves_behind(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """Yield the leaves to which a backward from these nodes gives gradients."""
    for node in _graph_below(nodes):
        if _is_leaf(node):
            yield node.variable  # type: ignore[attr-defined]


def _is_among(leaf: Root, leaves: Sequence[Tensor]) -> bool:
    return any(leaf is other for other in leaves)


def _gradient_of(root: Root, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    assert isinstance(root, Tensor), "only a loss comes without a gradient"
    return torch.ones_like(root)


def _is_users(node: Node) -> bool:
    """Return whether the node is a torch.autograd.Function, of Python or of an extension."""
    return isinstance(node, BackwardCFunction) or node.name().startswith(_OF_EXTENSIONS)


def _keep(joint: Node, kept: dict[Node, _JointGradients]) -> RemovableHandle:
    def keep(gradients: _Gradients, *_: Any) -> None:
        kept[joint] = _JointGradients(gradients, _versions(gradients))

    return joint.register_hook(keep) if _is_users(joint) else joint.register_prehook(keep)


def _results_of(joint: Node, kept: _JointGradients) -> _Gradients:
    """Return the gradients of the joint's inputs that the running engine is asked for."""
    if _versions(kept.gradients) != kept.versions:
        raise PipelineError(
            f"a backward has changed in place a gradient that {joint.name()} needs for its parameters: an earlier "
            "layer shares the gradient, and its hook or torch.autograd.Function has written to it (g.mul_(), "
            "g.add_()). Let it return a new tensor (g * 0.5), or use a schedule that does not split backwards, such "
            "as '1f1b'"
        )
    if _is_users(joint):
        return kept.gradients
    try:
        return joint(*kept.gradients)  # type: ignore[operator,no-any-return]
    except RuntimeError as error:
        add_note(error, _TOO_LATE)
        raise


def _versions(gradients: _Gradients) -> list[int]:
    return [version_of(gradient) for gradient in gradients if gradient is not None]


class _Calling(torch.autograd.Function):
    """A node that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        ctx.function()
        return None, None


# Function.apply first looks for functorch's transforms, which no stage uses.
_calling: Callable[[Tensor, Callable[[], None]], Tensor] = super(torch.autograd.Function, _Calling).apply


def _find_groups(roots: Sequence[Node], entry: Node) -> list[_Group]:
    graph = _graph_below(roots)
    above_entry: set[Node] = set()
    weight_side: set[Node] = set()
    below_joints: set[Node] = set()
    below_weights: set[Node] = set()
    labels = _Labels()
    leaves: list[Node] = []
    joints: list[Node] = []
    for node, children in graph.items():
        below = [child for child in children if child in weight_side]
        if node is entry or not above_entry.isdisjoint(children):
            above_entry.add(node)
            if below:
                joints.append(node)
                below_joints.update(below)
        elif below:
            weight_side.add(node)
            below_weights.update(below)
        elif _is_leaf(node):
            weight_side.add(node)
            leaves.append(node)
        if below:
            labels.join(node, below)
    groups: dict[Node, _Group] = {}
    for node in leaves:
        groups.setdefault(labels.of(node), _Group()).leaves.append(node.variable)  # type: ignore[attr-defined]
    # The engine runs nodes in the reverse order of the forward.
    for node in sorted(reversed(joints), key=sequence_number_of, reverse=True):
        group = groups[labels.of(node)]
        edges = enumerate(node.next_functions)
        group.joints[node] = {i: GradientEdge(child, nr) for i, (child, nr) in edges if child in weight_side}
        group.runs_whole |= node.name() in _NEVER_IN_PARTS
    for node in below_joints & below_weights:
        # Part 2 would add the gradients from the joints first, and only the order of one backward has its bits.
        groups[labels.of(node)].runs_whole |= sum(children.count(node) for children in graph.values()) > 2
    for index, root in enumerate(roots):
        if root in weight_side:
            groups[labels.of(root)].roots.append(index)
    return list(groups.values())


def _graph_below(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return all nodes below the roots with their children, each after its children.

    It is not recursive, because graphs are deep.
    """
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
    """Return an entry of the path: the node, its children, and an iterator over the children still to be visited."""
    children = [child for child, _ in node.next_functions if child is not None]
    return node, children, iter(children)


def _is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


class _Labels:
    """Labels of nodes: those that were joined, directly or through others, have the same label (union-find)."""

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
