"""Weights that are made, never trained: random ones of a real model's shape, or with a planted acceptance.

Every number is a function of the seed, the weight's name and its place in it (`mstar.loader.counter`). Files of such
checkpoints and weights made at a load come from here, so that they are equal.

Random weights keep activations near one. Planted ones make the next token the successor of the last one on a
random cycle through the vocabulary: layers run as always and add next to nothing, so the hidden row is the token's
embedding; lm_head's row of a token is the embedding of its predecessor, so the successor is what it likes best. The
MTP head's `fc` passes the known token's embedding on, and drafts its successor: the trunk's choice. But a random
share of 1 - acceptance of the tokens is marked in the embedding's first place, and what `fc` reads there sends
them a wrong way. A draft is wrong if the token before it is marked: independent of the drafts before, as the
cycle is random.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from mstar.loader.config import ModelConfig
from mstar.loader.counter import Stream
from mstar.loader.recipe import Recipe
from mstar.loader.sharding import Weight

PREFIX, HEAD_PREFIX = "model.", "mtp."  # of weights' full names
_EMBEDDING = PREFIX + "embed_tokens.weight"
_LM_HEAD = PREFIX + "lm_head.weight"
_FC = HEAD_PREFIX + "fc.weight"

# Of planted weights: what layers add, beside a residual stream of ones, and the logit of the next token.
_FAINT = 1e-4
_TOP_LOGIT = 20.0
# How much stronger a rejected token's detour is than the token itself.
_DETOUR = 4.0

Span = tuple[int, int]


class Maker:
    """Makes the weights of one recipe for a model of one shape, in whole or in part.

    stored: the recipe's dtype, of the files that there might be.
    """

    def __init__(self, recipe: Recipe, config: ModelConfig, stored: torch.dtype) -> None:
        self._recipe = recipe
        self._config = config
        self._stored = stored

    def whole(self, name: str, weight: Weight) -> torch.Tensor:
        """A weight as its file has it, on the CPU. name: with prefix."""
        value = torch.empty(weight.shape, dtype=torch.float32 if weight.rule.float32 else self._stored)
        self.fill(name, weight, (0, weight.shape[0]), (0, math.prod(weight.shape[1:])), value)
        return value

    def fill(self, name: str, weight: Weight, rows: Span, columns: Span, out: torch.Tensor) -> None:
        """Fills `out`, of any float dtype and on any device, with rows x columns of a weight seen as a matrix."""
        matrix = out.view(rows[1] - rows[0], -1) if out.dim() != 2 else out
        if name.endswith(("A_log", "dt_bias")):
            matrix.copy_(self._per_head(name, rows))
        elif name.endswith("norm.weight"):  # all but the linear layers' are zero-centred
            matrix.fill_(1 if name.endswith("linear_attn.norm.weight") else 0)
        elif self._recipe.acceptance is not None and name in (_EMBEDDING, _LM_HEAD):
            self._planted_vocab(name, rows, columns, matrix)
        else:
            width = math.prod(weight.shape[1:])
            self._draw(name, torch.arange(*rows), columns, matrix, width, self._deviation(name, weight))
            if self._recipe.acceptance is not None and name == _FC:
                self._plant_fc(rows, columns, matrix)

    def _deviation(self, name: str, weight: Weight) -> float:
        planted = self._recipe.acceptance is not None
        if name == _EMBEDDING:
            return 1.0
        if name.endswith("conv1d.weight"):
            return 0.5
        if planted and name == _FC:
            return _FAINT / math.sqrt(weight.shape[-1])
        scale = float(weight.shape[-1] ** -0.5)
        outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        return scale * _FAINT if planted and name.endswith(outputs) else scale

    def _draw(
        self, name: str, rows: torch.Tensor, columns: Span, out: torch.Tensor, width: int, deviation: float
    ) -> None:
        bound = math.sqrt(3) * deviation
        Stream.of(self._recipe.seed, name).uniform_(out, rows, columns[0], width, bound, self._stored)

    def _per_head(self, name: str, rows: Span) -> torch.Tensor:
        """A_log and dt_bias, [heads, 1] float32: decay rates of 1 to 16, and the inverse softplus of 0.001 to 0.1.

        A few numbers in Python's float64: devices' logarithms differ in the last bits.
        """
        draws = Stream.of(self._recipe.seed, name).integers(rows[1])[rows[0] :].tolist()
        shares = [(draw + (1 << 31)) / (1 << 32) for draw in draws]
        if name.endswith("A_log"):
            values = [math.log(1 + 15 * share) for share in shares]
        else:
            steps = [10 ** (-3 + 2 * share) for share in shares]
            values = [math.log(math.expm1(step)) for step in steps]
        return torch.tensor(values, dtype=torch.float64).to(torch.float32)[:, None]

    # Planted

    @cached_property
    def _cycle(self) -> torch.Tensor:
        return Stream.of(self._recipe.seed, "cycle").permutation(self._config.vocab_size)

    @cached_property
    def _predecessors(self) -> torch.Tensor:
        before = torch.empty_like(self._cycle)
        before[self._cycle.roll(-1)] = self._cycle
        return before

    @cached_property
    def _marks(self) -> torch.Tensor:
        """[vocab] float32: 1 where the draft after the token goes wrong."""
        vocab, acceptance = self._config.vocab_size, self._recipe.acceptance
        assert acceptance is not None
        order = Stream.of(self._recipe.seed, "marked").permutation(vocab)
        marks = torch.zeros(vocab)
        marks[order[: round((1 - acceptance) * vocab)]] = 1
        return marks

    def _planted_vocab(self, name: str, rows: Span, columns: Span, out: torch.Tensor) -> None:
        tokens, scale = torch.arange(*rows), 1.0
        if name == _LM_HEAD:
            tokens, scale = self._predecessors[tokens], _TOP_LOGIT / self._config.hidden_size
        # lm_head is cut from the embedding's stream
        self._draw(_EMBEDDING, tokens, columns, out, self._config.hidden_size, scale)
        if columns[0] == 0:
            out[:, 0] = (self._marks[tokens] * scale).to(self._stored).to(out)

    def _plant_fc(self, rows: Span, columns: Span, out: torch.Tensor) -> None:
        hidden = self._config.hidden_size
        same = torch.arange(max(rows[0], columns[0]), min(rows[1], columns[1]), device=out.device)
        out[same - rows[0], same - columns[0]] = 1
        if columns[0] == 0:
            # the detour leads to the successor of the cycle's first token
            first = torch.empty(1, hidden)
            token = int(self._cycle[0])
            self._planted_vocab(_EMBEDDING, (token, token + 1), (0, hidden), first)
            out[:, 0] = (_DETOUR * first[0, rows[0] : rows[1]]).to(self._stored).to(out)
