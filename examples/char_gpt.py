"""Train a character-level GPT on the Python standard library's sources, as a pipeline of processes.

    lp_pipe launch examples/char_gpt.py --mode=process -- --stages=2 --schedule=1f1b

    feeder ---- batch(step) ----> stages/0 <--> stages/1 <--> ...
       |                              ^   ^
       +-- validation(count) --> evaluator |
                                    ^      |
                                    +-- trainer

Shapes: B sequences, T characters of context, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from absl import app, flags
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of the nodes; flags are read only in the launching process."""

    stages: int = 2
    schedule: str = "1f1b"
    microbatches: int = 8
    steps: int = 800
    seed: int = 0
    batch_size: int = 16
    context: int = 128
    width: int = 96
    layers: int = 4
    heads: int = 3
    dropout: float = 0.02
    learning_rate: float = 5e-3
    eval_every: int = 100
    sample_length: int = 400
    on_failure: str = "stop"


DEFAULT = Config()

flags.DEFINE_integer("stages", DEFAULT.stages, "Processes that the model is cut into.", lower_bound=1)
flags.DEFINE_string("schedule", DEFAULT.schedule, "Order of forwards and backwards, a name in pp.schedules().")
flags.DEFINE_integer("microbatches", DEFAULT.microbatches, "Slices of a batch that fill the pipe.", lower_bound=1)
flags.DEFINE_integer("steps", DEFAULT.steps, "Optimizer steps.", lower_bound=1)
flags.DEFINE_integer("seed", DEFAULT.seed, "Decides weights, dropout, batches and the sample.", lower_bound=0)
flags.DEFINE_integer("batch_size", DEFAULT.batch_size, "Sequences in a batch.", lower_bound=1)
flags.DEFINE_integer("context", DEFAULT.context, "Characters in a sequence.", lower_bound=1)
flags.DEFINE_integer("width", DEFAULT.width, "Size of a character's activation.", lower_bound=1)
flags.DEFINE_integer("layers", DEFAULT.layers, "Transformer blocks.", lower_bound=1)
flags.DEFINE_integer("heads", DEFAULT.heads, "Attention heads; divides the width.", lower_bound=1)
flags.DEFINE_float("dropout", DEFAULT.dropout, "Share of activations dropped.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_float("learning_rate", DEFAULT.learning_rate, "Peak, after the warm-up.", lower_bound=0.0)
flags.DEFINE_integer("eval_every", DEFAULT.eval_every, "Steps between evaluations.", lower_bound=1)
flags.DEFINE_integer("sample_length", DEFAULT.sample_length, "Characters of the sample at the end.", lower_bound=0)
flags.DEFINE_enum("on_failure", DEFAULT.on_failure, ["stop", "restart"], "What becomes of a node that has died.")
flags.register_multi_flags_validator(
    ["width", "heads"], lambda values: values["width"] % values["heads"] == 0, "--heads must divide --width"
)


# --- Text: the standard library's own sources, one token a byte ---

CHARACTERS = "\0\n\t" + "".join(map(chr, range(32, 127)))  # "\0" stands for every character that is not listed
VOCABULARY = len(CHARACTERS)
UNKNOWN = 0
MAX_CORPUS_BYTES = 16_000_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}

_TOKEN_OF_BYTE = np.full(256, UNKNOWN, dtype=np.uint8)
_TOKEN_OF_BYTE[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(VOCABULARY)

Tokens = NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]


def encode(text: bytes) -> Tokens:
    """Turn UTF-8 text into tokens; bytes outside the vocabulary become UNKNOWN."""
    return _TOKEN_OF_BYTE[np.frombuffer(text, dtype=np.uint8)]


def decode(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens).replace(CHARACTERS[UNKNOWN], "?")


