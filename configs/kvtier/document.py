"""The demo's document: the log of a lighthouse, written by a generator so that it is ours and always the same."""

from __future__ import annotations

import random

# The answer stands in the title only, some 4,900 tokens before: it needs the KV of the prompt's first chunk.
QUESTION = "Question: Who kept this log?\nAnswer: This log was kept by"

_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_FORCES = ("a light air", "a gentle breeze", "a fresh breeze", "a strong wind", "half a gale", "a full gale")
_SEAS = ("smooth as slate", "slight, with a long swell", "moderate and grey", "rough over the bar", "high and breaking")
_SHIPS = ("schooner", "brig", "collier", "trawler", "barque", "mail steamer", "ketch", "pilot cutter")
_NAMES = (
    "Amity", "Bonny Jane", "Cormorant", "Dunbar Castle", "Emmeline", "Fair Isle", "Good Intent", "Halcyon", "Ivy",
    "Juno", "Kittiwake", "Laurel", "Margaret Ann", "Northern Light", "Osprey", "Provider", "Quest", "Resolute",
)  # fmt: skip
_PORTS = ("Wick", "Leith", "Bergen", "Hull", "Stornoway", "Riga", "Kirkwall", "Aberdeen", "Rotterdam", "Lerwick")
_CARGOES = ("coal", "salt herring", "timber", "slates", "oats", "rope and canvas", "glass", "wool", "lamp oil")
_WORKS = (
    "Trimmed the wicks and polished the great lens before noon.",
    "Carried eleven cans of oil up from the store and entered them in the book.",
    "Whitewashed the seaward wall of the tower as far as the second window.",
    "Cleaned the clockwork, which had lost four minutes since Sunday.",
    "Mended the gutter over the kitchen and drew fresh water from the well.",
    "Scraped rust from the gallery rail and gave it a coat of red lead.",
    "Took soundings at the landing and found the sand a fathom higher than last year.",
    "Repaired the signal halyard that had chafed through in the night.",
)
_REMARKS = (
    "The assistant keeper, Mr. Tolland, has a cough and was let off the middle watch.",
    "A flock of fieldfares struck the lantern at two in the morning; nineteen lay on the gallery.",
    "The relief boat could not land and lay off until the tide served.",
    "Mrs. Aldridge sent over bread, a cheese and three newspapers, which were read aloud.",
    "The barometer fell faster than I have seen it fall this winter.",
    "Seals were singing on the skerry until the moon went down.",
    "Nothing further to remark, and glad of it.",
    "The fog signal was sounded for nine hours without a pause.",
)
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")


def lighthouse_log(entries: int) -> str:
    """`entries` days of the log, about 110 tokens each; equal for equal `entries`, on any machine."""
    draw = random.Random(1887)  # The integer methods of this generator are the same in every Python version.
    days = [_entry(day, draw) for day in range(entries)]
    title = "LOG OF THE LIGHT ON CARRICK SKERRY, kept by Hannah Aldridge, principal keeper, in the year 1887.\n\n"
    return title + "\n\n".join(days) + "\n\n"


def _entry(day: int, draw: random.Random) -> str:
    def pick(options: tuple[str, ...]) -> str:
        return options[draw.randrange(len(options))]

    ship = f"the {pick(_SHIPS)} {pick(_NAMES)}, {pick(_PORTS)} for {pick(_PORTS)} with {pick(_CARGOES)}"
    return (
        f"{_MONTHS[day // 28 % len(_MONTHS)]} {day % 28 + 1}. Wind {pick(_WINDS)}, {pick(_FORCES)}; "
        f"sea {pick(_SEAS)}. "
        f"Glass at {28 + draw.randrange(3)}.{draw.randrange(100):02d}. Lit the lamp at {4 + draw.randrange(5)}."
        f"{draw.randrange(60):02d} in the evening and put it out at {4 + draw.randrange(5)}.{draw.randrange(60):02d} "
        f"in the morning. At {1 + draw.randrange(12)} o'clock there passed {ship}. {pick(_WORKS)} {pick(_REMARKS)}"
    )
