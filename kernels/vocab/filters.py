"""Top-k, top-p and min-p as one threshold a row: a token stays if its scaled logit is not below it.

The order is that of transformers: temperature, top-k, top-p over what top-k left, min-p. min-p keeps tokens
of at least `min_p` times the most likely one's probability; neither filter before it drops that token or
changes a ratio, so min-p would cut the same tokens anywhere in the order, but top-p's mass is taken before
min-p's cut. (vLLM cuts min-p first and takes top-p's mass over the rest.) Tokens that tie with the last one
kept stay, so the result does not depend on how a sort breaks ties. Masses are summed in float64: their last
bits depend on the width of the batch's candidates, and a seed's stream must not.
"""

from __future__ import annotations

import torch

# Tokens tried first for a nucleus on the CPU: top 1,024 of 248,320 logits take 1.1 ms there, a sort 24 ms.
_NUCLEUS_HEAD = 1024


def thresholds(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, *, sort: bool
) -> torch.Tensor:
    """The least scaled logit that each row keeps.

    scaled: [rows, vocab] float32, logits over temperature. top_k: [rows] int64, 0 for off. top_p: [rows]
    float32, 1 for off. min_p: [rows] float32, 0 for off. sort: whether any row has top_k or top_p on;
    without, no order is needed. Returns [rows, 1] float32, at most the row's maximum.
    """
    if not sort:
        return _min_p_threshold(scaled.amax(1, keepdim=True), min_p)
    ordered = scaled.sort(dim=1, descending=True).values
    threshold = _ordered_threshold(ordered, top_k, top_p, ordered)
    return torch.maximum(threshold, _min_p_threshold(ordered[:, :1], min_p))


def candidate_thresholds(
    ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`thresholds` from the best tokens alone, for rows that all have top-k on.

    ordered: [rows, n] float32, each row's n best scaled logits, best first, with n above every top_k (or the
    whole vocabulary). Returns the thresholds, [rows, 1] float32, and [rows] bool: rows where a tie at the
    k-th place may reach past the candidates, whose thresholds must come from the whole vocabulary.
    """
    kth = ordered.gather(1, (top_k - 1).unsqueeze(1))
    tied = (ordered[:, -1:] >= kth).squeeze(1)
    threshold = _ordered_threshold(ordered, top_k, top_p, ordered)
    return torch.maximum(threshold, _min_p_threshold(ordered[:, :1], min_p)), tied


def nucleus_thresholds(scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`thresholds` without top-k, for the CPU: sorts the whole vocabulary only where a nucleus is that large.

    Looks at values on the host, so it would make a device wait.
    """
    head = scaled.topk(min(_NUCLEUS_HEAD, scaled.shape[1]), dim=1).values
    off = torch.zeros(scaled.shape[0], dtype=torch.int64)
    threshold = _ordered_threshold(head, off, top_p, scaled)
    # A nucleus that takes the whole head may go on behind it.
    wide = (threshold <= head[:, -1:]).squeeze(1).nonzero().squeeze(1)
    if wide.numel():
        rows = scaled[wide]
        ordered = rows.sort(dim=1, descending=True).values
        threshold[wide] = _ordered_threshold(ordered, off[wide], top_p[wide], rows)
    return torch.maximum(threshold, _min_p_threshold(head[:, :1], min_p))


def _ordered_threshold(
    ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, support: torch.Tensor
) -> torch.Tensor:
    """Top-k, then top-p, of rows whose best tokens are known in order.

    ordered: [rows, n] float32, best first. support: [rows, m] float32, all logits that top-p's mass is over
    (before top-k). A token is in the nucleus if the mass before it is below top_p of the whole; the best
    always is.
    """
    width = ordered.shape[1]
    best = ordered[:, :1]
    last = torch.where(top_k > 0, top_k, width).clamp_(max=width).unsqueeze(1) - 1
    kth = torch.where((top_k > 0).unsqueeze(1), ordered.gather(1, last), -torch.inf)
    mass = (ordered - best).double().exp_().masked_fill_(ordered < kth, 0.0)
    if support is ordered:
        total = mass.sum(1, keepdim=True)
    else:
        total = (support - best).double().exp_().masked_fill_(support < kth, 0.0).sum(1, keepdim=True)
    before = mass.cumsum(1).sub_(mass)
    inside = (before < top_p.double().unsqueeze(1) * total) & (ordered >= kth)
    place = inside.sum(1, keepdim=True).clamp_(min=1) - 1
    cut = ordered.gather(1, place)
    return torch.where((top_p < 1.0).unsqueeze(1), cut, kth)


def _min_p_threshold(best: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """best: [rows, 1] float32, each row's largest scaled logit. p >= min_p * p_best, in logarithms."""
    return best + min_p.unsqueeze(1).log()
