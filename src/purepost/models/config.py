"""The shape of a decoder, of whatever family."""

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import jax

from .layers import Activation
from .rope import Rope, RopeScaling, rope_frequencies


class Kind(NamedTuple):
    """What the shapes of a layer's weights depend on, and whose keys and values it reads."""

    head_dim: int
    kv_heads: int
    own_values: bool  # False: its values are its keys, before their norm
    intermediate_size: int
    experts: bool  # in the place of its MLP
    source: int | None  # the layer whose keys and values it attends to; None: it has its own


@dataclass(frozen=True)
class Config:
    """The shape of a decoder. Sizes in numbers of features, layers, heads; positions in tokens.

    A None, a 0 or an empty tuple: the model does not have it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or of one expert in its place
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
    dense_layers: tuple[int, ...] = ()  # those that have an MLP in the place of experts
    dense_intermediate_size: int = 0
    side_expert_size: int = 0  # of an expert beside the MLP; 0: experts are in its place
    full_head_dim: int | None = None  # of the layers without a window, if another
    full_kv_heads: int | None = None  # of those layers too
    full_keys_as_values: bool = False  # their values are their keys, before the norm
    value_norm: bool = False  # each head's values are normed, without a scale
    # The last so many layers attend to the keys and values of the last layer before them that, as
    # they do, has a window or has none.
    shared_kv_layers: int = 0
    wide_shared_mlp: bool = False  # the MLPs of those are twice as wide
    layer_scale: bool = False  # every layer ends by multiplying with a number of its own
    layer_input_size: int = 0  # features of the token that each layer is told anew
    layer_input_vocab: int = 0

    def __post_init__(self) -> None:
        for heads in (self.num_kv_heads, self.full_kv_heads):
            if heads and self.num_heads % heads:
                raise ValueError(
                    f"expected num_kv_heads to divide num_heads {self.num_heads}, got {heads}"
                )
        for width in (self.head_dim, self.full_head_dim):
            if width and width % 2:
                raise ValueError(f"expected an even head_dim for rotary positions, got {width}")
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
        if not set(self.dense_layers) <= set(range(self.num_layers)):
            raise ValueError(
                f"expected dense layers from 0 to {self.num_layers - 1}, got {self.dense_layers}"
            )
        own = self.num_layers - self.shared_kv_layers
        full = [window is None for window in self.layer_windows]
        if self.shared_kv_layers < 0 or not set(full[own:]) <= set(full[: max(own, 0)]):
            raise ValueError(
                "expected a layer of the same kind, with a window or without, before those that "
                f"share keys and values, got {self.shared_kv_layers} of {self.num_layers} that do"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer."""
        own = self.num_layers - self.shared_kv_layers
        full = [window is None for window in self.layer_windows]
        last = {full[i]: i for i in range(own)}  # the last layer of each sort with keys of its own

        def kind(i: int) -> Kind:
            dense = self.num_experts > 0 and i in self.dense_layers
            wide = i >= own and self.wide_shared_mlp
            size = self.dense_intermediate_size if dense else self.intermediate_size
            return Kind(
                head_dim=(self.full_head_dim if full[i] else None) or self.head_dim,
                kv_heads=(self.full_kv_heads if full[i] else None) or self.num_kv_heads,
                own_values=not (full[i] and self.full_keys_as_values),
                intermediate_size=2 * size if wide else size,
                experts=self.num_experts > 0 and not dense and not self.side_expert_size,
                source=last[full[i]] if i >= own else None,
            )

        return tuple(map(kind, range(self.num_layers)))

    @property
    def runs(self) -> tuple[range, ...]:
        """The layers in runs of one kind, a stack of weights each. Most models are one run."""
        ends = accumulate(len(list(group)) for _, group in groupby(self.kinds))
        ends = [0, *ends]
        return tuple(map(range, ends[:-1], ends[1:]))

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
        theta, scaling, width = self.rope_theta, self.rope_scaling, self.head_dim
        if window is None and self.full_head_dim is not None:
            width = self.full_head_dim
        if window is not None and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, self.window_rope_scaling
        frequencies = rope_frequencies(width, theta, scaling, self.max_positions)
        return Rope(frequencies, 1.0 if scaling is None else scaling.attention_factor)
