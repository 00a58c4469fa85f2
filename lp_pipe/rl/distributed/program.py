"""An experiment as a program: the same rounds as in one process, with a node for each part.

    actor/0 --- deliver ---> replay <--- learn, finish --- learner --- add_round ---> counter <--- add --- evaluator
       ^ +---- begin (weights) ----------------------------> |                                               |
                                                             +<------------------- weights ------------------+

A round of an actor is two calls: `begin` waits for the weights of the round, `deliver` says what was done, and returns
how many steps are next. The learner drives: it asks the replay node for the samples of a round, learns, and saves
checkpoints between two rounds.

An actor that dies loses nothing: the replay node knows what it has delivered, and its successor plays the episodes
again until there. If the learner, the replay node or the counter dies, the learner takes all three back to the newest
checkpoint under the name of a new generation, and the actors follow. All this has no influence on the result.
"""

import lp_pipe as lp
from lp_pipe.rl.distributed.acting import act, evaluate
from lp_pipe.rl.distributed.counter_node import ExperimentCounter
from lp_pipe.rl.distributed.inference import InferenceServer
from lp_pipe.rl.distributed.learner_node import ExperimentLearner
from lp_pipe.rl.distributed.replay_node import ExperimentReplay
from lp_pipe.rl.experiment import ExperimentConfig, Inference
from lp_pipe.rl.experiment_parts import ExperimentParts, make_environment


def make_distributed_experiment(
    experiment: ExperimentConfig, num_actors: int = 1, *, inference: Inference | None = None
) -> lp.Program:
    """Return a program with the groups learner, replay, counter, actor and evaluator; `rl.load(run.run_dir)` reads it.

    An environment is made here, to see whether all parts fit. inference: a node of that group acts for all actors.

    Raises:
        ValueError: the parts do not fit together.
    """
    if num_actors < 1:
        raise ValueError(f"make_distributed_experiment: num_actors must be at least 1, got {num_actors}")
    environments = make_environment(experiment, 0)
    parts = ExperimentParts(experiment, num_actors, environments)
    for environment in environments if isinstance(environments, list) else [environments]:
        environment.close()
    program = lp.Program("experiment")
    with program.group("replay", on_failure="restart", max_restarts=None):
        replay = program.add_node(lp.CourierNode(ExperimentReplay))
    with program.group("counter", on_failure="restart", max_restarts=None):
        counter = program.add_node(lp.CourierNode(ExperimentCounter))
    with program.group("learner", on_failure="restart", max_restarts=None):
        node = lp.CourierNode(ExperimentLearner, experiment, parts.spec, parts.options, replay, counter)
        learner = program.add_node(node)
    acting = None
    if inference is not None:
        size = inference.batch_size or num_actors
        with program.group("inference", on_failure="restart", max_restarts=None):
            server = lp.CourierNode(InferenceServer, experiment, parts.spec, learner, size, inference.timeout)
            acting = program.add_node(server)
    with program.group("actor", on_failure="restart", max_restarts=None):
        for _ in range(num_actors):
            program.add_node(lp.PyNode(act, experiment, parts.spec, replay, learner, acting))
    with program.group("evaluator", on_failure="restart", max_restarts=None):
        program.add_node(lp.PyNode(evaluate, experiment, parts.spec, learner, counter))
    return program
