"""The whole model for training: trunk, head and MTP draft layer, and the losses over them.

Parameter names are those of the checkpoint (`model.*`, `lm_head.*`, `mtp.*`), so exporting is a
matter of dtype only. Axes as in layers.py; J is a draft step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.training.layers import (
    Cells,
    GatedDeltaNet,
    GatedResidual,
    MixtureOfExperts,
    PerLayerEmbedding,
    QSAttention,
    RotaryTable,
    ZeroCentredRMSNorm,
    inject,
)

if TYPE_CHECKING:
    from engine.training.config import ModelConfig

MAX_MTP_STEPS = 4


class LinearLayer(nn.Module):
    """GDN layer; the one at the PLE index adds its n-gram features first."""

    def __init__(self, config: ModelConfig, dropout: float, use_ple: bool) -> None:
        super().__init__()
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)
        self.linear_attn = GatedDeltaNet(config)
        self.mlp = MixtureOfExperts(config)
        self.dropout = dropout
        if use_ple:
            self.ple = PerLayerEmbedding(config)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [B, T, S * H] -> the same, and the router's balance loss."""
        u, weights = self.attn_hyper_connection(streams)
        y = F.dropout(self.linear_attn(u), self.dropout, self.training)
        streams = inject(streams, weights, y)
        u, weights = self.mlp_hyper_connection(streams)
        y, balance = self.mlp(u)
        return inject(streams, weights, F.dropout(y, self.dropout, self.training)), balance

    def add_ngrams(self, streams: Tensor, ids: Tensor) -> Tensor:
        return streams + self.ple(streams, ids)


class FullLayer(nn.Module):
    """QSA layer, of the trunk or of the draft head."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)
        self.self_attn = QSAttention(config)
        self.mlp = MixtureOfExperts(config)
        self.dropout = dropout

    def forward(
        self, streams: Tensor, rotary: RotaryTable, is_selecting: bool
    ) -> tuple[Tensor, Cells, Tensor, Tensor]:
        """Returns streams, cells, the router's balance loss and the indexer's loss."""
        u, weights = self.attn_hyper_connection(streams)
        y, cells, index_loss = self.self_attn(u, rotary, is_selecting=is_selecting)
        streams = inject(streams, weights, F.dropout(y, self.dropout, self.training))
        streams, balance = self._experts(streams)
        return streams, cells, balance, index_loss

    def chain(
        self, streams: Tensor, rotary: RotaryTable, base: Cells, own: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """A later draft step; see QSAttention.chain. Returns streams, new cell, balance loss."""
        u, weights = self.attn_hyper_connection(streams)
        y, cell = self.self_attn.chain(u, rotary, base, own)
        streams = inject(streams, weights, F.dropout(y, self.dropout, self.training))
        streams, balance = self._experts(streams)
        return streams, cell, balance

    def _experts(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        u, weights = self.mlp_hyper_connection(streams)
        y, balance = self.mlp(u)
        return inject(streams, weights, F.dropout(y, self.dropout, self.training)), balance


class Trunk(nn.Module):
    """Embedding, layers and final mixer; everything under `model.`."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(
            FullLayer(config, dropout)
            if config.is_full_attention(index)
            else LinearLayer(config, dropout, use_ple=index == config.ple_layer_index)
            for index in range(config.num_hidden_layers)
        )
        self.hyper_connection_mixer = GatedResidual(config, use_inject=False)

    @property
    def ple_layer(self) -> LinearLayer:
        layer = self.layers[self.config.ple_layer_index]
        assert isinstance(layer, LinearLayer)
        return layer


class MTPHead(nn.Module):
    """The draft layer; everything under `mtp.`. Embedding and lm_head are the trunk's."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.num_streams = config.hc_count
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(config.stream_size, eps)
        self.layers = nn.ModuleList([FullLayer(config, dropout)])
        self.hyper_connection_mixer = GatedResidual(config, use_inject=False)

    @property
    def layer(self) -> FullLayer:
        """The only layer; the list exists for the checkpoint's names."""
        layer = self.layers[0]
        assert isinstance(layer, FullLayer)
        return layer

    def combine(self, streams: Tensor, embedded: Tensor) -> Tensor:
        """Streams [B, T, S * H] and the next token's embedding [B, T, H] -> draft streams."""
        e = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        split = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.num_streams, -1))
        return (self.fc_hidden(split) + e[..., None, :]).flatten(-2)


@dataclass(frozen=True, slots=True)
class Forward:
    """What one pass of the trunk gives: streams before the final mixer, head input, aux losses."""

    streams: Tensor
    hidden: Tensor
    balance_loss: Tensor
    index_loss: Tensor


