"""The algorithm of COMET: recipe and model in, packed W4A4KV4 checkpoint and its accuracy out."""
