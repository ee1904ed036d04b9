"""What a request asks and gets, as plain data that every other part of the runtime reads."""
