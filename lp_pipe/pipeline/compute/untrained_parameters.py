"""Refuse forwards and losses that use parameters which no stage trains.

Stages train copies, and know the parameters that modules have registered. A loss that adds a penalty of
`net.parameters()`, or a head that keeps the embedding in a list, uses the user's own modules or a second copy. Their
gradients would reach no optimizer.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.split_backward import Root, edge_of, leaves_behind
from lp_pipe.pipeline.compute.stage import Stage

_BY_ITS_NAME = (
    ". Or it is registered, but the layer reaches it in another way (a list, a view made by the constructor): an "
    "asynchronous schedule replaces registered parameters by older weights"
)


def refuse_untrained(
    stages: Collection[Stage], outputs: Sequence[Root], loss: Tensor | None, *, is_asynchronous: bool = False
) -> None:
    """Search the graph of one forward, and of the loss if given, for foreign parameters: about a microsecond a node.

    stages: all stages of this worker.
    outputs: the outputs of one of them.
    is_asynchronous: whether older weights may stand in place of parameters.

    Raises:
        PipelineError: the graph has a parameter that is none of the stages'.
    """
    own = {id(p) for stage in stages for layer in stage.layers for p in layer.parameters()}
    used = _parameter_behind(outputs, own)
    if used is not None:
        raise PipelineError(
            f"a layer has used a parameter {_kind(used)} that it has not registered and that no stage would train: "
            "one of another layer, or of a module kept in a list, a closure or a global. Register it in each layer "
            "that uses it (one object in several layers is tied, as are the names in pp.Model(tied=…)), or give it "
            f"requires_grad_(False){_BY_ITS_NAME if is_asynchronous else ''}"
        )
    used = _parameter_behind([loss], own) if loss is not None and loss.requires_grad else None
    if used is not None:
        raise PipelineError(
            f"the loss has used a parameter {_kind(used)}, which no stage would train: stages train copies of the "
            "model's modules, and the loss receives only the output of the last layer. Let the layer that has the "
            "parameter return what the loss needs of it (a penalty of all weights is the optimizer's weight_decay), "
            "or give it requires_grad_(False)"
        )


def refuse_detached(loss: Tensor, *, has_output_gradient: bool) -> None:
    """Refuse a loss without a gradient. has_output_gradient: whether the last layer's output has one.

    Raises:
        PipelineError: the error says whether the output has a gradient.
    """
    if loss.requires_grad:
        return
    if not torch.is_grad_enabled():
        raise PipelineError(
            "the loss has no gradient, because the script has called torch.set_grad_enabled(False), and its nodes "
            "have the same setting: call torch.set_grad_enabled(True) before launch(), or in the function of "
            "launch(setup=...)"
        )
    if has_output_gradient:
        raise PipelineError(
            "the loss has no gradient, so nothing would be trained, although the last layer's output has one: the "
            "loss function detaches it (.detach(), .item(), torch.no_grad()) or does not use it"
        )
    raise PipelineError(
        "the loss has no gradient, so nothing would be trained, because the last layer's output has none: all "
        "parameters are frozen (requires_grad_(False)), or a layer detaches what it returns (.detach(), "
        "torch.no_grad()) and no layer behind it is trained. To run a model without training it, use evaluate()"
    )


def _parameter_behind(roots: Sequence[Root], own: Collection[int]) -> nn.Parameter | None:
    leaves = leaves_behind([edge_of(root).node for root in roots])
    return next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in own), None)


def _kind(parameter: nn.Parameter) -> str:
    return f"of shape {list(parameter.shape)}"
