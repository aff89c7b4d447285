"""The algorithm of COMET: recipe and model in, packed W4A4KV4 checkpoint and its accuracy out.

Importing this package teaches transformers to open packed folders, at the moment when transformers loads its own
quantizers and not before: nothing heavy is imported here.
"""

from comet_core.integrations import register_with_transformers

register_with_transformers()
