"""Drafting by models: they run on the rank that samples, at the end of a step, and draft the tokens after it.

::

    submit    target model ─► hidden states ─► sample
    result    tokens ─► `Drafting` ─► a `DraftMethod` ─► drafts, which go to the scheduler with the tokens
                                      chain   a draft model, or a head (EAGLE-3, MTP): one token after the other
                                      medusa  all tokens at once, from the hidden state of the last one
                                      block   all tokens in one pass, in which they see each other (DFlash)
                                      assistant  one after the other, from the target's keys and values

The next step computes as many of them as pay off. With `acceptance: exact` nothing here can change a token of the
output, and what the methods keep (keys and values of their own) may be missing or stale: that only costs acceptance.
"""
