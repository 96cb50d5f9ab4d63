"""What Detectron2 has to know of a data set's keypoints: names, mirrored pairs, connections."""

from __future__ import annotations

import re
from typing import Any

from .needs import Needs

_OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
_WORD = re.compile("left|right", re.IGNORECASE)
# Alone (l_eye, EyeL), where a name without its partner is an error; or in front (lEye, leye),
# where it may as well be the first letter of a word.
_LETTER_ALONE = re.compile(r"(?<![A-Za-z])[LRlr](?![A-Za-z])|(?<=[a-z])[LR](?![A-Za-z])")
_LETTER = re.compile(rf"{_LETTER_ALONE.pattern}|(?<![A-Za-z])[LRlr](?=[A-Za-z])")
_LINE_COLOUR = (102, 204, 255)


def keypoint_metadata(categories: list[dict[str, Any]], needs: Needs, path: str) -> dict[str, Any]:
    """The metadata of a data set with keypoints, from the categories of its file.

    keypoint_names: of "keypoints" in the categories; without them, where images are not
        flipped, keypoint_1, keypoint_2, ...
    keypoint_flip_map: pairs of names that change places in a mirrored image: names that differ
        in left/right or l/r alone. A name of no side keeps its place.
    keypoint_connection_rules: lines to draw, of the categories' "skeleton"; may be missing

    Raises ValueError, in one line, where the categories differ in their names, where their
    number is not needs.num_keypoints, and with needs.flips where a name of one side has no
    partner, or names are missing.
    """
    named = [category for category in categories if category.get("keypoints")]
    if not named and needs.flips:
        raise ValueError(
            f"{path}: its categories have no 'keypoints', whose names say what to exchange when "
            "an image is flipped: add them, or set INPUT.RANDOM_FLIP none"
        )
    for category in named:
        _check_names(category, named[0], needs, path)
    made_up = [f"keypoint_{number}" for number in range(1, (needs.num_keypoints or 0) + 1)]
    names = named[0]["keypoints"] if named else made_up
    metadata = {
        "keypoint_names": names,
        "keypoint_flip_map": _flip_map(names, path) if needs.flips else [],
    }
    lines = _lines(named[0].get("skeleton"), names) if named else []
    return {**metadata, "keypoint_connection_rules": lines} if lines else metadata


def _check_names(category: dict[str, Any], first: dict[str, Any], needs: Needs, path: str) -> None:
    names, where = category["keypoints"], f"{path}: category {category['id']}"
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise ValueError(f"{where}: 'keypoints' must be a list of names")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: the keypoint {name!r} appears twice")
    if len(names) != needs.num_keypoints:
        raise ValueError(
            f"{where} has {len(names)} keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is "
            f"{needs.num_keypoints}: set it to {len(names)}"
        )
    if names != first["keypoints"]:
        raise ValueError(
            f"{where} has other 'keypoints' than category {first['id']}: Detectron2's keypoint "
            "head knows one list of them"
        )


def _flip_map(names: list[str], path: str) -> list[tuple[str, str]]:
    partners = {name: _partner(name, names, path) for name in names}
    for name, partner in partners.items():
        if partners[partner] != name:
            raise _ambiguous(name, [partner, partners[partner]], path)
    order = {name: position for position, name in enumerate(names)}
    return [(a, b) for a, b in partners.items() if order[a] < order[b]]


def _partner(name: str, names: list[str], path: str) -> str:
    """The name on the other side; the name itself where it has no side."""
    known = {other.lower(): other for other in names}
    for pattern in (_WORD, _LETTER):
        mirrored = {text.lower() for text in _mirrored(name, pattern)}
        found = sorted(known[text] for text in mirrored & known.keys() - {name.lower()})
        if len(found) > 1:
            raise _ambiguous(name, found, path)
        if found:
            return found[0]
    for pattern in (_WORD, _LETTER_ALONE):
        if pattern.search(name):
            raise ValueError(
                f"{path}: keypoint {name!r} has no partner {_mirrored(name, pattern)[-1]!r} to "
                "change places with when an image is flipped: add or rename one, or set "
                "INPUT.RANDOM_FLIP none"
            )
    return name


def _mirrored(name: str, pattern: re.Pattern[str]) -> list[str]:
    """The name with a side exchanged at each spot where it has one, and at all of them."""
    spots = [match.span() for match in pattern.finditer(name)]
    texts = [name[:a] + _OTHER_SIDE[name[a:b].lower()] + name[b:] for a, b in spots]
    return [*texts, pattern.sub(lambda match: _OTHER_SIDE[match[0].lower()], name)]


def _ambiguous(name: str, others: list[str], path: str) -> ValueError:
    choices = " or ".join(repr(other) for other in others)
    return ValueError(
        f"{path}: keypoint {name!r} may change places with {choices} when an image is flipped: "
        "rename it, or set INPUT.RANDOM_FLIP none"
    )


def _lines(skeleton: Any, names: list[str]) -> list[tuple[str, str, tuple[int, int, int]]]:
    """The lines of a skeleton, pairs of numbers from 1; those that are none are left out."""
    pairs = skeleton if isinstance(skeleton, list) else []
    numbers = range(1, len(names) + 1)
    return [
        (names[pair[0] - 1], names[pair[1] - 1], _LINE_COLOUR)
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(n in numbers for n in pair)
    ]
