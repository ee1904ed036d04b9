"""Plain sentences without digits that hide the facts of a prompt."""

import random

# fmt: off
_WHO = (
    "the teacher", "the farmer", "the sailor", "the baker", "the doctor", "the painter", "the miller",
    "the child", "the neighbor", "the traveler", "the captain", "the student",
    "the guard", "the singer", "the hunter", "the clerk",
)
_DOES = (
    "walked home", "waited outside", "talked about the weather", "sat down to rest", "told a story",
    "read the news", "cooked dinner", "looked at the sky", "slept for hours", "worked all day",
    "sang a song", "cleaned the room",
    "went to sleep", "wrote to a friend", "fed the horses", "watched the people",
)
_WHEN = (
    "in the morning", "in the evening", "before noon", "after lunch", "at night", "last week", "that day",
    "in winter", "in summer", "on Sunday",
    "on Monday", "as usual", "without a word", "again", "for a while", "later",
)
_PLAIN = (
    "The weather was good.", "It rained all day.", "Nothing else happened.", "The sun was high.",
    "The wind was strong.", "Snow was falling.", "The days were short.", "Everyone was tired.",
    "Nobody said much.", "The night was cold.", "There was time to think.",
    "The streets were full of people.", "The grass was wet.", "The birds were loud.",
)
# fmt: on


def sentence(rng: random.Random) -> str:
    """One sentence of 5 to 12 words, ending in a full stop."""
    shape = rng.randrange(4)
    if shape == 0:
        return rng.choice(_PLAIN)
    who, does = rng.choice(_WHO), rng.choice(_DOES)
    if shape == 1:
        return f"{who[0].upper()}{who[1:]} {does}."
    when = rng.choice(_WHEN)
    if shape == 2:
        return f"{who[0].upper()}{who[1:]} {does} {when}."
    return f"{when[0].upper()}{when[1:]}, {who} {does}."
