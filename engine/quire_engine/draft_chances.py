"""DraftChances: how often drafts are accepted, by the chance that their proposer states.

A model that drafts says how likely it finds a token. It is accepted more often than that where the model that it drafts
for takes its likeliest token: both may have the same favourite and be unsure of it. So drafts are compared with the
tokens that came in their place, for each part of the scale by itself::

    its own chance     0.0 … 0.06 … 0.13 …    … 0.5 … 0.56 …      … 1.0
    accepted           0.02    0.11             0.83                0.99
"""

import msgspec

_NUM_PARTS = 16
_PRIOR_WEIGHT = 4.0
"""How many comparisons the given chance weighs as much as."""
_KEPT = 0.998
"""Weight that earlier comparisons of a part keep at each new one."""


class DraftChances(msgspec.Struct, array_like=True):
    """What became of the drafts of all requests of a kind."""

    accepted: list[float] = msgspec.field(default_factory=lambda: [0.0] * _NUM_PARTS)
    """By part of [0, 1]; older ones count less."""
    compared: list[float] = msgspec.field(default_factory=lambda: [0.0] * _NUM_PARTS)
    """Likewise."""

    def of(self, chance: float) -> float:
        """How likely a draft of this chance is accepted if those before it are: at first, that likely."""
        part = _part(chance)
        return (self.accepted[part] + _PRIOR_WEIGHT * chance) / (self.compared[part] + _PRIOR_WEIGHT)

    def learn(self, chance: float, is_accepted: bool) -> None:
        """Note what became of a draft whose predecessors were accepted."""
        part = _part(chance)
        self.accepted[part] = _KEPT * self.accepted[part] + is_accepted
        self.compared[part] = _KEPT * self.compared[part] + 1.0


def _part(chance: float) -> int:
    return min(int(chance * _NUM_PARTS), _NUM_PARTS - 1)
