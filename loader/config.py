"""The model's shape: what `config.json` says, nested or flat, checked and typed. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

LINEAR = "linear_attention"
FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class LocalShape:
    """What one rank of a mesh holds; every rank holds the same amount."""

    q_heads: int
    kv_heads: int
    linear_key_heads: int
    linear_value_heads: int
    intermediate: int
    vocab: int  # rows of embedding and lm_head, the last rank's padding included

    conv_channels: int  # Q|K|V of the linear layers: 2 * key heads * key dim + value heads * value dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen3.5-family text trunk. Field names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's: "bf16", "fp16" or "fp32"
    eos_token_ids: tuple[int, ...]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def local(self, tp_size: int) -> LocalShape:
        """Shapes on one of `tp_size` ranks; `tp_size` must fit (see sharding.check_tp)."""
        key_heads = self.linear_num_key_heads // tp_size
        value_heads = self.linear_num_value_heads // tp_size
        return LocalShape(
            q_heads=self.num_attention_heads // tp_size,
            kv_heads=max(1, self.num_key_value_heads // tp_size),
            linear_key_heads=key_heads,
            linear_value_heads=value_heads,
            intermediate=self.intermediate_size // tp_size,
            vocab=-(-self.vocab_size // tp_size),
            conv_channels=2 * key_heads * self.linear_key_head_dim + value_heads * self.linear_value_head_dim,
        )
