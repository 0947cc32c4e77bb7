"""Rendered Gluon in the names of one Triton release: templates are written in those of the newest."""

import re

from mla_codegen.catalog.releases import Release


def named_for(release: Release, text: str) -> str:
    """`text` with each name of the newest release exchanged for what `release` calls it."""
    for newest, name in release.names:
        start = "" if newest.startswith(".") else r"(?<![\w.])"
        text = re.sub(rf"{start}{re.escape(newest)}\b", name, text)
    return text
