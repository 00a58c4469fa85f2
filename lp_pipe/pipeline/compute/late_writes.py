"""Buffers and parameters to which backwards write: what one process does between two forwards comes later here.

A layer that torch.utils.checkpoint runs again in the backward counts its statistics once more, and computes with them:

    one process   forward 0   again 0   forward 1   again 1
    a pipeline    forward 0   forward 1   again 0   again 1      forward 1 has not seen what again 0 writes

A hook of a parameter that updates it there and then (an optimizer in the backward) does so too late for the forwards
that are done.
"""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.buffers import Place
from lp_pipe.private_torch import buffers_of, is_batch_norm, version_of, versions_of

_State = dict[Place, tuple[Tensor | None, int]]  # with their versions


class LateWrites:
    """Told of every forward and backward of a stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [module for module in modules if buffers_of(module)]
        self._parameters = {
            parameter: f"parameter {name!r} of {type(module).__name__}"
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._before: _State = {}
        self._versions: list[int] = []
        self._outstanding = {"backward": 0, "weights": 0}  # of how many forwards

    def forget(self) -> None:
        """No forward waits for its backward."""
        self._outstanding = dict.fromkeys(self._outstanding, 0)

    def after_forward(self) -> None:
        """One more waits for its backward; what buffers hold now is what it has left."""
        for part in self._outstanding:
            self._outstanding[part] += 1
        self._before = _state_of(self.modules)
        self._versions = self._versions_now()

    def after_backward(self, counted: Collection[Place]) -> None:
        """counted: what forwards write to, beside the statistics of BatchNorms.

        Raises:
            PipelineError: it has written to what later forwards have used already.
        """
        self._check("backward", counted)

    def after_weights(self, counted: Collection[Place]) -> None:
        """As `after_backward`, for the second part of one."""
        self._check("weights", counted)

    def _check(self, part: str, counted: Collection[Place]) -> None:
        are_later_forwards_done = self._outstanding[part] > 1
        self._outstanding[part] -= 1
        self._check_parameters(are_later_forwards_done)
        if not self.modules:
            return
        now = _state_of(self.modules)
        written = [place for place, state in now.items() if not _same(state, self._before.get(place))]
        self._before = now
        for module, name in written if are_later_forwards_done else ():
            if is_batch_norm(module) or ((module, name) in counted and _is_no_counter(buffers_of(module)[name])):
                what = "statistics" if is_batch_norm(module) else f"buffer {name!r}"
                raise PipelineError(
                    f"a backward changes {what} of {type(module).__name__}, as forwards do, but comes after those of "
                    "later micro-batches, unlike in one process: where torch.utils.checkpoint runs a layer again, take "
                    "that out and choose the layer by add_pipeline(recompute=...), which counts each micro-batch once"
                )

    def _check_parameters(self, are_later_forwards_done: bool) -> None:
        before, self._versions = self._versions, self._versions_now()
        if before == self._versions or not are_later_forwards_done:
            return
        changes = zip(self._parameters.values(), before, self._versions, strict=True)
        name = next(name for name, version, now in changes if version != now)
        raise PipelineError(
            f"a backward changes {name}, but comes after the forwards of later micro-batches, which in one process "
            "would have had the new weights: where a hook updates it (an optimizer in the backward), leave that to the "
            "model's optimizer, or train with microbatches=1"
        )

    def _versions_now(self) -> list[int]:
        return versions_of(self._parameters)


def _state_of(modules: Sequence[nn.Module]) -> _State:
    # Kernels of batch norm do not count what they write, but num_batches_tracked is beside it.
    return {
        (module, name): (buffer, version_of(buffer) if buffer is not None else 0)
        for module in modules
        for name, buffer in buffers_of(module).items()
    }


def _same(now: tuple[Tensor | None, int], before: tuple[Tensor | None, int] | None) -> bool:
    return before is not None and now[0] is before[0] and now[1] == before[1]


def _is_no_counter(buffer: Tensor | None) -> bool:
    """Counts add up in any order."""
    return buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
