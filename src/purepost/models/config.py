"""The shape of a decoder, of whatever family."""

from dataclasses import dataclass

import jax

from .layers import Activation
from .rope import Rope, RopeScaling, rope_frequencies


@dataclass(frozen=True)
class Config:
    """The shape of a decoder. Sizes in numbers of features, layers, heads; positions in tokens.

    A None, a 0 or an empty tuple: the model does not have it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or of one expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    max_positions: int = 8192
    family: str = "llama"
    activation: Activation = jax.nn.silu
    qkv_bias: bool = False
    qk_norm: bool = False  # each head's queries and keys are normed before they are rotated
    post_norms: bool = False  # what attention and MLP give is normed before it is added
    norm_offset: float = 0.0  # added to the scale of every norm
    embed_scale: float = 1.0
    query_scale: float | None = None  # None: 1/√head_dim
    attention_softcap: float | None = None
    final_softcap: float | None = None
    windows: tuple[int | None, ...] = ()  # tokens that each layer's queries see; None: all
    window_rope_theta: float | None = None  # RoPE of the layers that have a window, if another
    window_rope_scaling: RopeScaling | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = False  # the weights of a token's experts add up to 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_kv_heads to divide num_heads {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim for rotary positions, got {self.head_dim}")
        if len(self.windows) not in (0, self.num_layers):
            raise ValueError(
                f"expected a window (or None) for each of {self.num_layers} layers, "
                f"got {len(self.windows)}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"expected windows of at least 1 token, got {self.windows}")
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"expected at most {self.num_experts} experts per token, the number of experts, "
                f"got {self.experts_per_token}"
            )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return self.windows or (None,) * self.num_layers

    @property
    def has_two_ropes(self) -> bool:
        """Whether layers with a window turn by other frequencies than those without."""
        return self.window_rope_theta is not None

    def rope(self, window: int | None) -> Rope:
        """The rotary positions of the layers with that window."""
        theta, scaling = self.rope_theta, self.rope_scaling
        if window is not None and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, self.window_rope_scaling
        frequencies = rope_frequencies(self.head_dim, theta, scaling, self.max_positions)
        return Rope(frequencies, 1.0 if scaling is None else scaling.attention_factor)
