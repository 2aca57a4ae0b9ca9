"""From texts to batches of token ids."""
