"""What was diagnosed, for people: facts, words, terminal, page."""
