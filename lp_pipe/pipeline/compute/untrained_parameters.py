"""What a forward and its loss have used and nobody would train.

Stages train copies, and know what modules have registered. A loss that adds a penalty of `net.parameters()`, or a head
that keeps the embedding in a list, uses the user's own modules, or a second copy: gradients would arrive there, and no
optimizer.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.split_backward import Root, edge_of, leaves_behind
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import tensors_of

_BY_ITS_NAME = (
    ". Or it is the layer's own, but not reached by the name under which it is registered (a list that has it, too, a "
    "view that the constructor has made): an asynchronous schedule puts older weights there"
)


def refuse_untrained(
    stages: Collection[Stage], outputs: Sequence[Root], loss: Tensor | None, *, is_asynchronous: bool = False
) -> None:
    """Look through the graph of one forward, and of the loss where there is one; takes about a microsecond a node.

    stages: those of this worker. outputs: what one of them has made. is_asynchronous: older weights may be in the
    places of parameters.

    Raises:
        PipelineError: a parameter is in it that is none of the stages'.
    """
    own = {id(p) for stage in stages for layer in stage.layers for p in layer.parameters()}
    used = _parameter_behind(outputs, own)
    if used is not None:
        raise PipelineError(
            f"a layer has used a parameter {_kind(used)} that it has not registered: one of another layer, or of a "
            "module kept in a list, a closure or a global, which no stage would train. Let the layers that use it have "
            "it as their own (one object in several layers is tied, as are the names in pp.Model(tied=…)), or give it "
            f"requires_grad_(False){_BY_ITS_NAME if is_asynchronous else ''}"
        )
    used = _parameter_behind([loss], own) if loss is not None and loss.requires_grad else None
    if used is not None:
        raise PipelineError(
            f"the loss has used a parameter {_kind(used)}, which no stage would train: stages train copies of the "
            "model's modules, and the loss has only the output of the last layer. Let the layer that has the parameter "
            "return what the loss needs of it (a penalty of all weights is the optimizer's weight_decay), or give it "
            "requires_grad_(False)"
        )


def refuse_detached(loss: Tensor, output: Any) -> None:
    """Of one micro-batch; the output is the last layer's.

    Raises:
        PipelineError: the loss has no gradient; says whether the output has one.
    """
    if loss.requires_grad:
        return
    if not torch.is_grad_enabled():
        raise PipelineError(
            "the loss has no gradient, because the script has called torch.set_grad_enabled(False), which holds in its "
            "nodes: call torch.set_grad_enabled(True) before launch(), or in the function of launch(setup=...)"
        )
    if any(tensor.requires_grad for tensor in tensors_of(output)):
        raise PipelineError(
            "the loss has no gradient, so that nothing would be trained, although the last layer's output has one: the "
            "loss function has detached it (.detach(), .item(), torch.no_grad()), or does not use it"
        )
    raise PipelineError(
        "the loss has no gradient, so that nothing would be trained, because the last layer's output has none: all "
        "parameters are frozen (requires_grad_(False)), or a layer detaches what it returns (.detach(), "
        "torch.no_grad()) and none behind it is trained. What is not to be trained is run by evaluate()"
    )


def _parameter_behind(roots: Sequence[Root], own: Collection[int]) -> nn.Parameter | None:
    leaves = leaves_behind([edge_of(root).node for root in roots])
    return next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in own), None)


def _kind(parameter: nn.Parameter) -> str:
    return f"of shape {list(parameter.shape)}"
