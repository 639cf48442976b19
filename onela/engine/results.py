"""From beams to items: order, look up, name."""

from __future__ import annotations

import torch

from onela.engine.active import ActiveRequest
from onela.engine.request import FinishReason, RecommendedItem, Result, Timings, Usage
from onela.items import SidVocabulary


def make_result(request: ActiveRequest, vocabulary: SidVocabulary, *, now: float) -> Result:
    """Order a finished request's beams by score and look up their items; `now` is on the scheduler's clock."""
    beams, params, catalog = request.beams, request.params, request.served.catalog
    scores = beams.cum_logprobs.cpu()
    # Beams stand in order of their SIDs, and a stable sort keeps that order among equal scores.
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.isfinite(scores[order])]
    num_legal = order.shape[0]
    order = order[: request.asked]
    codes = beams.codes.cpu()[order].numpy()
    leaves = beams.trie_nodes.cpu()[order].tolist()
    length = codes.shape[1]
    complete = length == vocabulary.num_levels
    # A prefix has fewer levels than the vocabulary, so the levels are looked up one by one.
    sids = [vocabulary.codes(level)[codes[:, level]].tolist() for level in range(length)]
    tokens = [vocabulary.token_ids(level)[codes[:, level]].tolist() for level in range(length)]
    paths = None
    if request.path_scores is not None:
        paths = request.path_scores.cpu()[order].diff(dim=1, prepend=torch.zeros(len(order), 1)).tolist()
    items = []
    for i, score in enumerate(scores[order].tolist()):
        found = catalog.items_of(leaves[i]) if catalog is not None and complete else []
        if request.eligibility is not None:
            found = request.eligibility.keep(found)
        items.append(
            RecommendedItem(
                sid=tuple(level[i] for level in sids),
                item_ids=tuple(catalog.item_id(item) for item in found) if catalog else (),
                titles=tuple(catalog.title(item) for item in found) if catalog else (),
                cum_logprob=score,
                sequence_score=score / length**params.length_penalty,
                token_ids=tuple(level[i] for level in tokens),
                token_logprobs=None if paths is None else tuple(paths[i]),
            )
        )
    enough = len(items) == request.asked
    finish_reason: FinishReason = "stop" if enough else "exhausted"
    return Result(
        items=tuple(items),
        finish_reason=finish_reason,
        reason=None
        if enough
        else f"{request.asked} were asked for, {num_legal} legal ones were in the beams",
        usage=Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=length,
            beam_widths=request.widths,
            num_legal=num_legal,
            cached_tokens=request.cached_tokens,
        ),
        request_id=request.request.request_id,
        catalog_version=request.served.version,
        timings=_timings(request, now),
    )


def empty_result(request: ActiveRequest) -> Result:
    """The answer to a request whose filters leave nothing: known before anything has run."""
    usage = Usage(len(request.prompt_token_ids), 0, (), 0)
    return Result(
        items=(),
        finish_reason="filtered",
        reason="no item of the catalogue is left by exclude_item_ids, allow_item_ids and filter",
        usage=usage,
        request_id=request.request.request_id,
        catalog_version=request.served.version,
        timings=Timings(0.0, 0.0, 0.0, 0.0),
    )


def _timings(request: ActiveRequest, now: float) -> Timings | None:
    if request.admitted_at is None or not request.chosen_at:
        return None
    return Timings(
        queue=request.admitted_at - request.arrived_at,
        prefill=request.chosen_at[0] - request.admitted_at,
        decode=request.chosen_at[-1] - request.chosen_at[0],
        total=now - request.arrived_at,
    )
