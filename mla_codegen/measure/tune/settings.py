"""From winners to what a shape has to say: no more than what it does not inherit anyway."""

from collections.abc import Mapping
from typing import Any

from mla_codegen.measure.tune.space import Candidate, Space

Overrides = dict[str, Any]


def needed(space: Space, winner: Candidate) -> Overrides:
    """The fewest of the winner's settings that give its kernel when they are laid over the spec as it is.

    A family that is new is said in any case: other settings may imply it, but nobody could tell.
    """
    settings = dict(winner.settings)
    moved = winner.kernel.family != space.current.kernel.family
    for knob in list(settings):
        if knob == "family" and moved:
            continue
        fewer = {name: value for name, value in settings.items() if name != knob}
        try:
            if space.candidate(fewer).gives(winner):
                settings = fewer
        except ValueError:
            continue
    return settings


def for_shape(per_kv: Mapping[str, Overrides], kvs: list[str]) -> tuple[Overrides, dict[str, Overrides]]:
    """What to say for the whole shape, and for single KV dtypes: (settings, settings by KV dtype).

    per_kv   what each KV dtype needs; a dtype that is not there keeps what it has
    kvs      the spec's KV dtypes, the preferred one first

    Where every dtype needs a knob, the preferred one's value becomes the shape's, and the others say where they differ.
    """
    common: Overrides = {}
    single: dict[str, Overrides] = {kv: {} for kv in kvs}
    for knob in dict.fromkeys(name for settings in per_kv.values() for name in settings):
        said = {kv: settings[knob] for kv, settings in per_kv.items() if knob in settings}
        if len(said) == len(kvs):
            common[knob] = said[kvs[0]]
        for kv, value in said.items():
            if common.get(knob) != value:
                single[kv][knob] = value
    return common, {kv: settings for kv, settings in single.items() if settings}