def split_files(root: pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Sort the Python files below root into training and (about 5 %) validation files.

    A hash of the relative path decides, so that a file stays on its side when others come and go.
    Both lists are in the hash's order: any prefix is a fair sample.
    """
    digests: dict[bytes, pathlib.Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for path in (pathlib.Path(folder, name) for name in names if name.endswith(".py")):
            digests[hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).digest()] = path
    training = [path for digest, path in sorted(digests.items()) if digest[-1] % 20]
    validation = [path for digest, path in sorted(digests.items()) if not digest[-1] % 20]
    return training, validation


def read_tokens(paths: list[pathlib.Path], max_bytes: int = MAX_CORPUS_BYTES) -> Tokens:
    """Concatenate the files' tokens, up to the file that reaches max_bytes."""
    texts: list[bytes] = []
    num_bytes = 0
    for path in paths:
        if num_bytes >= max_bytes:
            break
        texts.append(path.read_bytes())
        num_bytes += len(texts[-1])
    return encode(b"\n".join(texts))


def cut_batch(tokens: Tokens, starts: NDArray[np.int64], context: int) -> Batch:
    """Cut one sequence per start; the target of a character is the one that follows it."""
    windows_BT1 = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows_BT1[:, :-1].contiguous(), windows_BT1[:, 1:].contiguous()


class Feeder:
    """Serve training batches by step and fixed validation batches; int64 tensors of shape [B, T].

    A batch depends on (seed, step) alone, so a resumed run, or a second stage, may ask for any step again.
    """

    def __init__(self, batch_size: int, context: int, seed: int, root: str | None = None):
        training, validation = split_files(pathlib.Path(root or sysconfig.get_path("stdlib")))
        self._training = read_tokens(training)
        self._validation = read_tokens(validation)
        if min(len(self._training), len(self._validation)) <= context:
            raise ValueError(f"too little Python text for a context of {context} characters below {root or 'stdlib'}")
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._last_step: int | None = None

    def batch(self, step: int) -> Batch:
        """Random sequences of the training files; they never run out."""
        self._last_step = step
        starts = np.random.default_rng((self._seed, step)).integers(
            len(self._training) - self._context, size=self._batch_size
        )
        return cut_batch(self._training, starts, self._context)

    def validation(self, count: int) -> list[Batch]:
        """Evenly spaced sequences of the validation files: the same at every call and for every seed."""
        starts = np.linspace(0, len(self._validation) - self._context - 1, count * self._batch_size).astype(np.int64)
        return [cut_batch(self._validation, part, self._context) for part in np.split(starts, count)]

    def training_tokens(self) -> Tokens:
        return self._training

    def position(self) -> dict[str, int | float | None]:
        """Return the progress, counted by the last requested step."""
        num_steps = 0 if self._last_step is None else self._last_step + 1
        seen = num_steps * self._batch_size * self._context
        return {
            "last_step": self._last_step,
            "characters_seen": seen,
            "training_characters": len(self._training),
            "validation_characters": len(self._validation),
            "epochs": seen / len(self._training),
        }


# --- The baseline: bigrams ---


def bigram_bits(tokens: Tokens) -> NDArray[np.float64]:
    """Bits that a table of pair counts, add-one smoothed, pays for [previous, next] character."""
    pairs = tokens[:-1].astype(np.int64) * VOCABULARY + tokens[1:]
    counts_VV = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY) + 1.0
    bits_VV: NDArray[np.float64] = -np.log2(counts_VV / counts_VV.sum(axis=1, keepdims=True))
    return bits_VV


def bigram_bits_per_char(bits_VV: NDArray[np.float64], batches: list[Batch]) -> float:
    return float(np.mean([bits_VV[input_BT.numpy(), target_BT.numpy()].mean() for input_BT, target_BT in batches]))


# --- The model: a flat list of layers, so that the pipeline may cut between any two ---

LOOK_BACK = 4  # characters


class Embedding(nn.Module):
    """Characters, a short look back at the ones before them, and learned positions: [B, T] -> [B, T, D].

    Attention needs long to find out that the neighbours matter most; the convolution knows it from the start.
    """

    def __init__(self, context: int, width: int, dropout: float):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.look_back = nn.Conv1d(width, width, kernel_size=LOOK_BACK)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.positions, std=0.1)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.characters(tokens_BT)
        past_BDT = F.pad(x_BTD.transpose(1, 2), (LOOK_BACK - 1, 0))  # padded on the left: no look ahead
        x_BTD = x_BTD + self.look_back(past_BDT).transpose(1, 2) + self.positions[: tokens_BT.shape[1]]
        return cast(Tensor, self.dropout(x_BTD))


