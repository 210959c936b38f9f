"""A small decoder-only transformer over paged keys and values, computed tile by tile.

Pre-norm blocks of grouped-query attention (rotary positions) and SwiGLU, RMSNorm, byte-level
vocabulary, seeded weights. It is complete except for training: its output is noise, but the same
noise for the same prompt, whatever was cached.
"""

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.functional import silu

from worker_agent.reference.engine.tiles import TILE

VOCABULARY = 256
_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0

KEY_TILE = 256
"""Positions per group of keys in attention; groups are aligned to multiples of it."""


class ModelConfig(Struct, frozen=True):
    """The shape of the model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    max_len: int
    seed: int

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Inner size of the feed-forward network: 8/3 of the hidden size, in multiples of 32."""
        return -(-self.hidden_size * 8 // 3 // 32) * 32


class PagedContext(Struct):
    """The blocks of one request's keys and values, and the rows of a tile that attend to them.

    `block_ids`: (blocks,) int64, enough for all positions up to the last row's. `rows`: (n,) int64.
    """

    block_ids: Tensor
    rows: Tensor
    last_position: int


class TileInput(Struct):
    """The input of one tile. Rows without a token are computed too, and ignored.

    `tokens`, `positions`: (TILE,) int64. `rows`, `blocks`, `offsets`: (n,) int64, the rows with a
    token, and the places of their keys and values.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    contexts: list[PagedContext]


class _Layer(Struct):
    """Weights of a layer, each (out, in)."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The weights, and the forward pass of a tile."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        generator = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int, gain: float) -> Tensor:
            values = torch.randn(rows, columns, generator=generator)
            return (values * (gain / math.sqrt(columns))).to(device)

        # The gains keep attention peaked and logits apart: a wrong key or value changes the output.
        size, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        self._embedding = weight(VOCABULARY, size, math.sqrt(size))
        self._layers = [
            _Layer(
                qkv=torch.cat([weight(size + kv_size, size, 2.0), weight(kv_size, size, 1.5)]),
                out=weight(size, size, 1.5),
                gate_up=weight(2 * config.ffn_size, size, 1.1),
                down=weight(size, config.ffn_size, 1.1),
            )
            for _ in range(config.num_layers)
        ]
        self._head = weight(VOCABULARY, size, 4.0)
        self._cos, self._sin = self._rotations()

    def forward(self, tile: TileInput, cache: Sequence[Tensor]) -> Tensor:
        """Compute a tile's logits, (TILE, VOCABULARY), and write its keys and values to the cache.

        `cache`: one tensor per layer, (blocks, 2, block_size, kv_heads, head_dim).
        """
        hidden = self._embedding[tile.tokens]
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, _normed(hidden), tile, cache[index])
            hidden = hidden + attended @ layer.out.T
            gate, up = (_normed(hidden) @ layer.gate_up.T).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * up) @ layer.down.T
        return _normed(hidden) @ self._head.T

    def _attention(self, layer: _Layer, hidden: Tensor, tile: TileInput, cache: Tensor) -> Tensor:
        """Return attention output (TILE, hidden_size), and write keys and values.

        `cache`: (blocks, 2, block_size, kv_heads, head_dim).
        """
        c = self.config
        sizes = [c.hidden_size, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        query, key, value = torch.split(hidden @ layer.qkv.T, sizes, dim=-1)
        query = self._rotated(query.view(TILE, c.num_heads, c.head_dim), tile.positions)
        key = self._rotated(key.view(TILE, c.num_kv_heads, c.head_dim), tile.positions)
        value = value.view(TILE, c.num_kv_heads, c.head_dim)
        cache[tile.blocks, 0, tile.offsets] = key[tile.rows]
        cache[tile.blocks, 1, tile.offsets] = value[tile.rows]
        # Heads that share a key become one matrix: (kv_heads, heads per key · TILE, head_dim).
        grouped = query.view(TILE, c.num_kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(c.num_kv_heads, -1, c.head_dim)
        attended = torch.zeros(TILE, c.hidden_size, device=self.device)
        for context in tile.contexts:
            seen = self._attend(grouped, tile.positions, context, cache)
            attended[context.rows] = seen[context.rows]
        return attended

    def _attend(
        self, query: Tensor, positions: Tensor, context: PagedContext, cache: Tensor
    ) -> Tensor:
        """Return the attention of every row to one request; the caller selects that request's rows.

        Key tiles are processed one by one in order, always in the same shape; those behind a row
        add exact zeros to it. So the result does not depend on the length of the context.
        """
        keys, values = self._gather(context, cache)
        heads_per_key = self.config.num_heads // self.config.num_kv_heads
        offsets = torch.arange(KEY_TILE, device=self.device)
        scaled = query / math.sqrt(self.config.head_dim)
        scores = [scaled @ key_tile for key_tile in keys]
        for first, score in zip(range(0, len(keys) * KEY_TILE, KEY_TILE), scores, strict=True):
            if first + KEY_TILE > context.last_position - TILE:  # else each row sees all of them
                hidden_from = (first + offsets)[None, :] > positions[:, None]
                score.masked_fill_(hidden_from.repeat(heads_per_key, 1), -torch.inf)
        peak = torch.stack([score.amax(dim=-1) for score in scores]).amax(dim=0)
        total = torch.zeros_like(peak)
        seen = torch.zeros_like(query)
        for score, value_tile in zip(scores, values, strict=True):
            weights = score.sub_(peak[..., None]).exp_()
            total += weights.sum(dim=-1)
            seen += weights @ value_tile
        seen = (seen / total[..., None]).view(
            self.config.num_kv_heads, heads_per_key, TILE, self.config.head_dim
        )
        return seen.permute(2, 0, 1, 3).reshape(TILE, self.config.hidden_size)

    def _gather(self, context: PagedContext, cache: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return tiles of keys, (kv_heads, head_dim, KEY_TILE), and of values, last two swapped.

        Behind the last position they hold values of any block: finite, and hidden from every row.
        """
        c = self.config
        count = context.last_position // KEY_TILE + 1
        missing = -(-count * KEY_TILE // cache.shape[2]) - len(context.block_ids)
        ids = torch.nn.functional.pad(context.block_ids, (0, max(missing, 0)))
        shape = count, KEY_TILE, c.num_kv_heads, c.head_dim
        keys, values = (
            cache[ids, which].flatten(0, 1)[: count * KEY_TILE].view(shape) for which in (0, 1)
        )
        return list(keys.permute(0, 2, 3, 1)), list(values.permute(0, 2, 1, 3))

    def _rotations(self) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        rates = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(self.config.max_len, dtype=torch.float64)[:, None] * rates
        return angles.cos().float().to(self.device), angles.sin().float().to(self.device)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._cos[positions][:, None, :], self._sin[positions][:, None, :]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _normed(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + _EPSILON)
