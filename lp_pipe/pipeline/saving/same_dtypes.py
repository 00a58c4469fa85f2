"""Whether a checkpoint's parameters are of the dtypes of the model that is to go on from it."""

from collections.abc import Mapping

from torch import Tensor

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving.same_optimizer import WEIGHTS_ALONE


def refuse_other_dtypes(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """An optimizer's state has the dtype of its parameter; weights alone are converted by load_state_dict().

    Raises:
        PipelineError: names a parameter, both dtypes, and says how to take the weights alone.
    """
    for name, parameter in parameters.items():
        if name in saved and saved[name].dtype != parameter.dtype:  # a hook of state_dict may save other names
            raise PipelineError(
                f"the checkpoint is of a model of another dtype: {name} is {saved[name].dtype} there and "
                f"{parameter.dtype} here; {WEIGHTS_ALONE}"
            )
