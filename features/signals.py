"""What one decode step shows: numbers computed from the next-token logits, for every row of a batch at once.

Adapter signals need only the logits that the server computes anyway. Probe signals compare them with the base's logits
for the same position. All are float32 and in nats, of the plain softmax (before temperature, penalties and masks).

Defined edge cases (p is the adapter's distribution, q the base's):

- a logit of -inf is a token of probability zero, and is fine;
- a row that holds NaN or +inf, or nothing but -inf, has no distribution: every signal of that row is NaN, which means
  missing, and no other row is touched; for probe signals it is enough that one of the two rows is so;
- one token in the vocabulary, or all mass on one: entropy 0, top1_prob 1, margin 1;
- a chosen token of probability zero has the log-probability -inf, and KL(p ‖ q) is +inf where q lacks a token of p;
  `Window` turns both into missing;
- a token id outside the vocabulary (a placeholder such as -1) makes only that row's token log-probability NaN.
"""

import math

import torch
from torch import Tensor

ADAPTER_SIGNALS = ("entropy", "top1_prob", "margin", "token_logprob")
PROBE_SIGNALS = ("kl", "js", "base_top1_agrees", "base_token_logprob", "base_entropy")

_LN2 = math.log(2.0)


def adapter_signals(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Signals of the distribution that the adapter gives, one row per request.

    Args:
        logits: [n, V] in any float dtype, left as it is.
        token_ids: [n] int64, the token chosen in each row.

    Returns:
        [n, 4] float32 in the order of `ADAPTER_SIGNALS`: entropy -Σ p ln p, p1, p1 - p2 and ln p[token], where p1 and
        p2 are the two largest probabilities.
    """
    log_p = _log_probabilities(logits)
    top, best = log_p.max(dim=1, keepdim=True)
    p = log_p.exp()
    entropy = _entropy(p, log_p)
    p1 = top.exp()
    p2 = p.scatter_(1, best, 0.0).amax(dim=1, keepdim=True)
    signals = torch.cat([entropy, p1, p1 - p2, _log_probability_of(log_p, token_ids)], dim=1)
    return signals.masked_fill_(~torch.isfinite(top), math.nan)


def probe_signals(logits: Tensor, base_logits: Tensor, token_ids: Tensor) -> Tensor:
    """Signals of how far the base's distribution lies from the adapter's, one row per request.

    Args:
        logits: [n, V] the adapter's logits.
        base_logits: [n, V] the base's logits at the same position over the same KV cache.
        token_ids: [n] int64, the token chosen in each row.

    Returns:
        [n, 5] float32 in the order of `PROBE_SIGNALS`: KL(p ‖ q), the Jensen-Shannon divergence (Lin 1991, equal
        weights, at most ln 2), whether the two argmaxes are equal (1.0 or 0.0; the lowest id wins a tie),
        ln q[token], and the entropy of q.
    """
    log_p, log_q = _log_probabilities(logits), _log_probabilities(base_logits)
    p, q = log_p.exp(), log_q.exp()
    # The argmaxes are those of the logits: rounding in the softmax can make a tie of what was none.
    agrees = logits.argmax(dim=1, keepdim=True) == base_logits.argmax(dim=1, keepdim=True)
    log_m = torch.logaddexp(log_p, log_q).sub_(_LN2)
    js = 0.5 * (_divergence(p, log_p, log_m) + _divergence(q, log_q, log_m))
    signals = torch.cat(
        [
            _divergence(p, log_p, log_q),
            js.clamp_(0.0, _LN2),
            agrees.float(),
            _log_probability_of(log_q, token_ids),
            _entropy(q, log_q),
        ],
        dim=1,
    )
    defined = torch.isfinite(log_p.amax(dim=1, keepdim=True) + log_q.amax(dim=1, keepdim=True))
    return signals.masked_fill_(~defined, math.nan)


def _log_probabilities(logits: Tensor) -> Tensor:
    """[n, V] float32 log-softmax; a row without a distribution comes out with a NaN maximum."""
    return torch.log_softmax(logits.float(), dim=1)


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    """[n, 1]; the floor keeps 0 · -inf from being NaN, and adding 0.0 turns -0.0 into 0.0."""
    floor = torch.finfo(torch.float32).min
    return (p * log_p.clamp(min=floor)).sum(dim=1, keepdim=True).neg_().clamp_(min=0.0).add_(0.0)


def _divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """[n, 1]: Σ p (ln p - ln q) over the tokens with p > 0, not below 0 (rounding can take it there)."""
    terms = torch.where(p > 0.0, p * (log_p - log_q), 0.0)
    return terms.sum(dim=1, keepdim=True).clamp_(min=0.0)


def _log_probability_of(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """[n, 1]: log_p at each row's token, NaN where the id is not in the vocabulary."""
    ids = token_ids.unsqueeze(1)
    size = log_p.shape[1]
    known = (ids >= 0) & (ids < size)
    return torch.where(known, log_p.gather(1, ids.clamp(0, size - 1)), math.nan)
