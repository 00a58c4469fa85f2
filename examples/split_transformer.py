"""A language model written in the style of Hugging Face, cut into stages by torch.export; not a line of it knows why.

    lp_pipe launch examples/split_transformer.py --mode=process

It learns the Python standard library's own sources, byte by byte, in sequences of different lengths. At the end its
weights go through a .safetensors file into the plain module, which must say what the pipeline says.

Shapes: B sequences, T bytes, D width, H heads of E channels.
"""

import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import lp_pipe as lp
import lp_pipe.pipeline as pp

IGNORED = -100  # F.cross_entropy's mark for targets that do not count


@dataclass
class TextConfig:
    vocab_size: int = 256
    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 96
    dropout: float = 0.02


class DecoderLayer(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size)
        self.up_proj = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down_proj = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_BTD: Tensor, allowed_B1TT: Tensor) -> Tensor:
        qkv_BTD = self.qkv_proj(self.input_layernorm(hidden_BTD)).chunk(3, -1)
        query_BHTE, key_BHTE, value_BHTE = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in qkv_BTD)
        seen_BHTE = F.scaled_dot_product_attention(query_BHTE, key_BHTE, value_BHTE, attn_mask=allowed_B1TT)
        hidden_BTD = hidden_BTD + self.dropout(self.o_proj(seen_BHTE.transpose(1, 2).flatten(2)))
        up_BTD = F.gelu(self.up_proj(self.post_attention_layernorm(hidden_BTD)))
        return hidden_BTD + self.dropout(self.down_proj(up_BTD))


class TextModel(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        causal_TT = positions_T[:, None] >= positions_T
        allowed_B1TT = causal_TT & attention_mask[:, None, None, :].bool()
        hidden_BTD = self.embed_tokens(input_ids) + self.embed_positions(positions_T)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, allowed_B1TT)
        return self.norm(hidden_BTD)


class TextForCausalLM(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.model = TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.05)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.model(input_ids, attention_mask))}


@cache
def text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


class Feeder:
    """16 sequences a batch, a pure function of the step: ({input_ids, attention_mask}, the bytes that follow)."""

    def batch(self, step: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(step)
        lengths_B1 = torch.randint(32, TextConfig.max_position_embeddings, (16, 1), generator=generator)
        starts_B1 = torch.randint(len(text()) - 128, (16, 1), generator=generator)
        offsets_T = torch.arange(int(lengths_B1.max()))
        mask_BT = offsets_T < lengths_B1
        ids_BT, next_BT = text()[starts_B1 + offsets_T], text()[starts_B1 + offsets_T + 1]
        inputs = {"input_ids": ids_BT.where(mask_BT, 0), "attention_mask": mask_BT.long()}
        return inputs, next_BT.where(mask_BT, IGNORED)


def loss(output: dict[str, Tensor], target_BT: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target_BT.flatten(), ignore_index=IGNORED)


def tokens(target_BT: Tensor) -> float:
    return float((target_BT != IGNORED).sum())


def text_model(stages: int) -> pp.Model:
    config = TextConfig()
    with pp.layer_rng(0, 0):
        module = TextForCausalLM(config)
    cuts = [f"model.layers.{stage * config.num_hidden_layers // stages}" for stage in range(1, stages)]
    layers = pp.split(module, Feeder().batch(0)[0], cuts)
    return pp.Model(layers, loss, lambda named: torch.optim.AdamW(named, lr=3e-3), loss_weight=tokens)


def train(pipeline: pp.PipelineClient, feeder: lp.CourierClient, steps: int) -> None:
    """Train, write the weights, read them into the plain module; ends the program."""
    for result in pipeline.steps(steps):
        lp.log_metrics({"loss": result.loss, "total_steps": steps}, step=result.step + 1)
        if result.step % 20 == 0 or result.step == steps - 1:
            print(f"step {result.step:>4}: loss {result.loss:.3f}", flush=True)
    inputs, _ = feeder.batch(steps)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pipeline.export(Path(folder) / "model.safetensors")
        plain = TextForCausalLM(TextConfig()).eval()
        plain.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        difference = (plain(**inputs)["logits"] - pipeline.forward(inputs)["logits"]).abs().max()
    print(f"the plain module's logits differ from the pipeline's by {difference:.1e} at most", flush=True)
    lp.stop()


def make_program(stages: int = 3, schedule: str = "1f1b", steps: int = 200) -> lp.Program:
    """Build the feeder, the pipeline and the trainer."""
    program = lp.Program("split_transformer")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    model = text_model(stages)
    pipeline = pp.add_pipeline(program, model, stages=stages, schedule=schedule, microbatches=4, inputs=feeder)
    program.add_node(lp.PyNode(train, pipeline, feeder, steps), label="trainer")
    return program


if __name__ == "__main__":  # so that python examples/split_transformer.py does it, too
    lp.launch(make_program(), mode="process").wait()