class Block(nn.Module):
    """Pre-norm transformer block: causal self attention, then a GELU MLP: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for module in (self.attention_out, self.mlp_out):
            nn.init.zeros_(module.weight)  # a block begins as the identity, which lets a short training begin at once

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self._attend(self.attention_norm(x_BTD)))
        return cast(Tensor, x_BTD + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD))))))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        # H heads of E channels; dropout stays outside the attention, where torch keeps its fast CPU kernel.
        qkv_3BHTE = self.query_key_value(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query_BHTE, key_BHTE, value_BHTE = qkv_3BHTE.unbind()
        y_BHTE = F.scaled_dot_product_attention(query_BHTE, key_BHTE, value_BHTE, is_causal=True)
        return cast(Tensor, self.attention_out(y_BHTE.transpose(1, 2).flatten(2)))


class Head(nn.Module):
    """Scores of the next character: [B, T, D] -> [B, T, V]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.scores.weight, std=0.02)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return cast(Tensor, self.scores(self.norm(x_BTD)))


def layer_factories(config: Config) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Name and factory of every layer, in order; a stage builds only its own."""
    return [
        ("embedding", functools.partial(Embedding, config.context, config.width, config.dropout)),
        *(
            (f"block{index}", functools.partial(Block, config.width, config.heads, config.dropout))
            for index in range(config.layers)
        ),
        ("head", functools.partial(Head, config.width)),
    ]


def loss(logits_BTV: Tensor, target_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    nats = F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())
    return nats, {"bits_per_char": nats.detach() / math.log(2)}


def optimizer(named_parameters: list[tuple[str, nn.Parameter]], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, which decays matrices but neither biases nor norms."""
    groups = [
        {"params": [(name, p) for name, p in named_parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named_parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=(0.9, 0.98))


def warmup_then_cosine(step: int, num_steps: int) -> float:
    """Share of the peak learning rate: up over the first steps, then down to a twentieth."""
    num_warmup = min(50, 1 + num_steps // 10)
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def lr_scheduler(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warmup_then_cosine, num_steps=num_steps))


def generate(
    forward: Callable[[Tensor], Tensor], prompt: str, length: int, *, context: int, temperature: float, seed: int
) -> str:
    """Continue the prompt by sampling from forward(tokens [1, T]) -> logits [1, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt.encode()).tolist()
    for _ in range(length):
        logits_V = forward(torch.tensor([tokens[-context:]]))[0, -1]
        tokens.append(int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator)))
    return decode(tokens)


# --- The nodes that use the pipeline ---

VALIDATION_BATCHES = 16
SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation bits per character, of the model and of the bigram baseline, on the same batches."""

    model_bits: float
    bigram_bits: float


class Evaluator:
    """Measure the pipeline on the validation files, beside a bigram table of the training files."""

    def __init__(self, pipeline: pp.PipelineClient, feeder: lp.CourierClient):
        self._pipeline = pipeline
        self._batches = feeder.validation(VALIDATION_BATCHES)
        self._bigram_bits = bigram_bits_per_char(bigram_bits(feeder.training_tokens()), self._batches)

    def evaluate(self) -> Evaluation:
        nats, _ = self._pipeline.evaluate(self._batches)
        return Evaluation(nats / math.log(2), self._bigram_bits)


def metrics_of(result: pp.StepResult, config: Config) -> dict[str, float]:
    """Return a step's metrics; the pipeline logs its bubble and every stage's utilization itself."""
    return {
        "loss": result.loss,
        **result.metrics,
        "characters_per_s": config.batch_size * config.context / result.seconds,
        "total_steps": config.steps,
    }


class Trainer:
    """Drive the pipeline: train and evaluate in turn, save, show what came out; then end the program.

    With on_failure="restart" the death of any node, of this one too, takes it back to the newest checkpoint, and it
    goes on from there: what it has said since then comes again.
    """

    def __init__(
        self, pipeline: pp.PipelineClient, evaluator: lp.CourierClient, feeder: lp.CourierClient, config: Config
    ):
        self._pipeline = pipeline
        self._evaluator = evaluator
        self._feeder = feeder
        self._config = config
        self._checkpoints = Checkpoints({"pipeline": pipeline})
        self._is_done = False

    def run(self) -> None:
        restarts = self._config.on_failure == "restart"
        # There is one after `lp_pipe launch … --resume=RUN`, and where this node was restarted.
        resumed = self._checkpoints.begin(self._pipeline) if restarts else self._checkpoints.restore()
        if resumed is not None:
            say(f"going on from step {resumed.step}, as {resumed.path} has it")
        # Rounds of steps, not one long iteration: an evaluation must find no step under way that was begun ahead.
        while not self._is_done and not lp.stop_event().is_set():
            with self._checkpoints.recovering(self._pipeline) if restarts else contextlib.nullcontext():
                self._go_on()
        if not lp.stop_event().is_set():
            lp.stop()

    def _go_on(self) -> None:
        """Run one more round, or the work after the last one."""
        self._step = self._pipeline.current_step()
        if self._step < self._config.steps:
            self._train(min(self._config.eval_every, self._config.steps - self._step))
            if not lp.stop_event().is_set():
                self._evaluate()
                self._save()
        else:
            self._show_results()
            self._is_done = True

    def _train(self, num_steps: int) -> None:
        for result in self._pipeline.steps(num_steps):
            self._step += 1
            lp.log_metrics(metrics_of(result, self._config), step=self._step)
            if lp.stop_event().is_set():
                return

    def _evaluate(self) -> None:
        result = self._evaluator.evaluate()
        lp.log_metrics(
            {"validation_bits_per_char": result.model_bits, "bigram_bits_per_char": result.bigram_bits}, step=self._step
        )
        say(
            f"step {self._step:>4}: validation {result.model_bits:.3f} bits/char,"
            f" bigram baseline {result.bigram_bits:.3f} ({result.model_bits - result.bigram_bits:+.3f})"
        )

    def _save(self) -> None:
        """Save a checkpoint, so that a stop loses at most one round; it is written while the next round computes."""
        self._checkpoints.save(self._step, wait=self._step == self._config.steps)

    def _show_results(self) -> None:
        text = generate(
            self._pipeline.forward,
            SAMPLE_PROMPT,
            self._config.sample_length,
            context=self._config.context,
            temperature=SAMPLE_TEMPERATURE,
            seed=self._config.seed,
        )
        position = self._feeder.position()
        say(f"a sample, after {SAMPLE_PROMPT!r}:\n{text}")
        say(f"read {position['characters_seen']:,} characters, {position['epochs']:.0%} of the training text")
        say(f"parameters sha256 {self._pipeline.fingerprint()}")


def say(line: str) -> None:
    """Print for the person who watches; the launcher adds the node's label."""
    print(line, flush=True)


# --- The program ---


def build_program(config: Config) -> lp.Program:
    """Feeder, stages, evaluator and trainer as one graph."""
    model = pp.Model(
        [pp.Layer(factory, name=name) for name, factory in layer_factories(config)],
        loss=loss,
        optimizer=functools.partial(optimizer, learning_rate=config.learning_rate),
        lr_scheduler=functools.partial(lr_scheduler, num_steps=config.steps),
        seed=config.seed,
    )
    program = lp.Program("char_gpt")
    options: Any = {"on_failure": config.on_failure}
    with program.group("feeder", **options):
        feeder = program.add_node(lp.CourierNode(Feeder, config.batch_size, config.context, config.seed))
    pipeline = pp.add_pipeline(
        program,
        model,
        stages=config.stages,
        schedule=config.schedule,
        microbatches=config.microbatches,
        inputs=feeder,
        **options,
    )
    with program.group("evaluator", **options):
        evaluator = program.add_node(lp.CourierNode(Evaluator, pipeline, feeder))
    with program.group("trainer", **options):
        program.add_node(lp.PyClassNode(Trainer, pipeline, evaluator, feeder, config))
    return program


def make_program() -> lp.Program:
    """Build the program that the flags ask for."""
    values: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Config)}
    return build_program(Config(**values))


if __name__ == "__main__":  # so that python examples/char_gpt.py --steps=200 does it, too
    app.run(lambda _: lp.launch(make_program(), mode="process").wait())
