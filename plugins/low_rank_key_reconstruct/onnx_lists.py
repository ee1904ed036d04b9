"""Lists of chunks inside ONNX functions: their tokens, and the rows of these in tables of pages."""

from plugins.onnx_body import FunctionBody, Value


class Lists:
    """The lists `chunks` [S, kv_heads, n] of sequences with the slots `slot` [S], in pages of `page_size`; the function
    has the attribute chunk_size.

    Tokens of a list are numbered together: [S, kv_heads * of_head]. `found` says which of them are listed.
    """

    def __init__(self, body: FunctionBody, page_size: Value) -> None:
        self._body, self._page_size = body, page_size
        self.zero = body.constant(0)
        self.chunk_size = body.int_attribute("chunk_size")
        self.sequences, self.kv_heads = body.size("slot", 0), body.size("chunks", 1)
        self.of_head = body.Mul(body.size("chunks", 2), self.chunk_size)
        self._shape = body.shape(self.sequences, body.Mul(self.kv_heads, self.of_head))
        self.slot = body.to_int64("slot")
        self.owns = body.GreaterOrEqual(self.slot, self.zero)
        self._inside = body.range(self.zero, self.chunk_size)
        self._is_listed = body.And(
            body.GreaterOrEqual(body.to_int64("chunks"), self.zero),
            body.Unsqueeze(self.owns, body.constant([1, 2])),
        )
        of_chunk = body.Unsqueeze(self._is_listed, body.constant([3]))
        found = body.Expand(of_chunk, body.shape(1, 1, 1, self.chunk_size))
        self.found = body.Reshape(found, self._shape, allowzero=1)

    def tokens(self, lists: str) -> Value:
        """Of each token of the lists `lists`, shaped like chunks, its number; 0 where it is not listed."""
        body = self._body
        first = body.Mul(body.Where(self._is_listed, body.to_int64(lists), self.zero), self.chunk_size)
        each = body.Add(body.Unsqueeze(first, body.constant([3])), self._inside)
        return body.Reshape(each, self._shape, allowzero=1)

    def rows(self, table: str, token: Value) -> Value:
        """The rows of tokens in what has the pages of `table`; 0 where they are not listed."""
        body = self._body
        page = body.GatherElements(body.to_int64(table), body.Div(token, self._page_size), axis=1)
        row = body.Add(body.Mul(page, self._page_size), body.Mod(token, self._page_size))
        return body.Where(self.found, row, self.zero)