class TrainingModel(nn.Module):
    """Trunk, head and draft layer together."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.mtp = MTPHead(config, dropout)
        self.is_compiled = False

    def compile_layers(self) -> None:
        """Compile layer by layer: layers of one kind share one compiled graph."""
        self.is_compiled = True
        for layer in [*self.model.layers, *self.mtp.layers]:
            layer.forward = torch.compile(layer.forward, dynamic=False)
            if isinstance(layer, FullLayer):
                layer.chain = torch.compile(layer.chain, dynamic=False)  # type: ignore[method-assign]
        ple_layer = self.model.ple_layer
        ple_layer.add_ngrams = torch.compile(ple_layer.add_ngrams, dynamic=False)
        for mixer in (self.model.hyper_connection_mixer, self.mtp.hyper_connection_mixer):
            mixer.mix = torch.compile(mixer.mix, dynamic=False)  # type: ignore[method-assign]
        self.mtp.combine = torch.compile(self.mtp.combine, dynamic=False)  # type: ignore[method-assign]

    def rotary(self, num_tokens: int, device: torch.device) -> RotaryTable:
        return RotaryTable.build(num_tokens, self.config, device)

    def run_trunk(self, ids: Tensor, *, is_selecting: bool) -> Forward:
        """ids int64 [B, T]."""
        num_tokens = ids.shape[1]
        rotary = self.rotary(num_tokens, ids.device)
        embedded = self.model.embed_tokens(ids).to(_activation_dtype(ids.device))
        streams = embedded.repeat(1, 1, self.config.hc_count)
        balance = index = torch.zeros((), device=ids.device)
        for number, layer in enumerate(self.model.layers):
            if number == self.config.ple_layer_index:
                streams = self.model.ple_layer.add_ngrams(streams, ids)
            if isinstance(layer, FullLayer):
                streams, _, layer_balance, layer_index = layer(streams, rotary, is_selecting)
                index = index + layer_index
            else:
                streams, layer_balance = layer(streams)
            balance = balance + layer_balance
        hidden = self.model.hyper_connection_mixer.mix(streams)
        return Forward(streams, hidden, balance, index)

    def run_mtp(
        self, ids: Tensor, streams: Tensor, num_steps: int, *, is_selecting: bool
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """The draft chain from every position at once, fed with the true tokens.

        At index i, step j reads token i + 1 + j and the previous step's streams (step 0: the
        trunk's at i), stands at position i + j, and predicts token i + 2 + j. Its attention is
        what a chain begun at i sees when it runs: the step-0 cells up to i and its own later ones.
        Returns the head inputs [B, T, H] of each step, balance loss and indexer loss.
        """
        num_tokens = ids.shape[1]
        rotary = self.rotary(num_tokens + num_steps, ids.device)
        padded = F.pad(ids, (0, num_steps + 1), value=self.config.eos_token_id)
        layer = self.mtp.layer
        hidden: list[Tensor] = []
        own: list[tuple[Tensor, Tensor]] = []
        balance = index_loss = torch.zeros((), device=ids.device)
        base: Cells | None = None
        for step in range(num_steps):
            token = padded[:, step + 1 : step + 1 + num_tokens]
            embedded = self.model.embed_tokens(token).to(streams.dtype)
            streams = self.mtp.combine(streams, embedded)
            here = rotary.shifted(step, num_tokens)
            if base is None:
                streams, base, layer_balance, index_loss = layer(streams, here, is_selecting)
            else:
                streams, cell, layer_balance = layer.chain(streams, here, base, own)
                own = [*own, cell]
            balance = balance + layer_balance
            hidden.append(self.mtp.hyper_connection_mixer.mix(streams))
        return hidden, balance, index_loss

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out


def _activation_dtype(device: torch.device) -> torch.dtype:
    """The streams' dtype: that of autocast where it is on, fp32 elsewhere."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def next_token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy; logits [N, vocab], targets int64 [N], weights fp32 [N]."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy of the draft against the trunk's own distribution.

    A draft counts when it is what the trunk picks, so the trunk, not the text, is what to match.
    logits, teacher_logits [N, vocab]; weights fp32 [N].
    """
    target = teacher_logits.float().softmax(dim=-1)
    losses = -(target * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors of the parts of the training loss."""

    mtp: float
    balance: float
    indexer: float


def training_loss(
    model: TrainingModel,
    ids: Tensor,
    token_weights: Tensor,
    factors: LossWeights,
    num_mtp_steps: int,
    *,
    is_selecting: bool,
    loss_fns: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (
        next_token_loss,
        distillation_loss,
    ),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Next-token loss of the trunk, distillation of the draft chain, balance and indexer losses.

    ids int64 [B, T]; token_weights fp32 [B, T] weighs the prediction OF each token.
    Returns the total and its detached parts.
    """
    next_token, distil = loss_fns
    trunk = model.run_trunk(ids, is_selecting=is_selecting)
    logits = model.logits(trunk.hidden[:, :-1])
    main = next_token(logits.flatten(0, 1), ids[:, 1:].flatten(), token_weights[:, 1:].flatten())
    parts = {"main": main}
    total = main + factors.balance * trunk.balance_loss
    index_loss = trunk.index_loss
    if num_mtp_steps:
        hidden, balance, mtp_index = model.run_mtp(
            ids, trunk.streams, num_mtp_steps, is_selecting=is_selecting
        )
        teacher = logits.detach()
        drafts = []
        for step, step_hidden in enumerate(hidden):
            # Index i, step j predicts token i + 2 + j, for which the trunk spoke at i + 1 + j.
            kept = ids.shape[1] - 2 - step
            drafts.append(
                distil(
                    model.logits(step_hidden[:, :kept]).flatten(0, 1),
                    teacher[:, step + 1 :].flatten(0, 1),
                    token_weights[:, step + 2 :].flatten(),
                )
            )
            parts[f"mtp{step}"] = drafts[-1]
        total = total + factors.mtp * torch.stack(drafts).mean() + factors.balance * balance
        index_loss = index_loss + mtp_index
    total = total + factors.indexer * index_loss
    parts |= {"balance": trunk.balance_loss, "indexer": index_loss}
    return total, {name: part.detach() for name, part in parts.items()}
