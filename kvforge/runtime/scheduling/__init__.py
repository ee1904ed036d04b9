"""Which tokens of which sequences a step computes, and in which pages: numbers, never tensors."""
