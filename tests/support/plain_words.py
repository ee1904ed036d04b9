"""Stop strings, stop words and bad words looked for one after another: what the automaton is compared with."""


class PlainStopStrings:
    """``StopStrings`` by its definition: every stop string is looked for in every piece."""

    def __init__(self, stop):
        self._stop = tuple(stop)
        self._max_held = max((len(s) for s in self._stop), default=1) - 1
        self.held = ""

    def push(self, text, search=True):
        known, text = len(self.held), self.held + text
        best = None
        for stop in self._stop if search else ():
            at = text.find(stop, max(0, known - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            self.held = ""
            return text[: best[1]], best[2]
        held = longest_begun(self._stop, text, self._max_held)
        self.held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self):
        held, self.held = self.held, ""
        return held


def longest_begun(words, read, most):
    """How many of the last symbols of ``read`` begin a word that they do not complete; ``most`` at most."""
    for k in range(min(most, len(read)), 0, -1):
        if any(len(word) > k and word[:k] == read[len(read) - k :] for word in words):
            return k
    return 0


def stop_word(words, generated):
    """The first word of the list that ``generated`` ends with, or None."""
    for word in words:
        if len(word) <= len(generated) and tuple(generated[len(generated) - len(word) :]) == tuple(word):
            return tuple(word)
    return None


def bad_tokens(words, generated):
    """The tokens that would complete a word."""
    return {
        word[-1]
        for word in words
        if len(word) - 1 <= len(generated) and tuple(generated[len(generated) - len(word) + 1 :]) == tuple(word[:-1])
    }
