"""The instants of a micro-batch that may be its largest, as parts without resident weights and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.passes import Logits, Pass
from autotune.policies.estimate.sharded.gathers import Gathers, Moment

Instants: TypeAlias = Iterator[dict[str, Floats]]  # `gathered`: weights in addition to the resident ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Bytes of gradients that stay on the device."""

    earlier: Floats  # of earlier micro-batches
    complete: Floats  # once a backward is over
    per_parameter: Floats  # of this rank's part of the model
    last: Floats  # without sharding: of the first layer and the embedding, which come last
    tied: Floats  # of a tied embedding, as it stays; 0 if embedding and head are two tensors
    tied_copies: Floats  # the two gradients of a tied embedding and their sum, while they are added
    head: Floats  # without sharding: of the head, which come first


def forward(load: Load, gathers: Gathers, run: Pass, logits: Logits, gradients: Gradients) -> Instants:
    """Yield the candidates for forward's largest instant."""
    earlier = gradients.earlier
    within = _within(run) + np.where(load.recompute_full, run.casts, 0.0)
    alone = np.maximum(run.inputs, run.moving)
    unkept = np.where(load.recompute_full, np.maximum(0.0, run.working - 2.0 * run.inputs), alone)
    last = within + run.ends
    hidden = _hidden_logits(load, logits)
    yield {"gathered": gathers.start, "gradients": earlier}
    yield {"gathered": gathers.layers, "gradients": earlier, "activations": within + unkept}
    yield {"gathered": gathers.between, "gradients": earlier, "activations": _below(run)}
    yield {"gathered": gathers.before_head, "gradients": earlier, "activations": last}
    yield {"gathered": gathers.head, "gradients": earlier, "activations": last, "logits": logits.head}
    yield {
        "gathered": gathers.loss,
        "gradients": earlier,
        "activations": last,
        "logits": logits.forward - hidden,
    }


def backward(load: Load, run: Pass, logits: Logits, gradients: Gradients) -> Instants:
    """Yield the candidates for backward's largest instant if nothing is gathered."""
    layer, within = _Layer.of(load, run), _within(run)
    earlier, complete = gradients.earlier, gradients.complete
    hidden = _hidden_logits(load, logits)
    yield {"gradients": earlier, "activations": within + run.ends, "logits": logits.backward - hidden}
    yield {
        "gradients": np.maximum(earlier, np.minimum(gradients.head, complete)),
        "activations": within + layer.inner + layer.returned,
    }
    # The layer whose activations are alive has no gradients yet, nor has the embedding below it.
    yield {
        "gradients": np.maximum(earlier, complete - gradients.last),
        "activations": layer.inner + layer.own,
    }
    # A tied embedding adds its second gradient to its first: both and their sum are alive.
    yield {
        "gradients": np.maximum(earlier, complete - gradients.tied),
        "buffers": gradients.tied_copies,
    }


def sharded_backward(
    load: Load, gathers: Gathers, run: Pass, logits: Logits, gradients: Gradients
) -> Instants:
    """Yield the candidates for backward's largest instant if FSDP gathers weights and reduces gradients."""
    layer, within = _Layer.of(load, run), _within(run)
    earlier, complete = gradients.earlier, gradients.complete

    def at(moment: Moment, own: Floats = earlier, **sizes: Floats) -> dict[str, Floats]:
        return {"gathered": moment.weights, "buffers": moment.gradients, "gradients": own, **sizes}

    def without(parameters: Floats) -> Floats:
        return np.maximum(earlier, complete - parameters * gradients.per_parameter)

    last = within + run.ends
    yield {
        "gathered": gathers.loss,
        "gradients": earlier,
        "activations": last,
        "logits": logits.backward - _hidden_logits(load, logits),
    }
    yield at(gathers.gathering_head, activations=last, logits=logits.head_gradient)
    yield at(gathers.in_head, activations=last + run.inputs, logits=logits.head_gradient)
    yield at(gathers.after_head, activations=last + run.inputs)
    yield at(gathers.last_layer, activations=within + layer.inner + layer.returned)
    yield at(gathers.inner_layer, activations=_below(run) + layer.inner + layer.returned)
    lacking = without(gathers.lacking)
    yield at(gathers.first_layer, lacking, activations=layer.inner + layer.own)
    yield at(gathers.first_layer_end, lacking, activations=2.0 * run.inputs)
    at_end, copies = gathers.embedding, gradients.tied_copies
    yield at(
        Moment(at_end.weights, at_end.gradients + copies),
        without(gathers.lacking_at_end),
        activations=run.inputs,
    )
    yield at(gathers.after_embedding, without(gathers.lacking_after), activations=run.inputs)
    yield at(gathers.root, complete)


def _within(run: Pass) -> Floats:
    """Return the activations on the device while layers run, without those of the final norm and head."""
    return run.kept - run.offloaded + run.shared


def _below(run: Pass) -> Floats:
    """Return the activations on the device that all layers but one keep."""
    below: Floats = _within(run) - run.kept_layer * (1.0 - _moved(run))
    return below


def _moved(run: Pass) -> Floats:
    """Return the share of the kept activations that is in host memory."""
    share: Floats = run.offloaded / np.maximum(1.0, run.kept)
    return share


def _hidden_logits(load: Load, logits: Logits) -> Floats:
    """Return the part of the loss's kept logits that the built-in job's hooks move to the host."""
    return np.where(load.activation_offload & load.layout.chunked_head, logits.kept, 0.0)


class _Layer(NamedTuple):
    """Memory of a layer's backward in addition to the kept activations."""

    inner: Floats
    returned: Floats  # brought back from the host
    own: Floats  # of the first layer, after all others are freed

    @classmethod
    def of(cls, load: Load, run: Pass) -> _Layer:
        returning = constant("returning_layers") if load.gpus else constant("returning_layers_cpu")
        moved = np.minimum(returning * run.kept_layer * _moved(run), run.offloaded)
        share = np.where(load.activation_offload, min(1.0, returning), 1.0)
        return cls(
            inner=run.again + np.where(run.again > 0, np.maximum(run.backward, run.moving), run.backward),
            returned=np.where(load.activation_offload, moved, 0.0),
            own=np.where(load.recompute_full, 0.0, share * run.layer),
        )
